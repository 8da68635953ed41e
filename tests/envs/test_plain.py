"""Plain values: `str` observations and the default text action are recorded, replayed, re-executed and served."""

from __future__ import annotations

import asyncio
import math
import random
import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from tapereel.agents import LLM, Agent, EpisodeSpec, ScriptedEngine, rollout, rollout_group
from tapereel.agents.replay import replay
from tapereel.envs import Calculator, Environment, Outcome, check_env
from tapereel.envs.checks.reexec import reexec
from tapereel.envs.environment import EnvironmentFault, NotAnEnvironment, as_observation, as_outcome
from tapereel.envs.remote import Declared, Pool
from tapereel.envs.rewards import Rewards, rewarded
from tapereel.tapes import Answer, Observation, Step, Tape, Text
from tapereel.tapes.errors import BadArgument


class Spell(Environment):
    """Asks for a word; the second wrong answer ends the episode."""

    async def reset(self, task: str) -> str:
        self.word, self.left = task, 2
        return f"Write {task} backwards."

    async def step(self, action: Answer) -> Outcome:
        self.left -= 1
        right = action.text == self.word[::-1]
        if right or self.left == 0:
            return Outcome(reward=float(right), terminated=True)
        return Outcome("No. Try again.")


class Wrong(Spell):
    async def reset(self, task: str) -> Any:
        return 3.5


class Speller(Agent):
    async def act(self, tape: Tape, llm: LLM) -> AsyncIterator[Step]:
        reply = await llm(tape.now())
        yield Answer(text=reply.text)


def _played(env: Any = Spell, answers: tuple[str, ...] = ("tac?", "tac"), **fields: Any) -> Tape:
    spec = EpisodeSpec.of("cat", **fields)
    return asyncio.run(rollout(Speller(), env, spec, engine=ScriptedEngine(list(answers))))


def test_plain_texts_are_recorded_as_the_standard_steps():
    tape = _played()
    assert list(tape) == [
        Text(text="Write cat backwards."),
        Answer(text="tac?"),
        Text(text="No. Try again."),
        Answer(text="tac"),
    ]
    assert (str(tape.status), tape.reward) == ("finished", 1.0)


def test_a_plain_tape_replays_reexecutes_and_forks():
    tape = _played()
    assert asyncio.run(replay(tape, Speller())).outcome == "verified"
    assert asyncio.run(reexec(tape, Spell, times=2)).outcome == "verified"
    child = _played(fork=tape.at_turn(1))
    assert list(child) == list(tape)
    assert asyncio.run(reexec(child, Spell)).outcome == "verified"

    class Other(Spell):
        async def reset(self, task: str) -> str:
            return (await super().reset(task)).upper()

    verdict = asyncio.run(reexec(tape, Other))
    assert verdict.outcome == "diverged"
    assert _played(Other, fork=tape.at_turn(1)).cause.error == "RestoreMismatch"  # type: ignore[union-attr]


@pytest.mark.parametrize("make", [Spell, lambda: Spell(), rewarded(Spell, Rewards([]))])
def test_a_factory_is_a_class_or_a_function(make: Any):
    assert _played(make).reward == 1.0


def test_an_instance_serves_one_episode_only():
    assert _played(Spell()).reward == 1.0
    says = r"instance.*\bSpell\b.*Environment"
    with pytest.raises(NotAnEnvironment, match=says):
        asyncio.run(rollout_group(Speller(), Spell(), "cat", n=2, engine=ScriptedEngine(["tac"])))  # type: ignore[arg-type]
    for use in (
        lambda one: check_env(one, ["cat"], lambda seen, rng: "tac"),
        lambda one: asyncio.run(reexec(_played(), one)),
        lambda one: rewarded(one, Rewards([])),
        lambda one: Pool(one, processes=1),
    ):
        with pytest.raises(NotAnEnvironment, match=says):
            use(Spell())


def test_a_factory_of_something_else_is_refused_before_the_episode():
    with pytest.raises(NotAnEnvironment, match=r"returned.*'x'.*Environment"):
        _played(lambda: "x")
    with pytest.raises(NotAnEnvironment, match=r"^3 .*Environment"):
        _played(3)


def test_other_values_are_the_fault_of_the_environment():
    cause = _played(Wrong).cause
    assert cause is not None
    assert cause.error == "EnvironmentFault"
    assert re.search(r"reset.*Observation.*\bstr\b.*\bfloat\b", cause.message or "")
    assert as_observation("a") == Text(text="a")
    assert as_observation(Text(text="a")) == Text(text="a")
    assert Outcome("a") == Outcome(Text(text="a"))
    for bad in (b"a", ["a"], None, 1):
        with pytest.raises(EnvironmentFault, match=rf"Observation.*\b{type(bad).__name__}\b"):
            as_observation(bad)
    with pytest.raises(EnvironmentFault, match=r"finish.*Outcome.*None.*float"):
        as_outcome(1.0, "finish")
    with pytest.raises(EnvironmentFault, match=r"Outcome\.observation"):
        Outcome(1)  # type: ignore[arg-type]
    for flag in ("terminated", "truncated"):
        with pytest.raises(BadArgument, match=flag):
            Outcome(**{flag: 1})  # type: ignore[arg-type]
    late = Outcome(reward={"score": 0.5})
    assert isinstance(late.reward, dict)
    late.reward["score"] = math.inf
    with pytest.raises(BadArgument, match=r"score.*\binf\b"):  # also where nothing is recorded, as in `check_env`
        as_outcome(late)


def test_bools_and_scalars_of_other_libraries_are_numbers():
    numpy: Any = pytest.importorskip("numpy")
    half, yes = numpy.float32(0.5), numpy.bool_(True)
    outcome = Outcome(reward={"a": True, "b": half}, terminated=yes, metrics={"c": numpy.int64(3)})
    assert outcome == Outcome(reward={"a": 1.0, "b": 0.5}, terminated=True, metrics={"c": 3.0})
    assert [type(value) for _, value, _ in outcome.components()] == [float] * 3
    assert (type(outcome.terminated), Outcome(reward=numpy.array(2)).reward) == (bool, 2.0)
    with pytest.raises(BadArgument, match="ndarray"):
        Outcome(reward=numpy.ones(1))


def _policy(seen: Observation, rng: random.Random) -> str:
    return rng.choice(["tac", "cat"])


def test_check_env_accepts_plain_environments():
    report = check_env(Spell, ["cat", "dog"], _policy, reward_range=(0.0, 1.0))
    assert report.ok, str(report)


def test_a_plain_environment_declares_the_standard_steps():
    declared = Declared.of(Spell)
    assert dict(declared.actions) == {"answer": Answer}
    assert dict(declared.observations) == {"text": Text}
    assert "answer" not in Declared.of(Calculator).actions


def test_a_plain_environment_runs_in_another_process():
    # By file: the name of this module depends on the folder that the checkout lies in.
    with Pool(f"{Path(__file__)}:Spell", processes=1) as pool:
        assert list(_played(pool)) == list(_played())
