"""`loop.stop_at` ends a run when the reward on held-out tasks reaches it, and a resumed run knows that it has ended."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tapereel.cli import main
from tapereel.finetune import TrainConfig
from tapereel.finetune.inspect import reproduce
from tapereel.finetune.run.training import Training
from tapereel.finetune.trainer import checkpoints
from tapereel.tapes.common import ConfigError, load_config
from tapereel.tapes.store import Store, read_metrics

from .lab import WORLD, answer_of, refusal_of
from .test_longer import results_of, words
from .world import EXAMPLE

RISING = ("--agent", f"{EXAMPLE}:player", "--env", f"{WORLD}:Rising", "--tasks", f"{EXAMPLE}:tasks")
# With this engine, an evaluation ends before the next weights are published, so the loop ends at update 2 or 3.
STOPS = ("loop.stop_at=0.5", "evaluation.engine=loop")


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("RISING_RUN", str(tmp_path / "r"))
    monkeypatch.setenv("RISING_AT", "2")
    return tmp_path / "r"


def state(run: Path) -> Any:
    """The parts of a run that a resumption may not change."""
    results = {name: value for name, value in results_of(run).items() if name not in ("seconds", "books", "summary")}
    with Store.open(run) as store:
        tapes = [summary.id for summary in store.summaries()]
    return results, tapes, read_metrics(run / "metrics.jsonl"), (run / "config.yaml").read_text()


@pytest.mark.timeout(240)
def test_a_run_ends_at_its_reward_and_continues_if_the_reward_is_changed(run: Path, model: str, capsys):
    found = answer_of(capsys, *words(model, run, 50, *STOPS, scene=RISING))
    done = found["updates"]
    assert done in (2, 3)
    assert (found["ended_by"], found["books_close"]) == ("stop_at", True)
    assert (found["held_out"]["before"], found["held_out"]["after"]) == (0.0, 1.0)
    assert found["held_out"]["every"] == {"1": 0.0, "2": 1.0}
    last = read_metrics(run / "metrics.jsonl")[-1]
    assert (last["phase"], last["update"], last["ended_by"]) == ("evaluation", done, "stop_at")
    newest = checkpoints(run / "checkpoints")[-1]
    assert (newest.update, newest.state["pinned"]) == (done, True)
    assert f"The loop ended after {done} of 50 updates" in (run / "report.html").read_text()
    assert str(reproduce(run)) == "verified"

    ended = state(run)
    resumed = ("train", "--config", str(run / "config.yaml"), "--out", str(run), "--resume")
    again = answer_of(capsys, *resumed)
    assert (again["updates"], again["ended_by"], again["held_out"]) == (done, "stop_at", found["held_out"])
    assert state(run) == ended, "a resumed run does nothing"
    assert "loop.stop_at=0.5" in refusal_of(capsys, *resumed, "--set", "loop.updates=60")
    lower = answer_of(capsys, *resumed, "--set", "loop.stop_at=0.25")
    assert (lower["updates"], lower["held_out"]) == (done, found["held_out"]), "this reward was reached as well"

    longer = answer_of(capsys, *resumed, "--set", "loop.stop_at=2", "--set", "loop.updates=5")
    assert (longer["updates"], longer["ended_by"], longer["books_close"]) == (5, "updates", True)
    results = results_of(run)
    assert results["evaluations"][str(done)] == ended[0]["after"]
    assert results["lengths"] == [{"updates": done, "done": done}]
    with Store.open(run) as store:
        assert [len(list(store.tapes(split=f"eval-{end}-sampled"))) for end in ("after", "after-000005")] == [4, 4]
    changes = [line for line in (run / "config.yaml").read_text().splitlines() if line.startswith("# loop.stop_at was")]
    assert [line.split(" until ")[0] for line in changes] == ["# loop.stop_at was 0.5", "# loop.stop_at was 0.25"]
    assert str(reproduce(run)) == "verified"


def test_a_run_that_dies_before_its_last_evaluation_makes_only_this_evaluation(
    run: Path, model: str, monkeypatch: pytest.MonkeyPatch, capsys
):
    evaluate = Training.evaluate

    async def dies(self: Training, engine: Any, when: str) -> Any:
        if when == "after":
            raise KeyboardInterrupt
        return await evaluate(self, engine, when)

    with monkeypatch.context() as patched:
        patched.setattr(Training, "evaluate", dies)
        assert main([*words(model, run, 50, *STOPS, scene=RISING)]) == 130
    capsys.readouterr()
    found = answer_of(capsys, *words(model, run, 50, *STOPS, scene=RISING), "--resume")
    assert found["updates"] in (2, 3)
    assert (found["ended_by"], found["held_out"]["after"]) == ("stop_at", 1.0)
    assert len(read_metrics(run / "metrics.jsonl")) == found["updates"] + 4, "three evaluations before the last one"


def test_a_model_that_has_the_reward_already_is_not_trained(run: Path, model: str, monkeypatch, capsys):
    monkeypatch.setenv("RISING_AT", "0")
    found = answer_of(capsys, *words(model, run, 50, *STOPS, scene=RISING))
    assert (found["updates"], found["ended_by"]) == (0, "stop_at")
    assert (found["held_out"]["before"], found["held_out"]["after"]) == (1.0, 1.0)
    assert Path(found["model"]).is_dir()


def test_an_engine_of_its_own_evaluates_while_the_loop_continues(run: Path, model: str, capsys):
    found = answer_of(capsys, *words(model, run, 2000, "loop.stop_at=0.5", scene=RISING))
    assert found["ended_by"] == "stop_at"
    assert 2 <= found["updates"] < 2000
    assert checkpoints(run / "checkpoints")[-1].update == found["updates"]


@pytest.mark.parametrize(
    ("setting", "named"),
    [
        ({"every": None}, "evaluation.every"),
        ({"fraction": 0}, "evaluation.fraction"),
    ],
)
def test_a_run_that_measures_nothing_refuses_it(setting: dict[str, Any], named: str):
    groups = {"engine": {"kind": "embedded", "model": "m"}, "evaluation": setting}
    sets = [*groups.items(), ("loop.stop_at", 0.5)]
    with pytest.raises(ConfigError, match=rf"loop\.stop_at=0\.5.*{named}"):
        load_config(TrainConfig, None, sets)
    assert load_config(TrainConfig, None, [("engine", groups["engine"]), ("loop.stop_at", 0)]).loop.stop_at == 0


@pytest.mark.parametrize("value", ["nan", "inf", "high"])
def test_the_reward_is_a_finite_number(value: str, capsys):
    found = refusal_of(capsys, "train", "--model", "m", "--out", "r", "--set", f"loop.stop_at={json.dumps(value)}")
    assert "loop.stop_at" in found
    assert value in found


def test_a_demo_refuses_it(capsys):
    assert "loop.stop_at" in refusal_of(capsys, "demo", "--set", "loop.stop_at=0.5", "--dry-run")
