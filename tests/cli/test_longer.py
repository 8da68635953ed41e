"""A run that came to its end goes on for more updates, and is then what a run of that length would have been."""

from __future__ import annotations

import json
import re
import secrets
from pathlib import Path
from typing import Any

import pytest

from tapereel.finetune import TrainConfig
from tapereel.finetune.inspect import reproduce
from tapereel.finetune.inspect.lab import lab
from tapereel.finetune.trainer import checkpoints
from tapereel.tapes.common import load_config
from tapereel.tapes.store import Store, read_metrics

from .lab import DEADLY, MICRO, SCENE, answer_of, killed, refusal_of, settings

SYNC = (
    "loop.max_lag=0",
    "loop.groups=4",
    "loop.group_size=6",
    "loop.epochs=2",
    "loop.minibatches=2",
    "evaluation.every=1",
    # A bonus on entropy moves the weights also where all attempts earned the same.
    'loop.changes.regulariser=[{"kind": "entropy", "coefficient": 0.05}]',
)


def words(model: str, out: Path, updates: int, *more: str, scene: tuple[str, ...] = SCENE) -> tuple[str, ...]:
    every = settings(*MICRO, *SYNC, *more, f"loop.updates={updates}")
    return ("train", *scene, "--model", model, "--out", str(out), *every)


def published(run: Path) -> dict[str, str]:
    """Version -> digest of the weights."""
    with Store.open(run) as store:
        return {stored.record.version: stored.record.digest for stored in store.run_records("publish")}


def results_of(run: Path) -> dict[str, Any]:
    return json.loads((run / "results.json").read_text())


