"""Tapereel: one record of an agent's episode that is what you replay, what you audit and what you train on.

The names below are the front door; each is imported from its package at first use, so that `import tapereel` costs
next to nothing. Everything else lives one level down: `tapereel.tapes`, `.envs`, `.agents`, `.finetune`.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .agents import (
        LLM,
        Agent,
        ChatAgent,
        Limits,
        ReplayEngine,
        ScriptedEngine,
        agent,
        delegate,
        rollout,
        rollout_group,
    )
    from .agents.engines.embedded.embedded_engine import EmbeddedEngine
    from .agents.rendering.renderer import Renderer
    from .envs import Environment, Outcome, Taskset, check_env
    from .finetune import Loop, Trainer, get_recipe, rows
    from .tapes import Action, Observation, Sampling, Tape, Task, Thought
    from .tapes.common.config import load_config
    from .tapes.store.store import Store

__all__ = [
    "LLM",
    "Action",
    "Agent",
    "ChatAgent",
    "EmbeddedEngine",
    "Environment",
    "Limits",
    "Loop",
    "Observation",
    "Outcome",
    "Renderer",
    "ReplayEngine",
    "Sampling",
    "ScriptedEngine",
    "Store",
    "Tape",
    "Task",
    "Taskset",
    "Thought",
    "Trainer",
    "agent",
    "check_env",
    "delegate",
    "get_recipe",
    "load_config",
    "rollout",
    "rollout_group",
    "rows",
]

_HOME = {
    **dict.fromkeys(("LLM", "Agent", "ChatAgent", "Limits", "ReplayEngine", "ScriptedEngine"), "agents"),
    **dict.fromkeys(("agent", "delegate", "rollout", "rollout_group"), "agents"),
    "EmbeddedEngine": "agents.engines.embedded.embedded_engine",
    "Renderer": "agents.rendering.renderer",
    **dict.fromkeys(("Environment", "Outcome", "Taskset", "check_env"), "envs"),
    **dict.fromkeys(("Loop", "Trainer", "get_recipe", "rows"), "finetune"),
    **dict.fromkeys(("Action", "Observation", "Sampling", "Tape", "Task", "Thought"), "tapes"),
    "load_config": "tapes.common.config",
    "Store": "tapes.store.store",
}
"""name -> module inside the package."""


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        value = getattr(importlib.import_module(f".{_HOME[name]}", __name__), name)
    except ModuleNotFoundError as error:
        from .tapes.common.extras import raise_missing

        raise_missing(error, f"tapereel.{name}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
