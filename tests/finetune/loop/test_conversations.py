"""Random episodes through rollout: what the tape says is what the engine saw, and each completion is a label once.

Random agents: several calls a turn, sub-agents, second conversations, branches back into a conversation, cut and
cancelled answers, failing calls, words that no model was asked for, tools that come and go; then a fork at some turn.
The engine draws random ids, so that they are neither canonical tokenisations nor even valid text.
"""

from __future__ import annotations

import asyncio
import random
from array import array
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tapereel.agents import (
    LLM,
    Agent,
    Capability,
    Completion,
    EngineError,
    EpisodeSpec,
    Limits,
    ModelFailed,
    Request,
    delegate,
    rollout,
)
from tapereel.agents.engines.embedded import char_tokenizer
from tapereel.agents.rendering import Renderer
from tapereel.envs import Environment, Outcome
from tapereel.finetune import Row, rows
from tapereel.tapes import Answer, Reasoning, Sampling, Tape, Text
from tapereel.tapes.arrays import floats, ints

from ...agents.embedded_lab import until
from ...agents.families import tokenizer

QUICK = settings(max_examples=60, suppress_health_check=list(HealthCheck), derandomize=True)
TURNS = 3
TOOL = {"type": "function", "function": {"name": "f", "description": "F", "parameters": {"properties": {}}}}


@dataclass
class Seen:
    """One request, as the engine saw it, and what it gave."""

    path: str
    prompt: array[int]
    ids: array[int]


class Dice:
    """An engine that draws ids at random, by the request's seed."""

    name = "dice"
    context = None
    can: frozenset[Capability] = frozenset()

    def __init__(self, renderer: Renderer, size: int) -> None:
        self.renderer = renderer
        self.size = size
        self.seen: list[Seen] = []
        self.fail_next = False
        self.drawn = 0
        """Ids drawn so far for the request at work."""

    async def complete(self, request: Request) -> Completion:
        if self.fail_next:
            self.fail_next = False
            self.seen.append(Seen(request.path, ints(request.prompt or ()), ints()))
            raise EngineError("the dice fell off the table")
        rng = random.Random(request.seed)
        ids: list[int] = []
        self.drawn = 0
        try:
            for _ in range(request.sampling.max_tokens):
                ids.append(rng.choice(self.renderer.end_ids) if rng.random() < 0.25 else rng.randrange(self.size))
                self.drawn = len(ids)
                await asyncio.sleep(0)
                if ids[-1] in self.renderer.end_ids:
                    return self._done(request, ids, "stop")
        except asyncio.CancelledError:
            assert request.on_partial is not None
            request.on_partial(self._done(request, ids, "cancelled"))
            raise
        return self._done(request, ids, "length")

    def _done(self, request: Request, ids: list[int], finish: Any) -> Completion:
        self.seen.append(Seen(request.path, ints(request.prompt or ()), ints(ids)))
        spans = (("v:0", 0, len(ids)),) if ids else ()
        return Completion(
            text=self.renderer.decode(ids),
            ids=ints(ids),
            finish=finish,
            spans=spans,
            logprobs=floats([-1.0 - k / 8 for k in range(len(ids))]),
        )

    def forget(self, cache_key: str) -> None:
        """Nothing is kept."""

    async def close(self) -> None:
        """Nothing is held."""


ASK = st.fixed_dictionaries(
    {
        "do": st.sampled_from(["ask", "ask", "ask", "branch", "cancel", "fail", "say", "think"]),
        "conversation": st.sampled_from(["", "", "aside"]),
        "system": st.sampled_from([None, "S", "S", "T <|end|>"]),
        "tools": st.sampled_from([None, None, None, [TOOL]]),
        "tokens": st.integers(1, 6),
        "ticks": st.integers(1, 5),
        "text": st.sampled_from(["", "ab", "<think>no</think> yes", "é\n", "<|im_end|>", "/x"]),
    }
)
TURN = st.lists(st.tuples(st.booleans(), ASK), min_size=1, max_size=4)
"""(does the sub-agent do it?, what)."""
EPISODE = st.lists(TURN, min_size=TURNS, max_size=TURNS)


