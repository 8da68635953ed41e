"""Rewards, groups and advantages of each agent for itself, in closed form."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tapereel.agents import EpisodeSpec, ScriptedEngine, rollout
from tapereel.agents.engines import TeamEngine
from tapereel.envs import Environment, Outcome
from tapereel.finetune import LoopConfig, Stream, episode_of, rows
from tapereel.finetune.data import BadBatch, apart
from tapereel.finetune.data.by_agent import addressed, rewards_of
from tapereel.finetune.loop.plan import Plan
from tapereel.finetune.objective import Context
from tapereel.finetune.objective.loss import prepare
from tapereel.finetune.recipes import get_recipe
from tapereel.tapes import Answer, Tape, Text

from .duet import ALTO, BASS, RENDERER, Duet


class Given(Environment[Answer]):
    """Pays what the task says."""

    async def reset(self, task: dict[str, Any]) -> Text:
        self.pays = task
        return Text(text="a")

    async def step(self, action: Answer) -> Outcome:
        return Outcome(reward=self.pays or None, terminated=True)


def tape_of(pays: dict[str, float], group: str = "g") -> Tape:
    voices = {
        path: ScriptedEngine(lambda _, said=said: said, renderer=RENDERER) for path, said in ((ALTO, "ab"), (BASS, "c"))
    }
    return asyncio.run(rollout(Duet(), Given(), EpisodeSpec.of(pays, group=group), engine=TeamEngine(voices)))


def read(tape: Tape) -> Any:
    """Rows and episode, as if a policy had sampled each token with probability 1/2."""
    found = [replace(row, old=np.full(len(row.own), np.log(0.5), np.float32)) for row in rows(tape, renderer=RENDERER)]
    return found, episode_of(tape)


def batch(*tapes: Tape, **changes: Any) -> Any:
    found = {tape.id: read(tape) for tape in tapes}
    return Plan(phase="rl", tapes=tuple(found), by_agent=True, **changes).batch("run", found.__getitem__)


def test_a_component_with_an_address_is_that_agents_alone() -> None:
    found = [addressed(name) for name in ("right@duet/alto", "right", "right@", "a@b@c")]
    assert found == ["duet/alto", None, None, "c"]
    tape = tape_of({f"own@{ALTO}": 2.0, f"own@{BASS}": -2.0, "both": 0.5})
    assert tape.reward == 0.5
    assert rewards_of(tape, [ALTO, BASS]) == {ALTO: 2.5, BASS: -1.5}
    assert rewards_of(tape_of({f"own@{ALTO}": 2.0}), [ALTO, BASS]) == {ALTO: 2.0, BASS: None}, "None is not zero"


def test_one_tape_becomes_an_episode_of_each_who_spoke() -> None:
    tape = tape_of({f"own@{ALTO}": 2.0, "both": 0.5})
    whole = rows(tape, renderer=RENDERER)
    parts, episodes = apart(whole, episode_of(tape))
    assert [(e.tape, e.group, e.reward) for e in episodes] == [
        (f"{tape.id}#{ALTO}", f"g#{ALTO}", 2.5),
        (f"{tape.id}#{BASS}", f"g#{BASS}", 0.5),
        (f"{tape.id}#duet", "g#duet", 0.5),
    ]
    assert sum(len(row.own) for row in parts) == sum(len(row.own) for row in whole)
    assert all(row.tape == tape.id for row in parts), "what the ledger names is the tape"


def test_the_zero_sum_of_a_game_is_flat_as_a_whole_and_not_for_each() -> None:
    tapes = [tape_of({f"own@{ALTO}": x, f"own@{BASS}": -x}) for x in (1.0, 0.0, 0.0, 0.0)]
    made = batch(*tapes, agents=(ALTO, BASS))
    stream = Stream.of(made.rows, made.episodes)
    found = prepare(get_recipe("grpo"), stream, Context()).advantage.numpy()
    alto = np.array([stream.agents[k] == ALTO for k in stream.agent.tolist()])
    first = np.array([stream.calls[k][0] == tapes[0].id for k in stream.call.tolist()])
    # [1, 0, 0, 0] in a group of 4 by the deviation with n - 1: mean 1/4, deviation 1/2.
    assert found[alto & first] == pytest.approx(1.5, abs=1e-6)
    assert found[alto & ~first] == pytest.approx(-0.5, abs=1e-6)
    assert found[~alto & first] == pytest.approx(-1.5, abs=1e-6)
    assert found[~alto & ~first] == pytest.approx(0.5, abs=1e-6)
    whole = [read(tape) for tape in tapes]
    together = Stream.of([row for found, _ in whole for row in found], [episode for _, episode in whole])
    assert not prepare(get_recipe("grpo"), together, Context()).advantage.any()


def test_only_those_who_are_trained_are_in_the_batch() -> None:
    tapes = [tape_of({f"own@{ALTO}": 1.0, f"own@{BASS}": 3.0}) for _ in range(2)]
    made = batch(*tapes, agents=(BASS,))
    assert {path for row in made.rows for path in row.agents} == {BASS}
    assert [episode.reward for episode in made.episodes] == [3.0, 3.0]
    context = {(tape, call) for tape, call, _, _ in made.context}
    assert context == {(tape.id, call.call) for tape in tapes for call in tape.calls if call.by != BASS}


def test_a_reward_for_nobody_is_refused() -> None:
    with pytest.raises(BadBatch, match=r"'duet/tenor'.*'duet/alto'"):
        batch(tape_of({"own@duet/tenor": 1.0}))


def test_a_plan_is_written_and_read_back() -> None:
    plan = Plan(phase="rl", tapes=("t",), by_agent=True, agents=(ALTO,))
    assert Plan.model_validate(plan.info()) == plan
    assert "by_agent" not in Plan(phase="rl", tapes=("t",)).info(), "what is at its default is not written"


def test_settings_that_exclude_it() -> None:
    with pytest.raises(ValueError, match=r"by_agent.*\brollouts\b.*shuffle_rewards"):
        LoopConfig(by_agent=True, rollouts=2)
