"""Recorded runs as fixtures: the whole loop of rollout, conversion and training goes round on tapes, with no model."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from tapereel.agents import Diverged, EpisodeSpec, ReplayEngine, rollout
from tapereel.agents.engines.embedded import weights_digest
from tapereel.finetune.trainer import copied_weights
from tapereel.tapes import Answer, Tape
from tapereel.tapes.store import Store

from ...finetune.loop.lab import RENDERER, Letters, Speaker, model, run, settings_of


def tapes_of(path: Path) -> list[Tape]:
    with Store.open(path) as store:
        return list(store.tapes(closed=True))


def test_a_loop_on_recorded_tapes_makes_the_recorded_weights(tmp_path: Path):
    config = settings_of(max_lag=0)
    sampled, replayed = model(), model()
    run(tmp_path / "first", config, policy=sampled)
    tapes = tapes_of(tmp_path / "first")
    engine = ReplayEngine(*tapes, renderer=RENDERER)
    run(tmp_path / "again", config, policy=replayed, engine=engine)
    assert engine.left == 0
    again = tapes_of(tmp_path / "again")
    assert sorted(map(words, again)) == sorted(map(words, tapes))
    trained = weights_digest(copied_weights(replayed))
    assert trained == weights_digest(copied_weights(sampled))
    assert trained != weights_digest(copied_weights(model()))


def words(tape: Tape) -> tuple[str, int, list[str]]:
    return tape.begin.group or "", tape.begin.attempt, [str(step) for step in tape]


def test_identical_prompts_of_a_group_are_told_apart_by_their_seeds():
    async def play(engine: ReplayEngine, seeds: list[int]) -> list[Tape]:
        return await asyncio.gather(
            *(
                rollout(Speaker(), Letters, EpisodeSpec.of("abc", seed=seed, env_seed=0), engine=engine)
                for seed in seeds
            )
        )

    from tapereel.agents import ScriptedEngine

    said = ScriptedEngine(lambda request: f"{request.seed % 1000}", renderer=RENDERER)
    tapes = asyncio.run(play(said, list(range(8))))  # type: ignore[arg-type]
    assert len({str(tape.actions[0]) for tape in tapes}) == 8
    engine = ReplayEngine(*tapes, renderer=RENDERER)
    again = asyncio.run(play(engine, list(range(7, -1, -1))))
    assert [list(tape) for tape in again] == [list(tape) for tape in tapes[::-1]]
    stranger = asyncio.run(play(ReplayEngine(*tapes, renderer=RENDERER), [99]))[0]
    assert stranger.cause is not None
    assert "seed" in (stranger.cause.message or "")
    assert all(isinstance(step, Answer) for step in again[0].actions)


def test_an_engine_of_no_tapes_is_refused():
    with pytest.raises(ValueError, match="ReplayEngine"):
        ReplayEngine()
    assert issubclass(Diverged, RuntimeError)
