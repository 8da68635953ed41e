"""An episode's specification is data: it can be changed, written, and run by another process."""

from __future__ import annotations

import asyncio
import pickle
import subprocess
import sys
from typing import Any

import pytest

from tapereel.agents import EpisodeSpec, Limits, ScriptedEngine, rollout, rollout_group
from tapereel.agents.episode.rollout import VersionMismatch
from tapereel.agents.replay import branch, continuation
from tapereel.tapes import Sampling, Status, Tape, Task
from tapereel.tapes.errors import BadArgument

from ..worlds import GuessNumber, Player


def run(spec: Any, **options: Any) -> Tape:
    return asyncio.run(rollout(Player(), GuessNumber, spec, engine=ScriptedEngine(["5", "8", "7"]), **options))


PLAY = """
import asyncio, pickle, sys
from tapereel.agents import ChatAgent, EpisodeSpec, ScriptedEngine, rollout
from tapereel.envs import Environment, Outcome

class Adds(Environment):
    async def reset(self, task):
        return f"{task} and {self.rng.randrange(100)}"

    async def step(self, action):
        return Outcome(f"more than {action.text}", reward=1.0, terminated=action.text == "3")

def play(spec):
    engine = ScriptedEngine(lambda request: str(len(request.messages) // 2 + 1))
    return asyncio.run(rollout(ChatAgent(), Adds, spec, engine=engine))
"""
READ = """
sent = sys.stdin.buffer.read()
spec = pickle.loads(sent) if sys.argv[1] == "pickle" else EpisodeSpec.model_validate_json(sent)
print(play(spec).model_dump_json())
"""


@pytest.mark.parametrize("form", ["pickle", "json"])
def test_another_process_runs_the_episode_that_a_spec_describes(form: str):
    names: dict[str, Any] = {"__name__": "__main__"}
    exec(PLAY, names)
    parent = names["play"](EpisodeSpec.of("one", seed=3))
    settings: Any = {"limits": Limits(turns=5), "sampling": Sampling(max_tokens=9), "group": "g", "attempt": 2}
    spec = EpisodeSpec.of(continuation(parent, 1), seed=2**63 + 1, tape_id="ab", **settings)
    sent = pickle.dumps(spec) if form == "pickle" else spec.model_dump_json().encode()
    done = subprocess.run([sys.executable, "-c", PLAY + READ, form], input=sent, capture_output=True, check=True)
    there, here = Tape.model_validate_json(done.stdout), names["play"](spec)
    assert (there.id, there.turns, there.status, there.reward) == ("ab", 3, Status.FINISHED, 2.0)
    assert (there.parent, there.begin.parent, there.begin.split) == (parent.at_turn(1), here.begin.parent, "branch")
    assert there.begin.model_copy(update={"at": 0.0}) == here.begin.model_copy(update={"at": 0.0})
    assert [step.model_dump() for step in there] == [step.model_dump() for step in here]
    assert [call.seed for call in there.calls] == [call.seed for call in here.calls]


def test_keywords_of_rollout_replace_fields_of_the_spec():
    spec = EpisodeSpec.of(7, seed=1, sampling=Sampling(max_tokens=3), split="demo")
    begin = run(spec, seed=2, limits=Limits(turns=1)).begin
    assert (begin.seed, begin.split, begin.sampling) == (2, "demo", Sampling(max_tokens=3))
    assert begin.limits is not None
    assert begin.limits["turns"] == 1
    assert (spec.seed, spec.limits) == (1, Limits())
    plain = run(7).begin
    assert (plain.seed, plain.split, plain.task) == (0, "train", Task(private=7, bare=True))


def test_fields_that_make_no_sense_are_refused():
    wrong: list[tuple[dict[str, object], str]] = [
        ({"unverified": "I insist"}, "fork"),
        ({"grup": "g"}, r"unknown field grup \('g' .* group\?$"),
        ({"retries": -1}, r"retries is -1 \(int\): "),
        (
            {"retries": -1, "limits": {"turn": 1}},
            "limits.turn .1 .* turns.*; retries is -1 |retries is -1 .*limits.turn .1 .* turns",
        ),
        ({"limits": 3}, r"limits is 3 \(int\): "),
    ]
    for fields, says in wrong:
        for task in (7, EpisodeSpec.of(7)):
            with pytest.raises(BadArgument, match=says):
                EpisodeSpec.of(task, **fields)
    with pytest.raises(ValueError, match="continuation"):
        asyncio.run(branch(Player(), GuessNumber, EpisodeSpec.of(7)))


def test_a_process_with_another_version_refuses_the_episode_before_it_begins():
    made = []

    def make() -> GuessNumber:
        made.append(GuessNumber())
        return made[-1]

    versions = run(7).begin.versions
    assert run(EpisodeSpec.of(7, versions=versions)).begin.versions == versions
    for name in ("package", "tokenizer"):
        spec = EpisodeSpec.of(7, versions={**versions, name: "9.9"})
        with pytest.raises(VersionMismatch, match=rf"{name} .*9\.9"):
            asyncio.run(rollout(Player(), make, spec, engine=ScriptedEngine(["5"])))
    assert not made


def test_attempts_of_a_group_share_the_fields_of_its_spec():
    spec = EpisodeSpec.of(7, group="g", split="demo", limits=Limits(turns=2), sampling=Sampling(max_tokens=4))
    tapes = asyncio.run(rollout_group(Player(), GuessNumber, spec, n=3, engine=ScriptedEngine(lambda request: "1")))
    assert [(t.begin.group, t.begin.attempt, t.begin.split) for t in tapes] == [("g", k, "demo") for k in range(3)]
    assert {(t.turns, t.begin.sampling.max_tokens) for t in tapes if t.begin.sampling} == {(2, 4)}
    assert len({t.begin.seed for t in tapes}) == 3
    assert len({t.begin.env_seed for t in tapes}) == 1
    fixed = EpisodeSpec.of(spec, env_seed=5)
    tapes = asyncio.run(rollout_group(Player(), GuessNumber, fixed, n=2, engine=ScriptedEngine(lambda request: "1")))
    assert {t.begin.env_seed for t in tapes} == {5}
