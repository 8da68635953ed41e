"""The parts of the adapter for verifiers that need no package. tests/contract/test_verifiers.py has the others."""

from __future__ import annotations

import asyncio
import sys
from types import ModuleType
from typing import Any

import pytest

from tapereel.agents import ChatAgent, Completion, Request, ScriptedEngine, rollout
from tapereel.envs import Outcome
from tapereel.envs.adapters import ToolEnvironment
from tapereel.envs.adapters.verifiers import VerifiersEnvironment, _messages, verifiers_tasks
from tapereel.tapes import Answer, MissingExtra, ToolCalls
from tapereel.tapes.errors import BadArgument


@pytest.mark.parametrize("use", [VerifiersEnvironment, verifiers_tasks])
def test_without_the_package_the_error_names_the_extra(use: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "verifiers", None)
    monkeypatch.delitem(sys.modules, "verifiers.v1", raising=False)
    with pytest.raises(MissingExtra) as found:
        use(object())
    assert (found.value.package, found.value.extra) == ("verifiers", "verifiers")


@pytest.mark.parametrize("use", [VerifiersEnvironment, verifiers_tasks])
def test_an_environment_of_an_older_version_is_refused_by_name(use: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    class SingleTurnEnv:
        rubric = object()

    for name in ("verifiers", "verifiers.v1"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    with pytest.raises(BadArgument, match="SingleTurnEnv"):
        use(SingleTurnEnv())


class Sums(ToolEnvironment):
    def __init__(self) -> None:
        super().__init__([self.add])

    def add(self, a: int, b: int) -> int:
        """Add."""
        return a + b

    async def answered(self, text: str) -> Outcome:
        return Outcome(reward=1.0, terminated=True)


class Native(ScriptedEngine):
    """Parses the calls itself, as a hosted model's server does."""

    async def complete(self, request: Request) -> Completion:
        found = await super().complete(request)
        call = {"id": "c", "type": "function", "function": {"name": "add", "arguments": '{"a": 1, "b": 2}'}}
        return Completion(text="I add.", tool_calls=(call,)) if "<tool_call>" in (found.text or "") else found


BROKEN = 'Well. <tool_call>{"name":</tool_call>'
CALL = '<tool_call>{"name": "add", "arguments": {"a": 1, "b": 2}}</tool_call>'


@pytest.mark.parametrize("engine", [ScriptedEngine, Native])
def test_a_trace_has_the_text_before_a_call(engine: type[ScriptedEngine]) -> None:
    agent = ChatAgent(actions=[ToolCalls], plain=Answer)
    script = [f"<think>A sum.</think>I add. {CALL}", "3"]
    tape = asyncio.run(rollout(agent, Sums(), task="1+2?", engine=engine(script)))
    (call, sampled), (result, of_tool), last = _messages(tape)
    assert (call["content"], call["tool_calls"][0]["function"]["name"], sampled) == ("I add.", "add", True)
    assert call.get("reasoning_content") == (None if engine is Native else "A sum.")
    assert (result["role"], result["content"], of_tool) == ("tool", "3", False)
    assert last == ({"role": "assistant", "content": "3"}, True)


def test_a_trace_has_the_answer_that_could_not_be_read() -> None:
    agent = ChatAgent(actions=[ToolCalls], plain=Answer)
    tape = asyncio.run(rollout(agent, Sums(), task="1+2?", engine=ScriptedEngine([BROKEN, "3"])))
    (raw, sampled), (problem, said), _ = _messages(tape)
    assert (raw, sampled) == ({"role": "assistant", "content": BROKEN}, True)
    assert (problem["role"], said) == ("user", False)
