"""Tapereel: LLM agents act in environments, and each episode is one record that is replayed, audited and trained on.

`import tapereel as tr` gives `tr.run`, `tr.train`, `tr.evaluate`, `tr.open` and the classes that a script needs. Each
name is imported at its first use, so `import tapereel` stays fast. Everything else is one level down: `tapereel.tapes`,
`.envs`, `.agents`, `.finetune`.
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
        ScriptedEngine,
        agent,
        delegate,
        rollout,
    )
    from .agents.gateway import Program
    from .envs import Environment, Outcome, Rewards, Taskset, check_env
    from .envs.adapters.tools import ToolEnvironment
    from .finetune import get_recipe, rows
    from .finetune.api import Run, evaluate, open, run, save_tiny_model, train
    from .tapes import Action, Observation, Picture, Sampling, Tape, Task
    from .tapes.store.store import Store

__all__ = [
    "LLM",
    "Action",
    "Agent",
    "ChatAgent",
    "Environment",
    "Limits",
    "Observation",
    "Outcome",
    "Picture",
    "Program",
    "Rewards",
    "Run",
    "Sampling",
    "ScriptedEngine",
    "Store",
    "Tape",
    "Task",
    "Taskset",
    "ToolEnvironment",
    "agent",
    "check_env",
    "delegate",
    "evaluate",
    "get_recipe",
    "open",
    "rollout",
    "rows",
    "run",
    "save_tiny_model",
    "train",
]

_HOME = {
    **dict.fromkeys(("LLM", "Agent", "ChatAgent", "Limits", "ScriptedEngine"), "agents"),
    **dict.fromkeys(("agent", "delegate", "rollout"), "agents"),
    "Program": "agents.gateway",
    **dict.fromkeys(("Environment", "Outcome", "Rewards", "Taskset", "check_env"), "envs"),
    "ToolEnvironment": "envs.adapters.tools",
    **dict.fromkeys(("get_recipe", "rows"), "finetune"),
    **dict.fromkeys(("Run", "evaluate", "open", "run", "save_tiny_model", "train"), "finetune.api"),
    **dict.fromkeys(("Action", "Observation", "Picture", "Sampling", "Tape", "Task"), "tapes"),
    "Store": "tapes.store.store",
}
"""name -> module inside the package."""


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from .cli import remedies  # noqa: F401  # errors then name commands and settings

    try:
        value = getattr(importlib.import_module(f".{_HOME[name]}", __name__), name)
    except ModuleNotFoundError as error:
        from .tapes.common.extras import raise_missing

        raise_missing(error, f"tapereel.{name}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*__all__, "agents", "envs", "finetune", "tapes"})
