"""Rewards: where the numbers come from that say what an episode, or each of its actions, is worth.

`Rewards` and `RewardSource` are the core; the modules beside it make sources: of a `.py` file (`files`), an HTTP
reward model (`remote`), a local one (`local`), a recipe for each label (`recipe`), the other attempts of a group
(`relative`) and mathematics (`mathematics`). Judges are in `tapereel.agents.runs.judge`, since they ask an engine.
Importing
this loads no optional package.
"""

from ...tapes.store.attempts import GROUP_LAYER
from .reward_names import as_rewards, load_rewards
from .sources import NoReward, RewardFailed, Rewards, RewardSource, Score, Scored, Scorer, rewarded

__all__ = [
    "GROUP_LAYER",
    "NoReward",
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
