"""Replay runs agent code again on recorded answers and compares it step by step. Recorded episodes can be branched too.

This package imports `agents.episode`, `agents.rendering`, `agents.runs`, `agents.setup` and the engine protocol.
"""

from ...tapes.common.extras import lazy_names

__getattr__, __dir__ = lazy_names(
    __name__,
    {
        "branching": "branch continuation",
        "replayer": "replay",
    },
)
