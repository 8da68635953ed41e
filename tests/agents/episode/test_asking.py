"""What an agent may get wrong when it asks its model: arguments, a forgotten `await`, and steps of a sub-agent."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from typing import Any

import pytest

from tapereel.agents import LLM, ChatAgent, Request, ScriptedEngine, agent, delegate
from tapereel.tapes import Answer, CauseType, Reasoning, Sampling, Status, Tape

from ..worlds import Guess, GuessNumber
from .test_rollout import acting, run


def named(query: str, limit: int = 3) -> str:
    """Search.

    Args:
        query: what to look for
    """
    return query


USER = {"role": "user", "content": "hi"}


@pytest.mark.parametrize(
    ("arguments", "names"),
    [
        ({"temperature": -1}, "temperature"),
        ({"temperature": float("nan")}, "temperature"),
        ({"temperature": "hot"}, "temperature.*'hot'"),
        ({"max_tokens": 5.5}, "max_tokens.*5.5"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"sampling": Sampling().model_copy(update={"top_p": 2.0})}, "top_p"),
        ({"sampling": {"top_p": 0.5}}, "sampling"),
        ({"seed": "x"}, "seed"),
        ({"conversation": 5}, "conversation"),
        ({"system": 5}, "system"),
        ({"system": "x", "messages": [USER]}, "system and messages"),
        ({"messages": []}, "messages"),
        ({"messages": "hi"}, "messages"),
        ({"messages": [USER, "hi"]}, r"messages\[1\]"),
        ({"messages": [USER, {"role": "usr", "content": "x"}]}, r"messages\[1\].*'usr'"),
        ({"messages": [USER, {"role": "user", "content": 5}]}, r"messages\[1\].*5"),
        ({"messages": [{"role": "user"}]}, r"messages\[0\]"),
        ({"messages": [{"role": "user", "content": b"x"}]}, r"messages\[0\]"),
        ({"messages": [{"role": "user", "content": "\ud800"}]}, r"messages\[0\]"),
        ({"tools": ["search"]}, "'search'"),
        ({"tools": [{"title": "x"}]}, "tool"),
        ({"tools": named}, "tools"),
        ({"tools": [lambda query: query]}, "query"),
        ({"stop": ["x"]}, "'stop'.*sampling=Sampling.*extra="),
        ({"top_p": 0.9}, "'top_p'.*sampling=Sampling"),
        ({"listener": print}, "listener.*Listener"),
        ({"on_prompt": 4}, "on_prompt.*Callable"),
        ({"sampling": Sampling(extra={"stop": ["x", ""]})}, r"stop.*\['x', ''\]"),
        ({"sampling": Sampling(extra={"stop": 7})}, "stop.*7"),
    ],
)
def test_a_call_with_a_bad_argument_ends_its_own_episode_alone(arguments: dict[str, Any], names: str):
    @agent
    async def asks(tape: Tape, llm: LLM) -> AsyncIterator[Any]:
        await llm(tape, **arguments)
        yield Answer(text="7")

    tape = run(asks, GuessNumber(), 7, engine=ScriptedEngine(["7"]))
    assert (tape.status, tape.cause.type, tape.cause.error) == (Status.ERROR, CauseType.AGENT, "BadArgument")
    assert re.search(names, tape.cause.message, re.DOTALL)
    assert (tape.calls, Tape.of(tape.bodies)) == ([], tape), "the tape can be read"


async def _reads(self: Any, tape: Tape, llm: Any) -> AsyncIterator[Any]:
    yield Guess(number=int(llm(tape).text))


async def _shows(self: Any, tape: Tape, llm: Any) -> AsyncIterator[Any]:
    yield Answer(text=str(llm(tape)))


async def _ignores(self: Any, tape: Tape, llm: Any) -> AsyncIterator[Any]:
    llm(tape, system="Plan.")
    yield Guess(number=int((await llm(tape)).text))


async def _yields(self: Any, tape: Tape, llm: Any) -> AsyncIterator[Any]:
    yield llm(tape)


@pytest.mark.parametrize("act", [_reads, _shows, _ignores, _yields])
def test_a_call_that_is_not_awaited_is_named_with_the_remedy(act: Any):
    tape = run(acting(act), GuessNumber(), 7, engine=ScriptedEngine(["7", "7"]))
    assert (tape.status, tape.cause.type, tape.reward) == (Status.ERROR, CauseType.AGENT, None)
    assert "`reply = await llm(...)`" in tape.cause.message


def test_a_call_may_be_awaited_by_a_task_of_the_agent():
    @agent
    async def gathers(tape: Tape, llm: LLM) -> AsyncIterator[Any]:
        first = asyncio.create_task(llm(tape, conversation="a"))
        second, third = await asyncio.gather(llm(tape, conversation="b"), llm(tape, conversation="c"))
        yield Guess(number=sum(int(reply.text) for reply in (await first, second, third)))

    tape = run(gathers, GuessNumber(), 7, engine=ScriptedEngine(lambda request: "0" if request.number else "7"))
    assert (tape.status, len(tape.calls)) == (Status.FINISHED, 3), tape.cause


def test_one_stop_string_needs_no_list():
    @agent
    async def asks(tape: Tape, llm: LLM) -> AsyncIterator[Any]:
        yield Guess(number=int((await llm(tape)).text))

    sampling = Sampling(extra={"stop": "END"})
    tape = run(asks, GuessNumber(), 7, engine=ScriptedEngine(["7 END 8"]), sampling=sampling)
    assert (tape.calls[0].text, tape.reward) == ("7 ", 1.0)


def test_functions_and_callable_objects_are_offered_by_their_hints():
    class Counter:
        def __call__(self, by: int) -> int:
            """Count."""
            return by

    seen: list[Any] = []

    def model(request: Request) -> str:
        seen.extend(request.tools or ())
        return '{"name": "named", "arguments": {"query": "7"}}'

    @agent
    async def asks(tape: Tape, llm: LLM) -> AsyncIterator[Any]:
        reply = await llm(tape, tools=[named, Counter()], max_tokens=5, temperature=0)
        yield Guess(number=int(reply.tool_calls[0].arguments["query"]))

    tape = run(asks, GuessNumber(), 7, engine=ScriptedEngine(model))
    assert (tape.reward, tape.calls[0].sampling) == (1.0, Sampling(temperature=0, max_tokens=5))
    assert [one["function"]["name"] for one in seen] == ["named", "Counter"]
    assert seen[0]["function"]["parameters"]["properties"]["query"]["description"] == "what to look for"


def test_a_note_before_a_sub_agents_step_leaves_the_step_to_the_sub_agent():
    worker = ChatAgent(parse=lambda text: Guess(number=int(text)))

    @agent
    async def manager(tape: Tape, llm: LLM) -> AsyncIterator[Any]:
        async for step in delegate("worker", worker, tape, llm):
            yield Reasoning(text="checked")
            yield step

    tape = run(manager, GuessNumber(), 7, engine=ScriptedEngine(["seven", "7"]))
    paths = ["env", "manager", "manager/worker", "manager", "manager/worker"]
    assert [entry.by for entry in tape.entries] == paths
    asked = [call for call in tape.calls if call.by == "manager/worker"]
    again = [(message["role"], message["content"]) for message in asked[-1].messages]
    assert again[1:3] == [("assistant", "seven"), ("user", "checked")], "the model reads the answer that it wrote"
