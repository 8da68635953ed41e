"""`tapereel train` with a curriculum: tasks are drawn by how hard another run found them, also after a kill."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tapereel.envs.curriculum import pass_rates
from tapereel.tapes.store import Store

from .lab import DEADLY, MICRO, SCENE, WORLD, answer_of, killed, refusal_of, settings


@pytest.fixture
def tried(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Path:
    """A run that solved half of the tasks."""
    out = tmp_path / "tried"
    answer_of(capsys, "run", *SCENE, "--set", f"engine.policy={WORLD}:half_right", "--out", str(out))
    return out


def words(model: str, out: Path, tried: Path, *more: str, scene: tuple[str, ...] = SCENE) -> tuple[str, ...]:
    return (
        "train",
        *scene,
        "--model",
        model,
        "--out",
        str(out),
        *settings(*MICRO, f"curriculum.tapes={tried}", "evaluation.fraction=0", *more),
    )


def groups(run: Path) -> list[str]:
    """The task of each group, in order."""
    with Store.open(run) as store:
        return list({summary.group: summary.task_hash for summary in store.summaries(split="train")}.values())


def test_tasks_are_drawn_from_the_pools_that_the_weights_name(model: str, tried: Path, tmp_path: Path, capsys):
    with Store.open(tried) as store:
        rates = pass_rates(store.tapes(closed=True))
    assert Counter(rate.share for rate in rates.values()) == {0.0: 50, 1.0: 50}
    for pool, share in (("hard", 0.0), ("easy", 1.0)):
        out = tmp_path / pool
        found = answer_of(capsys, *words(model, out, tried, f"curriculum.weights={{{pool}: 1}}"))
        assert found["books_close"]
        assert {rates[task].share for task in groups(out)} == {share}
        kept = json.loads((out / "results.json").read_text())["task_rates"]
        assert kept == {task: [rate.passed, rate.tried] for task, rate in rates.items()}


def test_a_run_that_died_goes_on_with_the_tasks_that_it_would_have_had(model: str, tried: Path, tmp_path: Path, capsys):
    more = ("loop.max_lag=0",)
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    answer_of(capsys, *words(model, whole, tried, *more))
    killed(14, *words(model, cut, tried, *more, scene=DEADLY))
    shutil.rmtree(tried)
    answer_of(capsys, *words(model, cut, tried, *more, scene=DEADLY), "--resume")
    assert list(dict.fromkeys(groups(cut)))[:6] == list(dict.fromkeys(groups(whole)))[:6]


@pytest.mark.parametrize(
    ("more", "says"),
    [
        (("curriculum.weights={esay: 1}",), "'esay'"),
        (("curriculum.weights={normal: 1}",), "easy 50, normal 0, hard 50"),
        (("curriculum.easy=0.2",), "easy=0.2"),
        (('tasks=["77"]',), "`tapereel run`"),
    ],
)
def test_a_curriculum_that_cant_be_is_refused_before_anything_is_made(
    model: str,
    tried: Path,
    more: Any,
    says: str,
    tmp_path: Path,
    capsys,
) -> None:
    scene = SCENE[:4] if more[0].startswith("tasks") else SCENE
    assert says in refusal_of(capsys, *words(model, tmp_path / "r", tried, *more, scene=scene))
    assert not (tmp_path / "r").exists()
