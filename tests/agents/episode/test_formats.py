"""Whole episodes with tools, by families whose calls a response template reads."""

from __future__ import annotations

import asyncio

import pytest

from tapereel.agents import ChatAgent, ScriptedEngine, rollout
from tapereel.agents.rendering import Renderer
from tapereel.envs import Outcome
from tapereel.envs.adapters import ToolEnvironment
from tapereel.tapes import Task

from ..families import tokenizer


def add(a: int, s: str) -> int:
    """Add two numbers.

    Args:
        a: the first one
        s: the second one
    """
    return a + int(s)


class Sums(ToolEnvironment):
    def __init__(self) -> None:
        super().__init__([add])

    async def prompt(self, task: Task) -> str:
        return "What is 2 + 3?"

    async def answered(self, text: str) -> Outcome:
        return Outcome(reward=float("5" in text), terminated=True)


ANALYSIS = "<|channel|>analysis<|message|>I add.<|end|><|start|>assistant"
ARGUMENTS = '{"a": 2, "s": "3"}'


@pytest.mark.parametrize(
    ("family", "call", "answer"),
    [
        (
            "harmony",
            f"{ANALYSIS}<|channel|>commentary to=functions.add <|constrain|>json<|message|>{ARGUMENTS}<|call|>",
            "<|channel|>final<|message|>5",
        ),
        ("mistral", f'[TOOL_CALLS] [{{"name": "add", "arguments": {ARGUMENTS}, "id": "abcdefghi"}}]', "5"),
        (
            "deepseek",
            f"<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>add<｜tool▁sep｜>{ARGUMENTS}"
            "<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
            "5",
        ),
    ],
)
def test_an_agent_calls_a_tool_and_reads_its_result(family: str, call: str, answer: str) -> None:
    engine = ScriptedEngine([call, answer], renderer=Renderer(tokenizer(family)))
    tape = asyncio.run(rollout(ChatAgent(), Sums, Task(public="q", private="5"), engine=engine))
    assert [step.kind for step in tape] == ["tool_offer", "tool_calls", "tool_results", "answer"]
    assert (tape.reward, tape.cause) == (1.0, None)
