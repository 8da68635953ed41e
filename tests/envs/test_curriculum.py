"""Pools by measured pass rate, draws by weight, and the same tasks after a crash."""

from __future__ import annotations

import asyncio
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tapereel.envs import BadTasks, Taskset
from tapereel.envs.curriculum import Curriculum, Rate, pass_rates, pools
from tapereel.tapes import Task
from tapereel.tapes.store import Store

from ..finetune.loop.lab import LETTERS, assert_books_close, history_in, loop_in, run, settings_of, tasks

ALL = Taskset(range(100), name="numbers")
RATES = {Task.of(n).hash: Rate(passed=n % 5, tried=4) for n in range(100) if n % 5 < 5 and n < 90}


def test_pools_by_pass_rate() -> None:
    parts = pools(ALL, RATES)
    # 0/4 is hard, 1/4 to 3/4 normal (the bounds are), 4/4 easy; the last ten were never tried.
    assert {name: len(part) for name, part in parts.items()} == {"easy": 18, "normal": 54, "hard": 18, "new": 10}
    assert all(task.private % 5 == 0 for task in parts["hard"])  # type: ignore[operator]
    assert sum(len(part) for part in parts.values()) == len(ALL)
    with pytest.raises(BadTasks, match=r"hard=0\.5.*easy=0\.2"):
        pools(ALL, RATES, easy=0.2, hard=0.5)


def test_draws_follow_the_weights_and_every_task_of_a_pool_comes_once_an_epoch() -> None:
    parts = pools(ALL, RATES)
    drawn = Curriculum(parts, {"easy": 1, "hard": 3}, seed=5)
    names = [drawn.pool(k) for k in range(2000)]
    assert Counter(names)["hard"] == pytest.approx(1500, abs=120)  # six standard deviations
    hard = [drawn(k) for k in range(200) if drawn.pool(k) == "hard"]
    assert len({task.hash for task in hard[:18]}) == 18
    assert {task.hash for task in hard[:18]} == parts["hard"].hashes
    assert {task.hash for task in hard[18:36]} == parts["hard"].hashes


def test_task_k_is_the_same_in_every_process_and_order() -> None:
    parts = pools(ALL, RATES)
    one, other = (Curriculum(parts, {"easy": 1, "normal": 1}, seed=3) for _ in range(2))
    backwards = [other(k) for k in reversed(range(50))]
    assert [one(k) for k in range(50)] == backwards[::-1]
    assert [Curriculum(parts, {"easy": 1, "normal": 1}, seed=4)(k) for k in range(50)] != backwards[::-1]


def test_stages_change_the_weights() -> None:
    drawn = Curriculum(pools(ALL, RATES), [(0, {"easy": 1}), (20, {"normal": 1}), (40, {"hard": 1})])
    assert [drawn.pool(k) for k in (0, 19, 20, 39, 40, 400)] == ["easy", "easy", "normal", "normal", "hard", "hard"]


def test_an_empty_pool_gives_its_share_to_the_others() -> None:
    parts = {**pools(ALL, RATES), "hard": Taskset(())}
    assert {Curriculum(parts, {"hard": 9, "easy": 1}).pool(k) for k in range(30)} == {"easy"}
    with pytest.raises(BadTasks, match=r"\{'hard': 1\}.*\beasy 18, .*\bhard 0\b"):
        Curriculum(parts, {"hard": 1})


@pytest.mark.parametrize(
    ("weights", "sentence"),
    [
        ({"harder": 1}, "'harder'.*'easy'"),
        ({"easy": -1}, r"\{'easy': -1\}"),
        ([(1, {"easy": 1})], r"\b0\b.*\[1\]"),
        ([], r"\b0\b.*\[\]"),
        ({"easy": float("nan")}, r"\{'easy': nan\}"),
    ],
)
def test_wrong_weights(weights: Any, sentence: str) -> None:
    with pytest.raises(BadTasks, match=sentence):
        Curriculum(pools(ALL, RATES), weights)


def test_rates_are_measured_on_recorded_tapes_and_a_loop_draws_by_them(tmp_path: Path) -> None:
    run(tmp_path / "first", settings_of(updates=1))
    with Store.open(tmp_path / "first") as store:
        recorded = list(store.tapes(closed=True))
        rates = pass_rates(recorded, success=0.5)
    assert sum(rate.tried for rate in rates.values()) == len(recorded)
    some = next(iter(rates))
    mine = [tape.reward for tape in recorded if tape.begin.task_hash == some]
    assert rates[some] == Rate(sum(r >= 0.5 for r in mine if r is not None), len(mine))
    words = Taskset([a + b for a in LETTERS for b in LETTERS])
    parts = pools(words, rates)
    assert len(parts["new"]) < len(words)
    drawn = Curriculum(parts, dict.fromkeys(parts, 1))
    run(tmp_path / "second", settings_of(updates=2), tasks=drawn)
    with Store.open(tmp_path / "second") as store:
        for tape in store.tapes():
            assert tape.begin.task == drawn(int((tape.begin.group or "").rpartition("/")[2]))


def test_after_a_crash_the_groups_have_the_tasks_that_they_would_have_had(tmp_path: Path) -> None:
    words = Taskset([a + b for a in LETTERS for b in LETTERS])

    def curriculum() -> Curriculum:
        return Curriculum({"easy": words[:8], "hard": words[8:]}, {"easy": 1, "hard": 1}, seed=7)

    config, path = settings_of(updates=4), tmp_path / "run"
    with Store.create(path, durability="os") as store:
        history = history_in(store, path, config)
        asyncio.run(loop_in(history, settings_of(updates=2), tasks=curriculum()).run())
    with Store.open(path, write=True, durability="os") as store:
        history = history_in(store, path, config)
        history.restore()
        assert history.updates == 2
        asyncio.run(loop_in(history, config, tasks=curriculum()).run())
    assert_books_close(path)
    whole = curriculum()
    with Store.open(path) as store:
        groups = {int((tape.begin.group or "").rpartition("/")[2]): tape.begin.task for tape in store.tapes()}
    assert sorted(groups) == list(range(max(groups) + 1)), "none is left out"
    assert groups == {k: whole(k) for k in groups}


def test_the_cursor_of_a_taskset_goes_on_where_it_was() -> None:
    cursor = ALL.cursor(seed=2)
    for _ in range(130):
        next(cursor)
    again = Taskset(range(100)).cursor(seed=2, start=130)
    assert [next(again) for _ in range(120)] == [next(cursor) for _ in range(120)]
    assert tasks(2)(3) == tasks(2)(3)


@pytest.mark.parametrize(("passed", "tried"), [(5, 4), (0, 0), (-1, 3), (1, -1)])
def test_a_rate_that_cannot_be_is_refused_where_it_is_made(passed: int, tried: int) -> None:
    with pytest.raises(BadTasks, match=rf"{passed} of {tried}\b"):
        Rate(passed, tried)
