"""Runs of many episodes: groups of attempts, runs over tasks, pass@k with intervals, and model judges.

This package imports `agents.episode`, `agents.setup` and the engine protocol.
"""

from ...tapes.common.extras import lazy_names

__getattr__, __dir__ = lazy_names(
    __name__,
    {
        "judge": "Judge judge_reward",
        "runner": "RunConfig run",
    },
)
