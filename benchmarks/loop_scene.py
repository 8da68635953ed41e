"""Agents and environments of `whole_loop.py`, as the configuration of a training run names them."""

from __future__ import annotations

import json

from peers.loop_case import reward, roll_die

from tapereel.agents import ChatAgent
from tapereel.envs import Environment, Outcome
from tapereel.tapes import Action, Observation, ToolCall, ToolCalls, ToolResult, ToolResults


class Asked(Observation, kind="bench_asked"):
    text: str


class Said(Action, kind="bench_said"):
    text: str


class Digits(Environment[Said]):
    """One question, one answer."""

    async def reset(self, task: str) -> Asked:
        return Asked(text=task)

    async def step(self, action: Said) -> Outcome:
        return Outcome(reward=reward("single", action.text), terminated=True)


class Dice(Environment[ToolCalls | Said]):
    """The tool answers calls; what isn't a call is the answer."""

    async def reset(self, task: str) -> Asked:
        return Asked(text=task)

    async def step(self, action: ToolCalls | Said) -> Outcome:
        if isinstance(action, Said):
            return Outcome(reward=reward("tool", action.text), terminated=True)
        return Outcome(
            ToolResults(
                results=tuple(
                    ToolResult(id=call.id, name=call.name, content=str(roll_die(**call.arguments)))  # type: ignore[arg-type]
                    for call in action.calls
                )
            )
        )


def read(text: str) -> Action:
    """A call as the model writes it, or an answer."""
    if not text.startswith("<tool_call>"):
        return Said(text=text)
    call = json.loads(text.removeprefix("<tool_call>").removesuffix("</tool_call>"))
    return ToolCalls(calls=(ToolCall(id="0", name=call["name"], arguments=call["arguments"]),))


def single_agent() -> ChatAgent:
    return ChatAgent(parse=read, misreads=0)


def tool_agent() -> ChatAgent:
    from transformers.utils import get_json_schema

    return ChatAgent(parse=read, tools=[get_json_schema(roll_die)], misreads=0)
