"""Engines sample tokens. Here are their protocol, an engine with scripted answers, and a combination of several
engines.

The protocol imports only `tapes`. The subpackages contain the engines that run a model.
"""

from ...tapes.common.extras import lazy_names

__getattr__, __dir__ = lazy_names(
    __name__,
    {
        "engine": "Capability Completion EngineError EngineStopped PromptTooLong Request",
        "team_engine": "TeamEngine",
    },
)