@pytest.fixture
def one_lineage(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs that are compared have the same groups: their names and seeds follow from the lineage."""
    monkeypatch.setattr(secrets, "token_hex", lambda n: "00" * n)


@pytest.mark.ledger("F83", "P9")
@pytest.mark.usefixtures("one_lineage")
def test_a_run_of_two_made_four_is_a_run_of_four(model: str, tmp_path: Path, capsys):
    grown, straight = tmp_path / "grown", tmp_path / "straight"
    first = answer_of(capsys, *words(model, grown, 2))
    measured = results_of(grown)["after"]
    longer = ("train", "--config", str(grown / "config.yaml"), "--out", str(grown), "--resume")
    found = answer_of(capsys, *longer, *settings("loop.updates=4"))
    other = answer_of(capsys, *words(model, straight, 4))
    assert published(grown) == published(straight)
    assert len(set(published(grown).values())) == 5
    ends = [checkpoints(run / "checkpoints")[-1] for run in (grown, straight)]
    assert [end.update for end in ends] == [4, 4]
    assert ends[0].state["digest"] == ends[1].state["digest"]
    assert (first["updates"], found["updates"], found["books_close"]) == (2, 4, True)
    assert found["reward"] == other["reward"]

    results = results_of(grown)
    assert results["evaluations"]["2"] == measured
    assert sorted(found["held_out"]["every"]) == ["1", "2", "3"]
    assert results["lengths"] == [{"updates": 2, "done": 2}]
    lineage = results["lineage"]
    with Store.open(grown) as store:
        for split, version in (("eval-after-sampled", 2), ("eval-after-000004-sampled", 4)):
            tapes = list(store.tapes(split=split))
            assert len(tapes) == 4
            assert {s[0] for tape in tapes for call in tape.calls for s in call.spans} == {f"{lineage}:{version}"}
    rl = [line["update"] for line in read_metrics(grown / "metrics.jsonl") if line["phase"] == "rl"]
    assert rl == [1, 2, 3, 4]

    verdict = reproduce(grown)
    assert (str(verdict), verdict.updates) == ("verified", 4)
    assert (verdict.published, str(reproduce(grown, 2))) == (5, "verified")
    assert [one.update for one in lab(grown, ["own"], [1, 3]).experiments] == [1, 3]


def test_the_configuration_has_the_length_that_holds_and_those_before(model: str, tmp_path: Path, capsys):
    run = tmp_path / "r"
    answer_of(capsys, *words(model, run, 1))
    before = (run / "config.yaml").read_text()
    longer = ("train", "--config", str(run / "config.yaml"), "--out", str(run), "--resume")
    for updates in (2, 3):
        answer_of(capsys, *longer, *settings(f"loop.updates={updates}"))
    now = (run / "config.yaml").read_text()
    told, rest = now.splitlines()[:2], now.splitlines()[2:]
    assert [line.split(" until ")[0] for line in told] == ["# loop.updates was 1", "# loop.updates was 2"]
    assert [line.split(", ")[1] for line in told] == [f"when {n} updates of the loop were done." for n in (1, 2)]
    assert rest == before.replace("updates: 1\n", "updates: 3\n").splitlines()
    assert load_config(TrainConfig, run / "config.yaml").loop.updates == 3
    ended = answer_of(capsys, *longer)
    assert ended["updates"] == 3
    assert (run / "config.yaml").read_text() == now, "nothing changed, so nothing is noted"
    assert [one["updates"] for one in results_of(run)["lengths"]] == [1, 2]


def test_what_is_done_is_not_undone(model: str, tmp_path: Path, capsys):
    run = tmp_path / "r"
    answer_of(capsys, *words(model, run, 3))
    kept = {path: (run / path).read_bytes() for path in ("config.yaml", "results.json", "metrics.jsonl")}
    less = refusal_of(capsys, *words(model, run, 2), "--resume")
    assert re.search(r"loop\.updates\b.*\b2\b.*\b3\b", less)
    assert "loop.groups" in refusal_of(capsys, *words(model, run, 4, "loop.groups=5"), "--resume")
    assert kept == {path: (run / path).read_bytes() for path in kept}


def test_a_schedule_is_not_stretched(model: str, tmp_path: Path, capsys):
    schedule = ("loop.optimiser.schedule.kind=linear", "loop.optimiser.schedule.total=3")
    run = tmp_path / "r"
    answer_of(capsys, *words(model, run, 1, *schedule))
    found = refusal_of(capsys, *words(model, run, 4, *schedule), "--resume")
    assert re.search(r"loop\.optimiser\.schedule\b.*\b3\b.*loop\.updates\b", found)
    answer_of(capsys, *words(model, run, 3, *schedule), "--resume")
    with Store.open(run) as store:
        rates = [stored.record.info["lr"] for stored in store.run_records("use")]
    assert (len(set(rates)), len(rates)) == (3, 6), "one rate an update, whatever its epochs"
    assert min(rates) > 0
    assert str(reproduce(run)) == "verified"


@pytest.mark.kill
@pytest.mark.timeout(240)
def test_a_run_may_end_earlier_than_it_was_to(model: str, tmp_path: Path, capsys):
    run = tmp_path / "r"
    killed(60, *words(model, run, 30, scene=DEADLY))
    with Store.open(run) as store:
        done = store.ledger(results_of(run)["lineage"]).next_update
    assert 0 < done < 30
    found = answer_of(capsys, *words(model, run, done + 1, scene=DEADLY), "--resume")
    assert found["updates"] == done + 1
    assert results_of(run)["lengths"] == [{"updates": 30, "done": done}]
    with Store.open(run) as store:
        assert list(store.tapes(split="eval-after-sampled")), "it has had no other end"
    assert str(reproduce(run)) == "verified"


@pytest.mark.kill
@pytest.mark.timeout(240)
@pytest.mark.parametrize("at", [3, 30, 54])
def test_killed_in_what_was_added(model: str, tmp_path: Path, capsys, at: int):
    """In a rollout, in an evaluation beside one, and in the one at the new end."""
    run = tmp_path / "r"
    answer_of(capsys, *words(model, run, 2, scene=DEADLY))
    before = published(run)
    killed(at, *words(model, run, 4, scene=DEADLY), "--resume")
    found = answer_of(capsys, *words(model, run, 4, scene=DEADLY), "--resume")
    assert (found["updates"], found["books_close"]) == (4, True)
    now = published(run)
    assert [version.partition(":")[2] for version in now] == list("01234")
    assert {version: now[version] for version in before} == before
    assert len(set(now.values())) == 5
    assert results_of(run)["lengths"] == [{"updates": 2, "done": 2}]
    assert results_of(run)["evaluations"]["2"]["sampled"]["n"] == 4
    rl = [line["update"] for line in read_metrics(run / "metrics.jsonl") if line["phase"] == "rl"]
    assert rl == [1, 2, 3, 4]
    verdict = reproduce(run)
    assert (str(verdict), verdict.published) == ("verified", 5)
