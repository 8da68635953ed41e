"""What a `Run` offers after `tr.open`: the settings, the summary, the metrics, the model, and the verbs of the command
line."""

from __future__ import annotations

from pathlib import Path

import pytest

import tapereel as tr
from tapereel.agents import RunConfig
from tapereel.finetune import LoopConfig, TrainConfig
from tapereel.tapes.errors import UsageError
from tapereel.tapes.store import Lease

from ...toy_envs import Echo

SHORT = {"loop.groups": 2, "loop.group_size": 4, "loop.sampling.max_tokens": 1, "evaluation.fraction": 0}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tr.Run:
    folder = tmp_path_factory.mktemp("trained")
    model = tr.save_tiny_model(folder / "model", "abcdefgh", size="micro")
    run = tr.train(tr.ChatAgent(), Echo, ["a", "b", "c", "d"], model, updates=2, out=folder / "run", settings=SHORT)
    (folder / "run").rename(folder / "moved")
    return tr.Run(folder / "moved", summary=run.summary)


def test_an_opened_run_has_the_summary_of_the_call_that_made_it(tmp_path: Path):
    made = tr.run(tr.ChatAgent(), Echo, ["a"], ["a"], out=tmp_path / "run")
    assert tr.open(tmp_path / "run").summary == made.summary


def test_the_summary_of_a_moved_run_names_its_new_folder(trained: tr.Run):
    found, made = tr.open(trained.path).summary, trained.summary
    assert found is not None
    assert found.run == str(trained.path)
    assert found.model == str(trained.model)
    assert trained.model == trained.path / "checkpoints" / "update-000002" / "hf"
    assert found.model_dump(exclude={"run", "model", "report"}) == made.model_dump(exclude={"run", "model", "report"})


def test_a_run_that_has_no_end_yet_has_no_summary(tmp_path: Path):
    with pytest.raises(tr.tapes.errors.TapereelError):
        tr.run(tr.ChatAgent(), Echo, ["a"], [], out=tmp_path / "run")
    tr.Store.create(tmp_path / "imported").close()
    opened = tr.open(tmp_path / "imported")
    assert (opened.summary, opened.model, opened.metrics()) == (None, None, [])
    with pytest.raises(UsageError, match=r"imported has no config\.yaml"):
        _ = opened.config


def test_a_run_has_its_settings_as_an_object_for_the_next_run(trained: tr.Run, tmp_path: Path):
    made = tr.run(tr.ChatAgent(), Echo, ["a"], ["a"], out=tmp_path / "run", seed=5, settings={"limits.turns": 1})
    config = made.config
    assert isinstance(config, RunConfig)
    again = tr.run(tr.ChatAgent(), Echo, ["a"], config=config, out=tmp_path / "again", attempts=2)
    assert (again.config.seed, again.config.limits.turns, again.config.attempts) == (5, 1, 2)
    assert isinstance(trained.config, TrainConfig)
    assert trained.config.loop.groups == 2


def test_arguments_override_an_object_of_settings_and_settings_override_both(trained: tr.Run, tmp_path: Path):
    config = trained.config.model_copy(update={"loop": LoopConfig(updates=7, group_size=6, groups=2), "seed": 3})
    made = tr.train(
        tr.ChatAgent(),
        Echo,
        ["a", "b", "c", "d"],
        config=config,
        updates=0,
        settings={"loop.group_size": 4},
        out=tmp_path / "run",
    )
    found = made.config
    assert (found.loop.updates, found.loop.group_size, found.seed) == (0, 4, 3)


def test_metrics_have_a_line_for_each_update(trained: tr.Run):
    assert [line["update"] for line in trained.metrics() if line["phase"] == "rl"] == [1, 2]


def test_tapes_are_scored_again_by_a_function(tmp_path: Path):
    def right(tape: tr.Tape) -> float:
        return 1.0

    run = tr.run(tr.ChatAgent(), Echo, ["a", "b"], ["a"], out=tmp_path / "run")
    assert run.rescore(right).counts["unverifiable"] == 2
    run.rescore(right, layer="mine")
    assert run.rescore(right, layer="mine").counts["verified"] == 2


def test_a_tape_is_explained_by_itself_or_its_id(trained: tr.Run):
    tape = trained.explain().tape.id
    assert trained.explain(tape) == trained.explain(trained.tape(tape))
    with pytest.raises(tr.tapes.errors.NoSuchTape):
        trained.explain("nowhere")


def test_two_runs_are_compared_by_object_and_by_path(trained: tr.Run, tmp_path: Path):
    other = tr.run(tr.ChatAgent(), Echo, ["a", "z"], ["a"], out=tmp_path / "run")
    found = trained.diff(other)
    assert found == trained.diff(tmp_path / "run")
    assert len(found.tasks) == 5


def test_a_run_is_written_as_one_page(trained: tr.Run, tmp_path: Path):
    page = trained.view(tmp_path / "page.html", browser=False)
    assert page.read_text(encoding="utf-8").startswith("<!doctype html>")
    assert trained.view(browser=False).suffix == ".html"


def test_a_run_is_taken_over_only_to_continue_it(tmp_path: Path):
    scene = (tr.ChatAgent(), Echo, ["a"], ["a"])
    tr.run(*scene, out=tmp_path / "run")
    with pytest.raises(UsageError, match="resume=True"):
        tr.run(*scene, out=tmp_path / "run", take_over=True)
    with Lease(tmp_path / "run"):
        with pytest.raises(UsageError, match="take_over=True"):
            tr.run(*scene, out=tmp_path / "run", resume=True)
        assert tr.run(*scene, out=tmp_path / "run", resume=True, take_over=True).reward is not None


def test_k_raises_the_attempts_that_nobody_set(tmp_path: Path):
    scene = (tr.ChatAgent(), Echo, ["a"], ["a"])
    assert set(tr.evaluate(*scene, out=tmp_path / "a", k=[1, 4]).pass_at) == {1, 4}
    assert tr.open(tmp_path / "a").config.attempts == 4
    with pytest.raises(UsageError, match="attempts"):
        tr.evaluate(*scene, out=tmp_path / "b", k=[4], attempts=2)
