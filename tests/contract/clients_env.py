"""Make the environments of the unmodified clients that are run through the gateway, and of the models of ATIF.

    python -m tests.contract.clients_env         (into .contract/clients; does nothing where it is there already)

About 1.6 GB: 320 MB of Python packages, 420 MB of Codex, 380 MB of Claude Code, 25 MB of Vercel's AI SDK, and 400 MB of
two clients that pin other versions. Needs node, npm, and Python 3.12, as one of the clients does. It is apart because
the clients pin versions of their own, and most of them are used nowhere else.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from .environments import install, make

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
APART = {"browser-use": "browser-use==0.13.14", "agency-swarm": "agency-swarm==1.11.0"}
"""Clients that pin other versions than PACKAGES: `anthropic` below 2, and `openai` below 2.45."""
MADE = "\n".join([*PACKAGES, *APART.values(), *NPM_PACKAGES])


def python_of(client: str) -> Path:
    """The Python that runs this client."""
    return FOLDER / client / "bin" / "python" if client in APART else PYTHON


def is_there() -> bool:
    return DONE.exists() and DONE.read_text() == MADE


def main() -> None:
    if is_there():
        print(f"{FOLDER} is there already")
        return
    DONE.unlink(missing_ok=True)
    install(make(FOLDER, "3.12"), *PACKAGES)
    for client, package in APART.items():
        install(make(FOLDER / client, "3.12"), package)
    npm = ["npm", "install", "--no-audit", "--no-fund", "--loglevel=error", "--prefix", FOLDER, *NPM_PACKAGES]
    subprocess.run(npm, check=True, timeout=600)
    for program in ("codex", "claude"):
        subprocess.run([PROGRAMS / program, "--version"], check=True, timeout=60)
    DONE.write_text(MADE)


if __name__ == "__main__":
    sys.exit(main())
