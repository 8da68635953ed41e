"""Evaluation: estimates in closed form, intervals, and nothing of it in the state of training."""

from __future__ import annotations

import asyncio
import itertools
import json
import math
import re
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tapereel.agents import EpisodeSpec, ScriptedEngine, rollout
from tapereel.agents.runs.group import run_all
from tapereel.agents.runs.pass_at_k import (
    NothingInCommon,
    bootstrap,
    compare,
    evaluate_rewards,
    pass_at_k,
    share_interval,
    standard_error,
    wilson,
)
from tapereel.cli import main
from tapereel.envs.load_named import load_named
from tapereel.finetune import Evaluation
from tapereel.finetune.run.evaluation import specs_of
from tapereel.tapes import Sampling, Tape, Task
from tapereel.tapes.store import Store

from ...cli import world
from ...cli.lab import SCENE, answer_of, refusal_of, settings
from ...cli.world import EXAMPLE

CASES = json.loads((Path(__file__).parents[2] / "ledger" / "evaluation.json").read_text(encoding="utf-8"))
WORLD = str(Path(__file__).parents[2] / "cli" / "world.py")


@pytest.mark.ledger("F86")
def test_pass_at_k_is_the_share_of_subsets_with_a_success():
    for case in CASES["pass_at_k"]:
        assert pass_at_k(case["n"], case["c"], case["k"]) == pytest.approx(case["value"], rel=1e-12)


@given(st.integers(1, 9).flatmap(lambda n: st.tuples(st.just(n), st.integers(0, n), st.integers(1, n))))
def test_pass_at_k_by_counting_every_subset(nck: tuple[int, int, int]):
    n, c, k = nck
    subsets = list(itertools.combinations([1] * c + [0] * (n - c), k))
    assert pass_at_k(n, c, k) == pytest.approx(sum(any(s) for s in subsets) / len(subsets), abs=1e-12)


def test_pass_at_k_neither_overflows_nor_takes_what_it_can_not_know():
    assert pass_at_k(20_000, 1, 10_000) == pytest.approx(0.5, rel=1e-9)
    assert pass_at_k(5000, 2500, 2501) == 1.0
    for wrong in ((4, 5, 1), (4, -1, 1), (4, 1, 5), (4, 1, 0)):
        with pytest.raises(ValueError, match=f"pass@{wrong[2]} "):
            pass_at_k(*wrong)


def test_wilsons_interval_and_the_effective_number_of_tasks():
    for case in CASES["wilson"]:
        assert wilson(case["p"], case["n"]) == pytest.approx((case["low"], case["high"]), abs=1e-6)
    bits = [1.0] * 7 + [0.0] * 3
    one = share_interval(bits)
    assert one is not None
    assert (one.low, one.high) == pytest.approx(wilson(0.7, 10))
    several = share_interval([0.7] * 9 + [0.6])
    assert several is not None
    assert several.low is not None
    assert several.high is not None
    assert 0.1 < several.high - several.low < 0.4 < wilson(0.69, 10)[1] - wilson(0.69, 10)[0]
    agreed = share_interval([1.0] * 10)
    assert agreed is not None
    assert (agreed.low, agreed.high) == pytest.approx(wilson(1.0, 10))
    assert share_interval([]) is None


def test_intervals_of_the_largest_floats_stay_among_them():
    found = bootstrap([1e308, -1e308] * 2)
    assert found is not None
    assert -1e308 <= found.low <= found.value <= found.high <= 1e308
    assert len(str(found)) < 40
    rewards = {"a": [1e308, -1e308], "b": [1e308]}
    assert standard_error(rewards) == math.inf
    assert compare(rewards, {"a": [-1e308], "b": [-1e308]}).reward.tasks == 2