class Doer(Agent):
    """Does one thing, and yields what came of it as a thought."""

    def __init__(self, op: dict[str, Any], engine: Dice) -> None:
        self._op, self._engine = op, engine

    async def act(self, tape: Tape, llm: LLM) -> AsyncIterator[Any]:
        op = self._op
        ask: dict[str, Any] = {"conversation": op["conversation"], "max_tokens": op["tokens"], "tools": op["tools"]}
        if op["do"] == "think":
            yield Reasoning(text=op["text"])
        elif op["do"] in ("ask", "branch"):
            if op["do"] == "branch":
                messages = list(tape.messages(op["system"]))
                ask["messages"] = messages[: 1 + op["ticks"] % len(messages)]
            else:
                ask["system"] = op["system"]
            yield Reasoning(text=(await llm(tape.now(), **ask)).text)
        elif op["do"] == "cancel":
            job = asyncio.ensure_future(llm(tape.now(), system=op["system"], **ask))
            for _ in range(op["ticks"]):
                await asyncio.sleep(0)
            job.cancel()
            await asyncio.gather(job, return_exceptions=True)
        elif op["do"] == "fail":
            self._engine.fail_next = True
            try:
                await llm(tape.now(), system=op["system"], **ask)
            except ModelFailed:
                yield Reasoning(text="it failed")


class Puppet(Agent):
    """Carries out a drawn program, turn by turn."""

    name = "main"

    def __init__(self, program: list[Any], engine: Dice) -> None:
        self._program, self._engine = program, engine

    async def act(self, tape: Tape, llm: LLM) -> AsyncIterator[Any]:
        said = None
        for by_helper, op in self._program[tape.turns]:
            doer = Doer(op, self._engine)
            if op["do"] == "say":
                said = op["text"]
            elif by_helper:
                async for step in delegate("helper", doer, tape, llm):
                    yield step
            else:
                async for step in doer.act(tape, llm):
                    yield step
        yield Answer(text=said if said is not None else (await llm(tape.now(), max_tokens=4)).text)


class Echo(Environment[Answer]):
    """Says the number of the turn."""

    async def reset(self, task: int) -> Text:
        self.turn = 0
        return Text(text="q0")

    async def step(self, action: Answer) -> Outcome:
        self.turn += 1
        return Outcome(Text(text=f"q{self.turn} <|im_end|>"), reward=1.0, terminated=self.turn == TURNS)


def thinking() -> tuple[Renderer, int]:
    """A template that drops what earlier answers thought."""
    words = tokenizer("qwen3")
    return Renderer(words, history="template"), len(words)


def plain() -> tuple[Renderer, int]:
    words = char_tokenizer("abSTq0123é\n/x")
    return Renderer(words), len(words)


def spliced() -> tuple[Renderer, int]:
    """The same template as `thinking`, and history as it was sampled."""
    words = tokenizer("qwen3")
    return Renderer(words), len(words)


def played(program: list[Any], made: tuple[Renderer, int], seed: int, fork: Tape | None = None) -> tuple[Tape, Dice]:
    engine = Dice(*made)
    tape = asyncio.run(
        rollout(
            Puppet(program, engine),
            Echo,
            EpisodeSpec.of(
                0,
                seed=seed,
                fork=fork,
                retries=0,
                limits=Limits(turns=TURNS, agent_seconds=None, system_seconds=None),
                sampling=Sampling(max_tokens=6),
            ),
            engine=engine,
        )
    )
    assert tape.status == "finished", tape.cause
    return tape, engine


def check(tape: Tape, engine: Dice) -> None:
    """The three promises, on one tape."""
    asked = [call for call in tape.calls if call.engine != "authored"]
    recorded = [(c.by, c.prompt, c.completion) for c in asked]
    assert recorded == [(s.path, s.prompt, s.ids) for s in engine.seen]
    made = rows(tape)
    check_labels(tape, made)
    check_splits(tape, made)
    for path in {call.by for call in tape.calls}:
        theirs = rows(tape, agents={path})
        mine = [call for call in tape.calls if call.by == path]
        assert owned(theirs) == Counter((call.call, k) for call in mine for k in range(len(call.completion)))
        assert {len(row) for row in theirs} <= {len(row) for row in made}, "the others' tokens are still context"


def owned(made: list[Row]) -> Counter[tuple[str, int]]:
    return Counter((row.calls[c], int(o)) for row in made for c, o in zip(row.call, row.offset, strict=True))


def check_labels(tape: Tape, made: list[Row]) -> None:
    """Each completion token of the tape's own calls is a label exactly once, behind the prompt that it was sampled
    after, with its own log-prob."""
    assert owned(made) == Counter((call.call, k) for call in tape.calls for k in range(len(call.completion)))
    for row in made:
        assert (row.own > 0).all()
        for index, name in enumerate(row.calls):
            call, mine = tape.call(name), row.call == index
            at = row.own[mine]
            whole = [*tape.call(name).prompt, *call.completion]
            assert row.input_ids[: at[-1] + 1].tolist() == whole
            assert at.tolist() == list(range(len(whole) - len(call.completion), len(whole)))
            if call.logprobs is not None:
                assert row.old[mine].tolist() == list(call.logprobs)
                assert [row.versions[v] for v in row.version[mine]] == ["v:0"] * len(call.completion)
            else:
                assert np.isnan(row.old[mine]).all()
                assert (row.version[mine] == -1).all()
        labels = row.labels()
        assert (labels[row.own] == row.input_ids[row.own]).all()
        assert (np.delete(labels, row.own) == -100).all()


