"""Environments, tasks and rewards: an agent acts in an environment, and rewards score its episodes.

This package imports only `tapes`. `agents` and `finetune` import this package. Importing it loads no optional packages:
each module imports them at their first use.
"""

if __name__ == "envs":
    raise ImportError(
        "import tapereel.envs, not envs: the repository root is the package `tapereel` (pip install -e .)"
    )

from .adapters.calculator import Calculator, calculator_tasks
from .adapters.gym import CodecNeeded, GymAction, GymEnvironment, GymObservation, GymRefusal
from .adapters.reasoning import reasoning_scorer, reasoning_tasks
from .checks.check_env import Report, check_env
from .checks.findings import Finding
from .environment import Effect, Environment, Outcome, RestoreMismatch
from .loop_watch import LoopWatch, Stall
from .rewards import RewardFailed, Rewards, RewardSource
from .taskset import BadTasks, Taskset, overlap

__all__ = [
    "BadTasks",
    "Calculator",
    "CodecNeeded",
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
    "Taskset",
    "calculator_tasks",
    "check_env",
    "overlap",
    "reasoning_scorer",
    "reasoning_tasks",
]
