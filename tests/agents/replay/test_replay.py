"""Replay: agents of every shape do again what their tapes say, word for word, turn by turn, in any order of tasks."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from tapereel.agents import LLM
from tapereel.agents.replay import replay
from tapereel.tapes import Answer, Cause, CauseType, Status, Tape
from tapereel.tapes.audit import Verdict
from tapereel.tapes.records import End

from . import worlds
from .worlds import RENDERER, WORLDS, record, run_shuffled


def again(tape: Tape, agent: Any, **options: Any) -> Verdict:
    return asyncio.run(replay(tape, agent, **options))


@pytest.mark.parametrize("tokens", [False, True], ids=["text", "tokens"])
@pytest.mark.parametrize("name", WORLDS)
def test_an_agent_does_again_what_its_tape_says(name: str, tokens: bool):
    tape = record(name, tokens=tokens)
    verdict = again(tape, WORLDS[name][0](), renderer=RENDERER if tokens else None)
    assert verdict.outcome == "verified", verdict
    answered = [call for call in tape.calls if call.finish != "cancelled"]
    cut = len(tape.calls) - len(answered)
    assert len(answered) <= verdict.checked["calls"] <= len(answered) + cut
    assert verdict.checked["steps"] == sum(entry.by != "env" for entry in tape.entries)


CUTS: list[tuple[Status, CauseType | None] | None] = [
    None,
    (Status.CRASHED, None),
    (Status.CANCELLED, None),
    (Status.LIMIT, CauseType.SECONDS),
    (Status.ERROR, CauseType.ENVIRONMENT),
    (Status.ERROR, CauseType.OURS),
]
"""Ends that come from outside the agent; None: the tape is open."""


@pytest.mark.parametrize("name", WORLDS)
def test_a_tape_that_was_cut_after_any_record_is_verified_up_to_there(name: str):
    tape = record(name)
    bodies = tape.log.bodies[:-1] if tape.end is not None else tape.log.bodies
    # Every end before the first call; after it each record with one of the ends.
    first = [(k, cut) for k in (1, 2) for cut in CUTS]
    for k, cut in [*first, *((k, CUTS[k % len(CUTS)]) for k in range(3, len(bodies) + 1))]:
        end = []
        if cut is not None:
            cause = None if cut[1] is None else Cause(type=cut[1], error="Gone", message="gone")
            end = [End(tape=tape.id, status=cut[0], cause=cause, at=tape.begin.at).body()]
        verdict = again(Tape.of([*bodies[:k], *end]), WORLDS[name][0]())
        assert verdict.outcome == "verified", (k, verdict)


def test_a_cut_hides_no_change_of_the_agent_before_it():
    class Speaker(worlds.Speaker):
        async def act(self, tape: Tape, llm: LLM) -> AsyncIterator[Answer]:
            yield Answer(text=(await llm(tape, system="Speak." if tape.turns else "Shout.")).text)

    tape = record("one speaker")
    for k in range(3, len(tape.log.bodies)):  # from the first call on
        assert again(Tape.of(tape.log.bodies[:k]), Speaker()).outcome == "diverged"


@pytest.mark.parametrize("name", WORLDS)
def test_each_turn_does_by_itself(name: str):
    tape = record(name, tokens=True)
    for turn in range(len(tape._log.cuts)):
        verdict = again(tape, WORLDS[name][0](), renderer=RENDERER, turn=turn)
        assert verdict.outcome == "verified", (turn, verdict)
        assert verdict.checked["steps"] == sum(e.by != "env" and e.turn == turn for e in tape.entries)
    assert again(tape, WORLDS[name][0](), turn=99).outcome == "unverifiable"


@pytest.mark.parametrize("turn", [0, 1])
def test_a_call_too_many_is_reported_in_its_turn(turn: int):
    class Speaker(worlds.Speaker):
        async def act(self, tape: Tape, llm: LLM) -> AsyncIterator[Answer]:
            reply = await llm(tape, system="Speak.")
            if tape.turns == turn:
                await llm(tape, system="Speak again.")
            yield Answer(text=reply.text)

    found = again(record("one speaker"), Speaker()).divergence
    assert (found.turn, found.field, found.recorded) == (turn, "call", None)
    assert "one call more" in found.sentence


@pytest.mark.parametrize("name", WORLDS)
def test_the_order_of_tasks_does_not_matter(name: str):
    tape = record(name)
    for seed in range(5):
        verdict = run_shuffled(replay(tape, WORLDS[name][0]()), seed)
        assert verdict.outcome == "verified", (seed, verdict)
