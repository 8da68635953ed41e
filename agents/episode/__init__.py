"""One episode: the agent, its model calls, limits, the recorder, and the rollout that closes the tape.

This package imports the engine protocol and `agents.rendering`. Replay, runs and the gateway build on it.
"""

from ...tapes.common.extras import lazy_names

__getattr__, __dir__ = lazy_names(
    __name__,
    {
        "limits": "Limits",
    },
)
