"""Environments, tasks and rewards: what an agent acts in, and what its acts are worth.

Knows nothing of models, prompts or training. Importing it loads no optional package: those are imported by what needs
them.
"""

if __name__ == "envs":
    raise ImportError(
        "import tapereel.envs, not envs: the repository root is the package `tapereel` (pip install -e .)"
    )

from .base import Effect, Environment, Outcome, RestoreMismatch
from .calculator import Calculator, calculator_tasks
from .check import Report, check_env
from .gym import CodecNeeded, GymAction, GymEnvironment, GymObservation, GymRefusal
from .probe import Finding
from .reasoning import reasoning_scorer, reasoning_tasks
from .rewards import RewardFailed, Rewards, RewardSource
from .taskset import BadTasks, Cursor, Taskset, TaskStream, overlap
from .watch import LoopWatch, Stall

__all__ = [
    "BadTasks",
    "Calculator",
    "CodecNeeded",
    "Cursor",
    "Effect",
    "Environment",
    "Finding",
    "GymAction",
    "GymEnvironment",
    "GymObservation",
    "GymRefusal",
    "LoopWatch",
    "Outcome",
    "Report",
    "RestoreMismatch",
    "RewardFailed",
    "RewardSource",
    "Rewards",
    "Stall",
    "TaskStream",
    "Taskset",
    "calculator_tasks",
    "check_env",
    "overlap",
    "reasoning_scorer",
    "reasoning_tasks",
]
