"""Make the environment of the unmodified clients that are run through the gateway, and of the models of ATIF.

    python tests/contract/clients_env.py         (into .contract/clients; does nothing where it is there already)

About 1.2 GB: 320 MB of Python packages, 420 MB of Codex, 380 MB of Claude Code and 25 MB of Vercel's AI SDK. Needs node
and npm. It is apart because the clients pin versions of their own, and most of them are used nowhere else.
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
PROGRAMS = FOLDER / "node_modules" / ".bin"
DONE = FOLDER / "complete"
PACKAGES = [
    "openai==3.57.0",
    "anthropic==2.14.0",
    "openai-agents==0.24.0",
    "pydantic-ai-slim[openai,anthropic]==2.68.0",
    "smolagents==1.26.0",
    "langchain==1.5.2",
    "langchain-openai==1.7.4",
    "langchain-anthropic==1.7.10",
    "langgraph==1.2.24",
    "atif==1.8.0",
]
NPM_PACKAGES = [
    "@openai/codex@0.171.0",
    "@anthropic-ai/claude-code@2.1.332",
    "ai@7.0.173",
    "@ai-sdk/openai@4.0.118",
    "@ai-sdk/anthropic@4.0.105",
    "zod@4.6.7",
]


MADE = "\n".join([*PACKAGES, *NPM_PACKAGES])


def is_there() -> bool:
    return DONE.exists() and DONE.read_text() == MADE


def main() -> None:
    if is_there():
        print(f"{FOLDER} is there already")
        return
    DONE.unlink(missing_ok=True)
    if not PYTHON.exists():
        venv.create(FOLDER, with_pip=True)
    command = [PYTHON, "-m", "pip", "--disable-pip-version-check", "install", "--quiet", *PACKAGES]
    subprocess.run(command, check=True, timeout=600)
    npm = ["npm", "install", "--no-audit", "--no-fund", "--loglevel=error", "--prefix", FOLDER, *NPM_PACKAGES]
    subprocess.run(npm, check=True, timeout=600)
    for program in ("codex", "claude"):
        subprocess.run([PROGRAMS / program, "--version"], check=True, timeout=60)
    DONE.write_text(MADE)


if __name__ == "__main__":
    sys.exit(main())
