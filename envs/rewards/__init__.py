"""Rewards: functions and models that score an episode, or each of its actions.

`sources` has the core: `Rewards`, `RewardSource`, and ensembles with a recipe for each label. The other modules make
sources from names in a configuration (`named_rewards`), from reward models behind a URL (`reward_models`) or in this
process (`local_models`), by comparing the attempts in a group (`relative`), and by checking mathematical answers
(`mathematics`). Judges need an engine, so they are in `tapereel.agents.runs.judge`. This package imports `envs` and
`tapes`, and no optional package before it is used.
"""

from ...tapes.store.summary import GROUP_LAYER
from .named_rewards import as_rewards, load_rewards
from .sources import RewardFailed, Rewards, RewardSource, Score, Scored, Scorer, rewarded

__all__ = [
    "GROUP_LAYER",
    "RewardFailed",
    "RewardSource",
    "Rewards",
    "Score",
    "Scored",
    "Scorer",
    "as_rewards",
    "load_rewards",
    "rewarded",
]
