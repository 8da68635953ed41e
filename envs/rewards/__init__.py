"""Rewards: functions and models that score an episode, or each of its actions.

`sources` has the core: `Rewards`, `RewardSource`, and ensembles with a recipe for each label. `named_rewards` loads
sources by their names in a configuration. `reward_models` scores with a model behind a URL, and `local_models` with a
model in this process. `relative` compares the attempts in a group. `mathematics` checks mathematical answers. Judges
need an engine, so they are in `tapereel.agents.runs.judge`. This package imports `envs` and `tapes`. Optional packages
are imported at their first use.
"""

from ...tapes.common.extras import lazy_names
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

__getattr__, __dir__ = lazy_names(
    __name__,
    {
        "relative": "layer_of training_reward",
    },
)
