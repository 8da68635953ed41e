"""Reexec measures what varies, proposes what to declare, and refuses what can't be taken back; verdicts are JSON."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator
from typing import Any, ClassVar

import pytest

from tapereel.agents import LLM, EpisodeSpec, Limits, ScriptedEngine, agent, rollout
from tapereel.agents.replay import replay
from tapereel.envs import Environment, Outcome
from tapereel.envs.checks.reexec import reexec
from tapereel.tapes import Answer, Observation, Tape
from tapereel.tapes.audit import Likely, Verdict, Verdicts, verified
from tapereel.tapes.audit.verdict import Difference, clipped, differences

from .worlds import WORLDS, Breaks, Counting, Speaker, record

ticks = itertools.count(1)


class Reading(Observation, kind="replay_reading"):
    text: str
    parts: tuple[str, ...] = ()


class Noisy(Environment[Answer]):
    """Tells how long it took, and scores by it."""

    async def reset(self, task: int) -> Reading:
        self.left = task
        return Reading(text=f"begin (took {next(ticks)} ms)", parts=("same", f"id {next(ticks):x}-x"))

    async def step(self, action: Answer) -> Outcome:
        self.left -= 1
        return Outcome(
            Reading(text=f"{action.text} took {next(ticks)} ms"),
            reward={"seconds": float(next(ticks))},
            metrics={"left": float(self.left)},
            terminated=self.left == 0,
        )


class Declared(Noisy):
    varies: ClassVar = {"replay_reading.text": r"\d+ ms", "replay_reading.parts[]": None, "reward.seconds": None}


def noisy() -> Tape:
    return asyncio.run(rollout(Speaker(), Noisy(), 2, engine=ScriptedEngine(["a1", "b2"])))


def test_what_varies_is_measured_and_what_is_proposed_makes_it_hold():
    tape = noisy()
    verdict = asyncio.run(reexec(tape, Noisy, times=3))
    assert verdict.outcome == "diverged"
    assert verdict.divergence is not None
    assert (verdict.divergence.turn, verdict.divergence.field) == (None, "observation.replay_reading.text")
    assert set(verdict.proposed) == {"replay_reading.text", "replay_reading.parts[]", "reward.seconds"}
    assert verdict.measured["replay_reading.text"] == 1.0
    again = asyncio.run(reexec(tape, Noisy, times=3, normalise=verdict.proposed))
    assert (again.outcome, again.proposed) == ("verified", {})
    assert asyncio.run(reexec(tape, Declared)).outcome == "verified"


def test_what_is_declared_hides_no_other_change():
    class Other(Declared):
        async def step(self, action: Answer) -> Outcome:
            return await super().step(Answer(text=action.text.upper()))

    divergence = asyncio.run(reexec(noisy(), Other)).divergence
    assert divergence is not None
    assert (divergence.turn, divergence.cause) == (0, Likely.ENVIRONMENT)


def test_an_irreversible_environment_is_never_run_again():
    class Shop(Noisy):
        effect = "irreversible"

        async def reset(self, task: int) -> Reading:
            raise AssertionError("it was run")

    verdict = asyncio.run(reexec(noisy(), Shop))
    assert verdict.outcome == "unverifiable"
    assert "irreversible" in (verdict.reason or "")


def test_rewards_ends_and_errors_are_compared():
    class Generous(Counting):
        async def step(self, action: Any) -> Outcome:
            outcome = await super().step(action)
            return Outcome(outcome.observation, reward=99.0, terminated=outcome.terminated)

    class Endless(Counting):
        async def step(self, action: Any) -> Outcome:
            outcome = await super().step(action)
            return Outcome(outcome.observation, reward=outcome.reward)

    tape = record("one speaker")
    divergence = asyncio.run(reexec(tape, Generous)).divergence
    assert divergence is not None
    assert (divergence.turn, divergence.field, divergence.cause) == (0, "reward.reward", Likely.REWARD)
    divergence = asyncio.run(reexec(tape, Endless)).divergence
    assert divergence is not None
    assert (divergence.turn, divergence.field, divergence.recorded) == (2, "done", "finished")
    broken = record("a world that breaks")
    assert asyncio.run(reexec(broken, Breaks)).outcome == "verified"
    divergence = asyncio.run(reexec(broken, Counting)).divergence
    assert divergence is not None
    assert (divergence.turn, divergence.field, divergence.recorded) == (2, "error", "OSError")
    divergence = asyncio.run(reexec(tape, Breaks)).divergence
    assert divergence is not None
    assert (divergence.turn, divergence.observed) == (2, "OSError")
    assert divergence.where is not None
    assert "worlds.py" in divergence.where


@pytest.mark.parametrize("name", ["one speaker", "thoughts", "two conversations", "time and chance"])
def test_a_fork_replays_what_is_its_own(name: str):
    parent = record(name, tokens=True)
    make, env, task, model, _ = WORLDS[name]
    from .worlds import RENDERER

    engine = ScriptedEngine(model, renderer=RENDERER)
    fork = asyncio.run(
        rollout(make(), env(), EpisodeSpec.of(task, seed=9, env_seed=3, fork=parent.at_turn(1)), engine=engine)
    )
    assert fork.begin.parent is not None
    verdict = asyncio.run(replay(fork, make(), renderer=RENDERER))
    assert verdict.outcome == "verified", verdict
    assert verdict.checked["calls"] == len(fork.calls)
    assert asyncio.run(replay(fork, make(), renderer=RENDERER, turn=2)).outcome == "verified"
    assert "parent" in (asyncio.run(replay(fork, make(), turn=0)).reason or "")
    assert asyncio.run(reexec(fork, env)).outcome == "verified"


@pytest.mark.parametrize("records", range(4, 12))
def test_an_open_tape_replays_as_far_as_it_goes(records: int):
    whole = record("thoughts")
    part = Tape.of(whole.bodies[:records])
    verdict = asyncio.run(replay(part, WORLDS["thoughts"][0]()))
    assert verdict.outcome == "verified", verdict
    assert verdict.checked["steps"] == sum(entry.by != "env" for entry in part.entries)


def test_a_limit_of_seconds_is_cut_off():
    class Slow(Speaker):
        name = "speaker"

    async def never(request: Any) -> Any:
        await asyncio.Event().wait()

    engine = ScriptedEngine(["a"])
    engine.complete = never  # type: ignore[method-assign]
    tape = asyncio.run(rollout(Slow(), Counting(), 2, engine=engine, limits=Limits(system_seconds=0.5)))
    assert [call.finish for call in tape.calls] == ["cancelled"]
    verdict = asyncio.run(replay(tape, Slow()))
    assert verdict.outcome == "verified"
    assert any("turn 0" in note for note in verdict.not_checked)


def test_verdicts_are_json_and_their_exit_code_is_that_of_the_worst():
    tape = noisy()
    bad = asyncio.run(reexec(tape, Noisy))
    fine = verified("reexec", tape.id)
    every = Verdicts(verb="reexec", run="runs/x", verdicts=(fine, bad))
    assert (every.counts["diverged"], every.exit_code) == (1, 1)
    assert Verdicts(verb="reexec", run="runs/x", verdicts=(fine,)).exit_code == 0
    assert Verdicts(verb="reexec", run="runs/x", verdicts=()).exit_code == 2
    dumped = bad.model_dump(mode="json")
    assert dumped["divergence"].pop("diff")
    assert Verdict.model_validate(dumped) == bad
    assert str(bad).startswith("diverged, observation")


def test_differences_are_found_in_order_and_long_texts_cut_around_the_first():
    then = {"a": [1, 2, 3], "b": {"c": "x"}, "nan": float("nan")}
    now = {"a": [1, 5], "b": {"c": "y", "d": True}, "nan": float("nan")}
    assert list(differences(then, now)) == [
        Difference("a[1]", 2, 5),
        Difference("a[2]", 3, None),
        Difference("b.c", "x", "y"),
        Difference("b.d", None, True),
    ]
    assert list(differences(1, True)) == [Difference("", 1, True)]
    a, b = clipped("x" * 9000 + "1" + "y" * 9000, "x" * 9000 + "2" + "y" * 9000)
    assert len(a) < 4100
    assert "x1y" in a
    assert "x2y" in b


@agent
async def blind(tape: Tape, llm: LLM) -> AsyncIterator[Any]:
    yield Answer(text=(await llm(tape, messages=[{"role": "user", "content": "On!"}])).text)


class Quiet(Environment[Answer]):
    """Says nothing after the first turn."""

    async def reset(self, task: int) -> str:
        self.turns = 0
        return "begin"

    async def step(self, action: Answer) -> Outcome:
        self.turns += 1
        return Outcome("on" if self.spoken else None, reward=0.5, terminated=self.turns == 2)

    spoken = False


class Spoken(Quiet):
    spoken = True


def test_a_step_without_an_observation_was_allowed_in_earlier_versions():
    engine = ScriptedEngine(["a", "b"])
    tape = asyncio.run(rollout(blind, Spoken, 1, engine=engine))
    bodies = [body.replace(b'"step":3', b'"step":2') for body in tape.bodies if b'"text":"on"' not in body]
    earlier = Tape.of(bodies)
    assert [len(earlier.actions), len(earlier.observations)] == [2, 1]
    assert asyncio.run(replay(earlier, blind)).outcome == "verified"
    assert asyncio.run(reexec(earlier, Quiet)).outcome == "verified"
    failed = asyncio.run(rollout(blind, Quiet, 1, engine=ScriptedEngine(["a", "b"])))
    assert failed.cause is not None
    assert failed.cause.error == "EnvironmentFault"
    for verdict in (replay(failed, blind), reexec(failed, Quiet)):
        assert asyncio.run(verdict).outcome == "verified"
    assert asyncio.run(reexec(failed, Spoken)).outcome == "diverged"
