"""Environments, tasks and rewards: what an agent acts in, and what its acts are worth.

Knows nothing of models, prompts or training. Importing it loads no optional package: each name is read from its module
when it is first asked for.
"""

from __future__ import annotations

if __name__ == "envs":
    raise ImportError("import tapereel.envs, not envs: the repository root is the package `tapereel` "
                      "(pip install -e .)")

from .base import Effect, Environment, Outcome, RestoreMismatch
from .taskset import BadTasks, Cursor, Taskset, TaskStream, overlap

__all__ = [
    "BadTasks", "Cursor", "Effect", "Environment", "Outcome", "RestoreMismatch", "TaskStream", "Taskset", "overlap",
]  # fmt: skip
