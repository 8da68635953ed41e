"""Agents: who acts, the door to a model, the engines behind it, and the rollout that records an episode.

Imports neither torch nor transformers until an engine that needs them is used.
"""

if __name__ == "agents":
    raise ImportError(
        "import tapereel.agents, not agents: the repository root is the package `tapereel` (pip install -e .)"
    )

from .agent import Agent, FunctionAgent, agent, delegate
from .chat import ChatAgent, MisreadTooOften
from .engine import Completion, Engine, EngineError, PromptTooLong, Request
from .group import rollout_group
from .limits import LimitReached, Limits
from .llm import LLM, ModelFailed, RenderFailed, Reply
from .replay import Diverged, ReplayEngine
from .rollout import rollout
from .scripted import ScriptedEngine

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
    "MisreadTooOften",
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
