"""Rewards relative to a group in the loop: layers on closed tapes, counted in training, once, across a resume."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tapereel.envs import Rewards, RewardSource
from tapereel.envs.rewards import layer_of, rewarded, training_reward
from tapereel.envs.rewards.relative import ranked
from tapereel.finetune import episode_of
from tapereel.tapes import Tape
from tapereel.tapes.store import Store

from .lab import Letters, assert_books_close, history_in, loop_in, model, settings_of


class Silent(Letters):
    """Letters that says nothing of what they are worth: the sources do."""

    async def step(self, action: Any) -> Any:
        outcome = await super().step(action)
        self.earned = getattr(self, "earned", 0.0) + outcome.reward
        return type(outcome)(outcome.observation, terminated=outcome.terminated)


def right(tape: Tape) -> float:
    """The share of letters that were right: a metric here, which the rank goes by."""
    wanted = tape.begin.task.private
    return sum(str(action).startswith(letter) for action, letter in zip(tape.actions, wanted, strict=False))


SOURCES = Rewards([RewardSource(score=right, weight=0), ranked(by="right")])


def play(path: Path, updates: int, *, create: bool, env: Any = None) -> None:
    config = settings_of(updates=updates, groups=4, group_size=4, max_lag=0)
    opened = Store.create(path, durability="os") if create else Store.open(path, write=True)
    with opened as store:
        history = history_in(store, path, config, policy=model(3))
        if not create:
            history.restore()
        asyncio.run(loop_in(history, config, env=env or rewarded(Silent, SOURCES), seed=3).run())


def of(path: Path) -> list[Tape]:
    with Store.open(path) as store:
        return [store.tape(s.id, refresh=False) for s in store.summaries()]


def test_what_attempts_earn_beside_one_another_is_what_is_trained_on(tmp_path: Path) -> None:
    path = tmp_path / "run"
    play(path, 3, create=True)
    books = assert_books_close(path)
    assert books.tokens["trained"] > 0
    found = of(path)
    assert all(tape.reward is None for tape in found), "on the tape there is only a metric"
    trained = [tape for tape in found if layer_of(tape)]
    assert {len(layer_of(tape)) for tape in trained} == {1}
    groups: dict[str | None, list[Tape]] = {}
    for tape in trained:
        groups.setdefault(tape.begin.group, []).append(tape)
    for tapes in groups.values():
        assert sum(training_reward(tape) or 0.0 for tape in tapes) == pytest.approx(len(tapes) / 2), "ranks"
        order = sorted(tapes, key=right)
        assert sorted(map(training_reward, order)) == list(map(training_reward, order))  # type: ignore[type-var]
    episode = episode_of(trained[0])
    assert episode.reward == training_reward(trained[0])
    assert episode.components["rank"] == episode.reward


def test_a_resumed_loop_goes_on_with_the_same_layers(tmp_path: Path) -> None:
    path = tmp_path / "run"
    play(path, 2, create=True)
    play(path, 4, create=False)
    assert_books_close(path)
    assert all(len(layer_of(tape)) <= 1 for tape in of(path)), "compared once"
    with Store.open(path) as store:
        history = history_in(store, tmp_path / "elsewhere", settings_of(), policy=model(3))
        assert history.restore() == 4, "from the tapes and their layers alone, to the published weights"


def test_a_comparison_that_fails_trains_nobody(tmp_path: Path) -> None:
    def broken(tapes: Sequence[Tape]) -> list[float]:
        raise OSError("the judge is down")

    path = tmp_path / "run"
    failing = Rewards([RewardSource(score=right), RewardSource(score=broken, per="group")])
    play(path, 1, create=True, env=rewarded(Silent, failing))
    books = assert_books_close(path)
    assert books.tokens["trained"] == 0
    assert books.tokens["unscored"] > 0
