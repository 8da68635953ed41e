"""Turns tapes, the records of episodes, into training data: rows of tokens, the packed stream of a batch, and
provenance.

The package imports `tapes`, `envs` and `agents`. It contains neither a loss nor an optimiser.
"""

from ...tapes.common.extras import lazy_names

__getattr__, __dir__ = lazy_names(
    __name__,
    {
        "by_agent": "apart",
        "provenance": "episode_of",
        "rows": "Row",
        "stream": "BadBatch Episode Stream",
    },
)
