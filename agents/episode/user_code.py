"""Tells a user's own source files from libraries, so that an error on a tape names a line that the user can change."""

from __future__ import annotations

import functools
import sysconfig
from pathlib import Path

_PACKAGE = Path(__file__).resolve().parents[2]
_FLOORS = ("tapes", "envs", "agents", "finetune", "cli")


@functools.lru_cache(maxsize=4096)
def is_user_code(file: str) -> bool:
    """Whether a file is neither Python's, nor an installed package's, nor Tapereel's own.

    Code typed into an interpreter or a notebook counts as the user's; `<string>` doesn't, because dataclasses compile
    their methods under that name.
    """
    if file.startswith(tuple(f"{_PACKAGE / name}/" for name in _FLOORS)):
        return False
    if file.startswith("<"):
        return file.startswith(("<stdin", "<ipython"))
    # The folder of a user's project may hold the virtual environment, so the project's path alone decides nothing.
    libraries = (sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib"))
    return not file.startswith(tuple(f"{path}/" for path in libraries))
