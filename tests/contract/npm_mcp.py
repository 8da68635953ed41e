"""Install what tests need from npm: an MCP server that somebody else wrote, and axe-core, which checks the viewer's
accessibility. Version 1 of the MCP SDK is installed too.

    python -m tests.contract.npm_mcp            (into .contract/npm and .contract/mcp1; does nothing where they are)

About 100 MB. Needs node and npm; where there is no npm it says so, and the tests that need it are skipped.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

from .environments import install, make

ROOT = Path(__file__).resolve().parents[2]
FOLDER = Path(os.environ.get("TAPEREEL_NPM_ENVIRONMENT", ROOT / ".contract" / "npm"))
PACKAGES = ("@modelcontextprotocol/server-everything@2026.8.31", "axe-core@4.14.1")
SERVER = FOLDER / "node_modules" / "@modelcontextprotocol" / "server-everything" / "dist" / "index.js"
AXE = FOLDER / "node_modules" / "axe-core" / "axe.min.js"
OLDER = Path(os.environ.get("TAPEREEL_MCP1_ENVIRONMENT", ROOT / ".contract" / "mcp1"))
OLDER_PYTHON = OLDER / "bin" / "python"
OLDER_DONE = OLDER / "complete"


def main() -> None:
    if OLDER_DONE.exists():
        print(f"{OLDER} is there already")
    else:
        install(make(OLDER), "mcp<2", "pydantic>=2.11", "pyyaml>=6", "rich>=13", "pillow>=11")
        OLDER_DONE.touch()
    if SERVER.exists() and AXE.exists():
        print(f"{FOLDER} is there already")
        return
    npm = shutil.which("npm")
    if npm is None:
        print("there is no npm on this machine: the tests that need a package from npm will be skipped")
        return
    FOLDER.mkdir(parents=True, exist_ok=True)
    subprocess.run([npm, "install", "--no-audit", "--no-fund", "--prefix", FOLDER, *PACKAGES], check=True, timeout=600)


if __name__ == "__main__":
    sys.exit(main())