def test_the_bootstrap_is_seeded_draws_tasks_and_says_nothing_of_one():
    values = [math.sqrt(k) for k in range(30)]
    first = bootstrap(values, seed=3)
    assert first == bootstrap(values, seed=3)
    assert first != bootstrap(values, seed=4)
    assert first is not None
    assert first.low is not None
    assert first.high is not None
    assert first.low < first.value < first.high
    assert first.value == pytest.approx(fmean(values))
    big = bootstrap([0.0, 1.0] * 200)
    assert big is not None
    assert (big.low, big.high) == pytest.approx((0.5 - 1.96 * 0.5 / 20, 0.5 + 1.96 * 0.5 / 20), abs=0.006)
    one = bootstrap([0.3])
    assert one is not None
    assert (one.value, one.low, one.high) == (0.3, None, None)


@pytest.mark.ledger("F86")
def test_what_nobody_scored_is_neither_a_failure_nor_zero():
    rewards = {"a": [1.0, None, 1.0], "b": [None, None, 0.0], "c": [None], "d": [0.0, 1.0, 1.0]}
    scores = evaluate_rewards(rewards, k=(1, 2, 3, 4))
    assert scores.reward is not None
    assert scores.reward.value == pytest.approx((1 + 0 + 2 / 3) / 3)
    assert (scores.tasks, scores.attempts, scores.unscored) == (4, 10, 4)
    assert scores.short == {1: 0, 2: 1, 3: 2, 4: 3}
    found = {k: None if part is None else (part.value, part.tasks) for k, part in scores.pass_at.items()}
    assert found == {1: (pytest.approx((1 + 0 + 2 / 3) / 3), 3), 2: (1.0, 2), 3: (1.0, 1), 4: None}
    assert evaluate_rewards({"c": [None]}, k=(1,)).reward is None
    half = evaluate_rewards({"a": [0.5, 0.4]}, k=(1,), success=0.5).pass_at[1]
    assert half is not None
    assert half.value == 0.5


def test_a_difference_is_paired_by_task():
    """Tasks differ far more than policies: unpaired, the intervals overlap; paired, the difference is seen."""
    hard = [0.05 * k for k in range(20)]
    better = {str(k): [min(1.0, x + 0.05)] for k, x in enumerate(hard)}
    worse = {str(k): [x] for k, x in enumerate(hard)} | {"other": [1.0]}
    found = compare(better, worse, k=(1,), success=0.5)
    assert found.reward.value == pytest.approx(0.05)
    assert found.reward.low == pytest.approx(0.05)
    assert (found.only_first, found.only_second, found.reward.tasks) == (0, 1, 20)
    assert found.pass_at[1] is not None
    assert found.pass_at[1].value == pytest.approx(1 / 20)
    alone, other = (evaluate_rewards(rewards).reward for rewards in (better, worse))
    assert alone is not None
    assert other is not None
    assert alone.low is not None
    assert other.high is not None
    assert alone.low < other.high
    with pytest.raises(NothingInCommon):
        compare({"a": [1.0]}, {"b": [1.0]})


def test_labels_are_parts_of_the_whole():
    scores = evaluate_rewards({"a": [1.0], "b": [0.0], "c": [1.0]}, k=(1,), labels={"a": "x", "b": "y", "c": "x"})
    assert {label: part.pass_at[1].value for label, part in scores.by_label.items() if part.pass_at[1]} == {
        "x": 1.0,
        "y": 0.0,
    }
    assert sum(part.tasks for part in scores.by_label.values()) == scores.tasks


def _evaluated(store: Store, *, attempts: int = 1, k: Any = (), split: str = "eval") -> Evaluation:
    player, digits = load_named(f"{EXAMPLE}:player"), load_named(f"{EXAMPLE}:Digits")
    counting = load_named(f"{EXAMPLE}:counting")
    tasks = [Task(public=str(k), private=str((k + 1) % 10) if k else "x") for k in range(5)]

    specs = specs_of(tasks, sampling=Sampling(), attempts=attempts, split=split)
    return _played(player, digits, specs, counting, store.writer, k=k)


def _played(agent: Any, env: Any, specs: Any, model: Any, journal: Any = None, k: Any = ()) -> Evaluation:
    async def play(spec: EpisodeSpec) -> Tape:
        return await rollout(agent, env, spec, engine=ScriptedEngine(model), journal=journal)

    return Evaluation.of(asyncio.run(run_all(specs, play)), k=k)


