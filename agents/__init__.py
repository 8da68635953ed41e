"""Agents, their model interface (`LLM`), the engines behind it, and the rollout that records an episode.

This package imports torch and transformers only when an engine that needs them is used.
"""

if __name__ == "agents":
    raise ImportError(
        "import tapereel.agents, not agents: the repository root is the package `tapereel` (pip install -e .)"
    )

from typing import TYPE_CHECKING

from ..tapes.common.extras import lazy_names
from .engines.engine import (
    Capability,
    Completion,
    Engine,
    EngineError,
    PromptTooLong,
    Request,
    TrainableEngine,
)
from .engines.scripted import ScriptedEngine
from .episode.agent import Agent, FunctionAgent, agent, delegate
from .episode.chat import ChatAgent, TooManyParseErrors
from .episode.limits import LimitReached, Limits
from .episode.llm import LLM, ModelFailed, RenderFailed
from .episode.reply import Reply
from .episode.rollout import rollout
from .episode.spec import EpisodeSpec
from .rendering.tool_calls import CallsRead, read_tool_calls
from .replay.replay_engine import Diverged, ReplayEngine
from .runs.group import rollout_group

if TYPE_CHECKING:
    from .engines.check_engine import check_engine
    from .engines.embedded.embedded_engine import EmbeddedEngine
    from .engines.servers.litellm_engine import LiteLLMEngine
    from .engines.servers.server_engine import RemoteEngine
    from .engines.team_engine import TeamEngine
    from .runs.runner import RunConfig

    def _conform(
        scripted: ScriptedEngine,
        hosted: LiteLLMEngine,
        embedded: EmbeddedEngine,
        remote: RemoteEngine,
        replay: ReplayEngine,
        team: TeamEngine,
    ) -> tuple[tuple[Engine, ...], tuple[TrainableEngine, ...]]:
        """This function is never called. It lets the type checker report an engine that deviates from its protocol."""
        return (scripted, hosted), (embedded, remote, replay, team)


__all__ = [
    "LLM",
    "Agent",
    "CallsRead",
    "Capability",
    "ChatAgent",
    "Completion",
    "Diverged",
    "EmbeddedEngine",
    "Engine",
    "EngineError",
    "EpisodeSpec",
    "FunctionAgent",
    "LimitReached",
    "Limits",
    "TooManyParseErrors",
    "ModelFailed",
    "PromptTooLong",
    "RenderFailed",
    "ReplayEngine",
    "Reply",
    "Request",
    "RunConfig",
    "ScriptedEngine",
    "TrainableEngine",
    "agent",
    "check_engine",
    "delegate",
    "read_tool_calls",
    "rollout",
    "rollout_group",
]
__getattr__, __dir__ = lazy_names(
    __name__,
    {
        "engines.check_engine": "check_engine",
        "engines.embedded.embedded_engine": "EmbeddedEngine",
        "runs.runner": "RunConfig",
    },
)
