"""Hearing an answer while it is sampled: from an engine, in two parts, through a team and the door, and going wrong."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import pytest

from tapereel.agents import LLM, Agent, Completion, EmbeddedEngine, EngineError, Request, rollout
from tapereel.agents.engines import TeamEngine
from tapereel.agents.episode import fire
from tapereel.tapes import Answer, Sampling, Tape

from ...finetune.loop.lab import RENDERER, Letters, model
from ..served import Heard

LONG = Sampling(max_tokens=60)


def embedded() -> EmbeddedEngine:
    return EmbeddedEngine(model(0, 256), RENDERER, version="run:0", slots=4, end_ids=())


def ask(seed: int = 1, listener: Any = None, sampling: Sampling = LONG) -> Request:
    messages = [{"role": "user", "content": "abcd"}]
    return Request(
        messages=messages, prompt=RENDERER.prompt(messages).ids, seed=seed, sampling=sampling, listener=listener
    )


class Failing(EmbeddedEngine):
    """Fails after so many tokens of its first request."""

    fails = 3

    async def complete(self, request: Request) -> Completion:
        if not self.fails:
            return await super().complete(request)
        short = replace(request, sampling=request.sampling.model_copy(update={"max_tokens": self.fails}))
        self.fails = 0
        await super().complete(short)
        raise EngineError("it broke", retry=True)


def failing() -> Failing:
    return Failing(model(0, 256), RENDERER, version="run:0", slots=4, end_ids=())


def test_every_token_is_told_as_it_is_sampled_and_nothing_else_changes() -> None:
    async def scene(listeners: list[Any]) -> list[Completion]:
        engine = embedded()
        return await asyncio.gather(*(engine.complete(ask(seed, heard)) for seed, heard in enumerate(listeners)))

    heard = [Heard(), Heard()]
    found = asyncio.run(scene([heard[0], None, heard[1]]))
    assert found == asyncio.run(scene([None] * 3))
    assert [one.ids for one in heard] == [list(found[0].ids or ()), list(found[2].ids or ())]
    assert {len(piece) for one in heard for piece in one.pieces[1:]} == {1}, "a step each, behind the first two"


def test_two_parts_are_heard_as_one_answer() -> None:
    hot = LONG.model_copy(update={"first_temperature": 10.0})
    heard = Heard()
    found = asyncio.run(fire.complete(embedded(), ask(listener=heard, sampling=hot)))
    assert heard.ids == list(found.ids or ())
    assert len(heard.pieces) > 50
    assert heard.void == 0

    class Again(EmbeddedEngine):
        """Tries the second part twice."""

        async def complete(self, request: Request) -> Completion:
            found = await super().complete(request)
            if request.listener is None:
                return found
            request.listener.again()
            return await super().complete(request)

    heard = Heard()
    engine = Again(model(0, 256), RENDERER, version="run:0", slots=4, end_ids=())
    assert asyncio.run(fire.complete(engine, ask(listener=heard, sampling=hot))).ids == found.ids
    assert (heard.ids, heard.void) == (list(found.ids or ()), 1)


def test_a_team_is_heard() -> None:
    heard = Heard()
    found = asyncio.run(TeamEngine({"": embedded()}).complete(ask(listener=heard)))
    assert heard.ids == list(found.ids or ())


class Shows(Agent):
    """Lets somebody hear what the model says."""

    def __init__(self, listener: Any) -> None:
        self.listener = listener

    async def act(self, tape: Tape, llm: LLM) -> AsyncIterator[Any]:
        yield Answer(text=(await llm(tape, listener=self.listener)).text)


def test_what_was_told_of_a_try_that_failed_is_void() -> None:
    heard = Heard()
    tape = asyncio.run(rollout(Shows(heard), Letters(), task="a", engine=failing(), sampling=LONG))
    (call,) = tape.calls
    assert len(call.attempts) == 2
    assert (heard.void, heard.ids) == (1, list(call.completion or ()))


@pytest.mark.parametrize("again", [False, True])
def test_a_listener_that_fails_ends_its_own_episode_and_no_other(again: bool) -> None:
    class Fails(Heard):
        def tokens(self, ids: array[int]) -> None:
            super().tokens(ids)
            if not again and len(self.pieces) == 2:
                raise KeyError("lost")

        def again(self) -> None:
            raise KeyError("lost")

    listener = Fails()

    async def scene() -> list[Tape]:
        engine = failing() if again else embedded()
        return await asyncio.gather(
            *(rollout(Shows(heard), Letters(), task="a", engine=engine, sampling=LONG) for heard in (listener, Heard()))
        )

    failed, fine = asyncio.run(scene())
    assert fine.status == "finished"
    assert failed.cause is not None
    assert (failed.status, failed.cause.type, failed.cause.error) == ("error", "agent", "KeyError")
    assert len(listener.pieces) == 2, "it hears no more"
    (call,) = failed.calls
    assert len(call.completion or ()) == 60