def check_splits(tape: Tape, made: list[Row]) -> None:
    """A call that goes on in the row of its base extends it; one that couldn't says why."""
    row_of = {name: index for index, row in enumerate(made) for name in row.calls}
    spoke: set[str] = set()
    for call in tape.calls:
        extends = False
        if call.base is not None:
            base = tape.call(call.base)
            extends = call.keep == len(base.prompt) + len(base.completion)
        if not extends:
            assert call.split is not None or call.base is None, call
        if call.split is not None:
            assert call.by in spoke or tape.parent is not None
        if row_of.get(call.call) is not None and row_of.get(call.call) == row_of.get(call.base):
            assert extends
        spoke.add(call.by)


@pytest.mark.ledger("F08", "T30", "T31", "X10")
@pytest.mark.parametrize("make", [plain, spliced, thinking])
def test_deltas_are_what_the_engine_saw_and_rows_label_each_token_once(make: Any) -> None:
    @QUICK
    @given(EPISODE, EPISODE, st.integers(0, TURNS - 1), st.integers(0, 2**32))
    def run(program: list[Any], other: list[Any], turn: int, seed: int) -> None:
        tape, engine = played(program, make(), seed)
        check(tape, engine)
        check(Tape.model_validate_json(tape.model_dump_json()), engine)
        child, forked = played(other, make(), seed + 1, fork=tape.at_turn(turn))
        check(child, forked)
        assert not {call for row in rows(child) for call in row.calls} & {call.call for call in tape.calls}
        grandchild, again = played(program, make(), seed + 2, fork=child.at_turn(min(turn + 1, TURNS - 1)))
        check(grandchild, again)

    run()


def acted(act: Any, made: tuple[Renderer, int] | None = None) -> tuple[Tape, Dice]:
    """One episode of an agent made of this function `(tape, llm, engine)`."""
    engine = Dice(*(made or plain()))

    class Acting(Agent):
        name = "main"

        def act(self, tape: Tape, llm: LLM) -> AsyncIterator[Any]:
            return act(tape, llm, engine)

    tape = asyncio.run(
        rollout(
            Acting(),
            Echo,
            EpisodeSpec.of(
                0,
                retries=0,
                sampling=Sampling(max_tokens=6),
                limits=Limits(turns=TURNS, agent_seconds=None, system_seconds=None),
            ),
            engine=engine,
        )
    )
    assert tape.status == "finished", tape.cause
    return tape, engine


def test_a_failed_call_costs_no_row_and_is_no_answer() -> None:
    async def failing(llm: LLM, tape: Tape, engine: Dice) -> None:
        engine.fail_next = True
        with pytest.raises(ModelFailed):
            await llm(tape)

    async def act(tape: Tape, llm: LLM, engine: Dice) -> AsyncIterator[Any]:
        await failing(llm, tape, engine)
        reply = await llm(tape)
        await failing(llm, tape, engine)
        yield Answer(text=reply.text)

    tape, engine = acted(act)
    check(tape, engine)
    assert len(rows(tape)) == 1
    assert [c.finish == "error" for c in tape.calls] == [True, False, True] * TURNS
    said = [m["content"] for m in tape.messages(path="main") if m["role"] == "assistant"]
    assert said == [c.text for c in tape.calls[1::3]]


def test_what_was_cancelled_is_on_the_tape_but_nobody_s_answer() -> None:
    async def act(tape: Tape, llm: LLM, engine: Dice) -> AsyncIterator[Any]:
        reply = await llm(tape)
        engine.drawn = 0
        job = asyncio.ensure_future(llm(tape, max_tokens=6))
        await until(lambda: engine.drawn or job.done())
        job.cancel()
        await asyncio.gather(job, return_exceptions=True)
        yield Answer(text=reply.text)

    tape, engine = acted(act)
    check(tape, engine)
    assert [(c.finish, len(c.completion)) for c in tape.calls][1::2] == [("cancelled", 1)] * TURNS
    said = [m["content"] for m in tape.messages(path="main") if m["role"] == "assistant"]
    assert said == [c.text for c in tape.calls[::2]]
