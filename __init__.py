"""Tapereel: one record of an agent's episode that is what you replay, what you audit and what you train on.

The names below are the front door; each is imported from its package at first use, so that `import tapereel` costs
next to nothing. Everything else lives one level down: `tapereel.tapes`, `.envs`, `.agents`, `.finetune`.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .envs.base import Environment, Outcome
    from .tapes import Action, Observation, Tape, Task, Thought
    from .tapes.config import load_config

__all__ = ["Action", "Environment", "Observation", "Outcome", "Tape", "Task", "Thought", "load_config"]

_HOME = {
    "Action": "tapes",
    "Environment": "envs.base",
    "Observation": "tapes",
    "Outcome": "envs.base",
    "Tape": "tapes",
    "Task": "tapes",
    "Thought": "tapes",
    "load_config": "tapes.config",
}
"""name -> module inside the package."""


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f".{_HOME[name]}", __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
