"""Make the environment of the unmodified clients that are run through the gateway, and of the models of ATIF.

    python tests/contract/clients_env.py         (into .contract/clients; does nothing where it is there already)

About 120 MB. It is apart because the clients pin versions of their own, and `anthropic` is used nowhere else.
"""

from __future__ import annotations

import os
import subprocess
import sys
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FOLDER = Path(os.environ.get("TAPEREEL_CLIENTS_ENVIRONMENT", ROOT / ".contract" / "clients"))
PYTHON = FOLDER / "bin" / "python"
DONE = FOLDER / "complete"
PACKAGES = [
    "openai==3.57.0",
    "anthropic==2.14.0",
    "openai-agents==0.24.0",
    "pydantic-ai-slim[openai,anthropic]==2.68.0",
    "atif==1.8.0",
]


def main() -> None:
    made = "\n".join(PACKAGES)
    if DONE.exists() and DONE.read_text() == made:
        print(f"{FOLDER} is there already")
        return
    DONE.unlink(missing_ok=True)
    if not PYTHON.exists():
        venv.create(FOLDER, with_pip=True)
    command = [PYTHON, "-m", "pip", "--disable-pip-version-check", "install", "--quiet", *PACKAGES]
    subprocess.run(command, check=True, timeout=600)
    DONE.write_text(made)


if __name__ == "__main__":
    sys.exit(main())
