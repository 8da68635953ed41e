"""Loads the objects that a configuration names: engines, players, the agent, the environment and the tasks.

This package imports `agents.engines`, `agents.episode`, `agents.rendering`, `agents.vision` and `envs`.
"""

from ...tapes.common.extras import lazy_names

__getattr__, __dir__ = lazy_names(
    __name__,
    {
        "engine_config": "EmbeddedConfig RendererConfig ScriptedConfig ServerConfig make_engine",
        "profiles": "shape_of",
        "setup": "load_tasks",
    },
)
