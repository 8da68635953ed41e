"""Makes the virtual environments of the contract tests with uv: pip takes minutes, and uv takes seconds."""

from __future__ import annotations

import os
import subprocess
import sys
from ast import literal_eval
from pathlib import Path

UV = [sys.executable, "-m", "uv", "--quiet"]
OPTIONS = {
    "index-url": "--default-index",
    "extra-index-url": "--index",
    "find-links": "--find-links",
    "constraint": "--constraint",
}
"""Name of a setting in pip -> the option of uv."""


def make(folder: Path, python: str = sys.executable) -> Path:
    """Make an empty environment, in place of one that is there. `python` is a path or a version. Returns its Python."""
    # pyenv's `python3.12` works where pyenv is asked for that version, and no other program reads the variable.
    asked = os.environ | ({} if Path(python).is_absolute() else {"PYENV_VERSION": python})
    subprocess.run([*UV, "venv", "--clear", "--python", python, folder], env=asked, check=True, timeout=120)
    return folder / "bin" / "python"


def install(python: Path, *words: object) -> None:
    """`uv pip install` for this Python, from the places that pip installs from."""
    print("install", *words, flush=True)
    options, variables = places()
    command = [*UV, "pip", "install", "--python", python, *options, *map(str, words)]
    subprocess.run(command, env=os.environ | variables, check=True, timeout=900)


def uninstall(python: Path, *packages: str) -> None:
    """Remove those of the packages that are installed."""
    subprocess.run([*UV, "pip", "uninstall", "--python", python, *packages], check=True, timeout=120)


def places() -> tuple[list[str], dict[str, str]]:
    """pip's own settings as uv's options and variables. uv reads neither pip's files nor its variables."""
    listed = subprocess.check_output([sys.executable, "-m", "pip", "config", "list"], text=True).splitlines()
    settings = dict[str, str]()
    for name, _, value in (line.partition("=") for line in listed):
        section, _, key = name.rpartition(".")
        if section in (":env:", "global", "install"):
            settings = {key: literal_eval(value)} | settings  # the first stands: variables are listed before files
    options = [f"{option}={place}" for key, option in OPTIONS.items() for place in settings.get(key, "").split()]
    certificates = {"SSL_CERT_FILE": settings["cert"]} if "cert" in settings else {}
    return ["--index-strategy=unsafe-best-match", *options], certificates