def test_what_the_world_broke_is_unscored():
    """A 0 that the environment gave before it broke says nothing of the policy."""
    specs = specs_of(world.few, sampling=Sampling())
    found = _played(world.goes_on, world.ScoresThreeAndBreaks, specs, lambda request: "6")
    assert (found.rewards, found.scored, found.mean) == ((None, 1.0), 1, 1.0)
    assert found.scores.unscored == 1


@pytest.mark.ledger("F86", "T53")
def test_an_evaluation_is_held_out_and_its_attempts_share_the_world(tmp_path: Path):
    with Store.create(tmp_path / "run") as store:
        found = _evaluated(store, attempts=3, k=(1, 3))
        store.writer.sync()
        tapes = list(store.tapes())
        books = store.books()
    assert found.scores.pass_at[3] is not None
    assert (found.scores.pass_at[3].value, found.scored, found.mean) == (0.8, 15, pytest.approx(0.8))
    assert {tape.begin.split for tape in tapes} == {"eval"}
    assert books.sampled == books.tokens["held_out"]
    groups: dict[Any, list[Any]] = {}
    for tape in tapes:
        groups.setdefault(tape.begin.group, []).append(tape.begin)
    assert len(groups) == 5
    for begins in groups.values():
        assert len({b.env_seed for b in begins}) == 1
        assert len({b.seed for b in begins}) == 3
    with Store.create(tmp_path / "other") as store, pytest.raises(ValueError, match="'train'"):
        _evaluated(store, split="train")


@pytest.mark.ledger("F86")
def test_run_reports_pass_at_k_and_scores_reads_it_back(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    script = ("--set", f"engine.policy={EXAMPLE}:counting", "--set", "count=12")
    out, other = str(tmp_path / "r"), str(tmp_path / "s")
    found = answer_of(capsys, "run", *SCENE, *script, "--k", "1,3", "--out", out)
    assert (found["attempts"], found["episodes"]) == (3, 36)
    assert found["scores"]["pass_at"]["3"] == {
        "value": 1.0,
        "low": pytest.approx(wilson(1, 12)[0]),
        "high": 1.0,
        "tasks": 12,
    }
    again = answer_of(capsys, "run", *SCENE, *script, "--set", "attempts=3", "--k", "2", "--resume", "--out", out)
    assert (again["recorded"], list(again["scores"]["pass_at"])) == (0, ["2"])
    half = ("--set", f"engine.policy={WORLD}:half_right", "--set", "count=12")
    answer_of(capsys, "run", *SCENE, *half, "--out", other)
    read = answer_of(capsys, "scores", out, "--against", other)
    assert read["difference"]["reward"]["tasks"] == 12
    assert read["difference"]["reward"]["value"] == pytest.approx(1 - read["against_scores"]["reward"]["value"])
    assert main(["scores", out, "--by", "kind"]) == 0
    assert "without kind:" in capsys.readouterr().out
    assert re.search(r"'nothing'.*\beval\b", refusal_of(capsys, "scores", out, "--split", "nothing"))
    assert "--k '0,two'" in refusal_of(capsys, "scores", out, "--k", "0,two")
    assert "1 <= k <= attempts" in refusal_of(
        capsys, "run", *SCENE, *script, *settings("k=[9]"), "--out", str(tmp_path / "t")
    )


def test_what_broke_counts_as_unscored(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    scene = ("--agent", f"{EXAMPLE}:player", "--env", f"{WORLD}:BrokenForThree", "--tasks", f"{EXAMPLE}:tasks")
    words = ("--set", f"engine.policy={EXAMPLE}:counting", "--set", "count=40", "--k", "1,2")
    found = answer_of(capsys, "run", *scene, *words, "--out", str(tmp_path / "r"))["scores"]
    assert (found["tasks"], found["attempts"], found["unscored"]) == (40, 80, 20)
    assert found["pass_at"]["2"]["tasks"] == 30
    assert found["pass_at"]["2"]["value"] == found["reward"]["value"] == 1.0
    assert not math.isnan(found["pass_at"]["1"]["low"])
