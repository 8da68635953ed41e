"""Agents, their model interface (`LLM`), the engines behind it, and the rollout that records an episode.

Imports neither torch nor transformers until an engine that needs them is used.
"""

if __name__ == "agents":
    raise ImportError(
        "import tapereel.agents, not agents: the repository root is the package `tapereel` (pip install -e .)"
    )

from .engines.engine import Completion, Engine, EngineError, PromptTooLong, Request
from .engines.scripted import ScriptedEngine
from .episode.agent import Agent, FunctionAgent, agent, delegate
from .episode.chat import ChatAgent, TooManyParseErrors
from .episode.limits import LimitReached, Limits
from .episode.llm import LLM, ModelFailed, RenderFailed, Reply
from .episode.rollout import rollout
from .replay.replay_engine import Diverged, ReplayEngine
from .runs.group import rollout_group

__all__ = [
    "LLM",
    "Agent",
    "ChatAgent",
    "Completion",
    "Diverged",
    "Engine",
    "EngineError",
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
    "ScriptedEngine",
    "agent",
    "delegate",
    "rollout",
    "rollout_group",
]
