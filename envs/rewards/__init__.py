"""Rewards: functions and models that score an episode, or each of its actions.

`sources` has the core: `Rewards`, `RewardSource`, and ensembles with a recipe for each label. The other modules make
sources from a name in a configuration (`named_rewards`), a reward model behind a URL (`reward_models`), a local model
(`local_models`), the other attempts in a group (`relative`) and mathematics (`mathematics`). Judges need an engine, so
they are in `tapereel.agents.runs.judge`. This package imports `envs` and `tapes`, and no optional package before it is
used.
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
