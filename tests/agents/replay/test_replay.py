"""Replay: agents of every shape do again what their tapes say, word for word, turn by turn, in any order of tasks."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tapereel.agents.replay.replayer import replay
from tapereel.tapes import Tape
from tapereel.tapes.audit.verdict import Verdict

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


@pytest.mark.parametrize("name", WORLDS)
def test_each_turn_does_by_itself(name: str):
    tape = record(name, tokens=True)
    for turn in range(len(tape._log.cuts)):
        verdict = again(tape, WORLDS[name][0](), renderer=RENDERER, turn=turn)
        assert verdict.outcome == "verified", (turn, verdict)
        assert verdict.checked["steps"] == sum(e.by != "env" and e.turn == turn for e in tape.entries)
    assert again(tape, WORLDS[name][0](), turn=99).outcome == "unverifiable"


@pytest.mark.parametrize("name", WORLDS)
def test_the_order_of_tasks_does_not_matter(name: str):
    tape = record(name)
    for seed in range(5):
        verdict = run_shuffled(replay(tape, WORLDS[name][0]()), seed)
        assert verdict.outcome == "verified", (seed, verdict)
