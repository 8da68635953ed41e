"""The agents, the environment and the demonstrators of the demos. This module doesn't need torch."""

from __future__ import annotations

import random

from ...agents import ChatAgent, Request
from ...envs.adapters.calculator import Calculator, demonstrate, read_action
from ...envs.adapters.lamps import WAYS, read_way


def press_a_key(request: Request) -> str:
    """Return the demonstrator's next text in the demo with the calculator."""
    heard = [message["content"] for message in request.messages if message["role"] == "user"]
    return demonstrate(heard[0], heard[1:], random.Random(request.seed))


def choose_a_way(request: Request) -> str:
    """Return the demonstrator's next text in the demo with pictures."""
    return random.Random(request.seed).choice(list(WAYS))


def calculator_agent() -> ChatAgent:
    """Return the demo's agent. An answer is a call of the calculator or a final answer. Other text is a parse error."""
    return ChatAgent(parse=read_action, name="solver", misreads=0)


def walker() -> ChatAgent:
    """Return the agent of the demo with pictures. An answer is a way, and other text is a parse error."""
    return ChatAgent(parse=read_way, name="walker", misreads=0)


def calculator() -> Calculator:
    """Return the demo's environment."""
    return Calculator(scorer="basic_arithmetic", max_turns=4)
