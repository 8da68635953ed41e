"""`tapereel reproduce` and `tapereel show --taught` on runs of `train` and `demo`."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from tapereel.cli import main
from tapereel.finetune.inspect.explainer import Explainer
from tapereel.finetune.inspect.lab import lab
from tapereel.finetune.run import DemoConfig
from tapereel.finetune.run.demonstrations import demo as run_demo
from tapereel.finetune.trainer import checkpoints
from tapereel.tapes.common import ConfigError, load_config
from tapereel.tapes.records import Label
from tapereel.tapes.store import Store

from ..finetune.loop.micro import MICRO, UPDATES, WARM
from ..front.pages import words_of
from .lab import answer_of, refusal_of


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("demo") / "run"
    run_demo(MICRO, out, controls=True)
    return out


def test_a_demo_s_page_is_that_of_any_training_run(demo: Path):
    page = words_of(demo / "report.html")
    for said in (
        "Training solver",
        "Loss of the imitation",
        "tapereel explain",
        "tapereel replay",
        "versions",
    ):
        assert said in page, said


def test_a_demo_is_verified_with_all_that_is_on_the_way(demo: Path, capsys: pytest.CaptureFixture[str]):
    found = answer_of(capsys, "reproduce", str(demo))
    assert (found["outcome"], found["updates"], found["of"]) == ("verified", WARM + UPDATES, WARM + UPDATES)
    assert found["digest"] == checkpoints(demo / "checkpoints")[-1].state["digest"]
    assert found["published"] == UPDATES + 2, "the base, the start of the loop, and each of its updates"
    assert found["checkpoints"] == len(checkpoints(demo / "checkpoints")) >= 3
    assert found["base"] == f"the model in {demo}/model-micro"


def test_one_checkpoint_is_found_by_path_name_and_update(
    demo: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    path = demo / "checkpoints" / f"update-{WARM:06d}"
    for name in (str(path), path.name, str(WARM)):
        found = answer_of(capsys, "reproduce", str(demo), name)
        assert (found["outcome"], found["of"], found["checkpoints"]) == ("verified", WARM, 1)
    assert answer_of(capsys, "reproduce", str(path))["checkpoint"] == str(path)
    away = shutil.copytree(path, tmp_path / "away")
    assert answer_of(capsys, "reproduce", str(demo), str(away))["checkpoint"] == str(away)
    said = refusal_of(capsys, "reproduce", str(demo), "update-000999")
    assert "'update-000999'" in said
    assert f"update-{WARM + UPDATES:06d}" in said


def test_a_control_begins_with_the_demo_s_weights(demo: Path, capsys: pytest.CaptureFixture[str]):
    for name in ("sft", "shuffled"):
        found = answer_of(capsys, "reproduce", str(demo / "controls" / name))
        base = f"the model in {demo}/checkpoints/update-000008/hf"
        assert (found["outcome"], found["base"]) == ("verified", base)
        assert found["updates"] == found["of"] > 0


def test_the_answer_for_people_and_progress_apart(demo: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["reproduce", str(demo), str(WARM)]) == 0
    out, err = capsys.readouterr()
    assert out.startswith("verified\n")
    assert "8 of 8" in out
    assert "applying the recorded updates again: 8/8" in err


def test_a_run_of_train_is_verified_while_its_model_is_there(
    trained: Path, model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    found = answer_of(capsys, "reproduce", str(trained))
    assert (found["outcome"], found["updates"], found["base"]) == ("verified", 3, f"the model in {model}")
    run = shutil.copytree(trained, tmp_path / "run")
    config = run / "config.yaml"
    config.write_text(config.read_text().replace(model, str(tmp_path / "gone")))
    found = answer_of(capsys, "reproduce", str(run), code=2)
    assert (found["outcome"], str(tmp_path / "gone") in found["reason"]) == ("unverifiable", True)
    config.write_text(config.read_text().replace(str(tmp_path / "gone"), str(run / "checkpoints/update-000003/hf")))
    assert "have" in answer_of(capsys, "reproduce", str(run), code=2)["reason"]
    config.write_text(config.read_text().replace(str(run / "checkpoints/update-000003/hf"), model) + "colour: red\n")
    assert "colour" in answer_of(capsys, "reproduce", str(run), code=2)["reason"]
    config.unlink()
    assert "config.yaml" in answer_of(capsys, "reproduce", str(run), code=2)["reason"]


def test_an_edited_checkpoint_of_a_run_breaks_the_verdict(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    run = shutil.copytree(trained, tmp_path / "run")
    state = run / "checkpoints" / "update-000002" / "state.json"
    state.write_text(json.dumps({**json.loads(state.read_text()), "digest": "0" * 64}))
    found = answer_of(capsys, "reproduce", str(run), code=1)
    assert (found["difference"]["update"], found["difference"]["field"]) == (1, "checkpoint")
    assert answer_of(capsys, "reproduce", str(run), "3")["outcome"] == "verified", "its own weights follow all the same"


def test_a_run_without_checkpoints_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    Store.create(tmp_path / "run").close()
    assert "checkpoint" in refusal_of(capsys, "reproduce", str(tmp_path / "run"))


@pytest.mark.parametrize("words", [(), ("40",)])
def test_a_folder_that_is_not_there_is_said_to_be_that(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: tuple[str, ...]
):
    (tmp_path / "file").write_text("")
    for name in ("nowhere", "file", "nowhere/checkpoints/update-000040"):
        assert str(tmp_path / name) in refusal_of(capsys, "reproduce", str(tmp_path / name), *words)
    assert not (tmp_path / "nowhere").exists()


def test_which_tapes_taught_a_checkpoint(demo: Path, capsys: pytest.CaptureFixture[str]):
    for one in checkpoints(demo / "checkpoints"):
        found = answer_of(capsys, "show", str(demo), "--taught", str(one.path), "--last", "100000")
        taught = one.taught()
        assert found["count"] == len(taught) == one.state["taught"]["tapes"]
        assert {tape["id"] for tape in found["tapes"]} == set(taught)
    splits = {tape["split"] for tape in found["tapes"]}
    assert splits == {"demo", "train"}
    assert "state.json" in refusal_of(capsys, "show", str(demo), "--taught", str(demo))


def test_the_lab_has_the_updates_of_every_phase_as_recorded(demo: Path):
    report = lab(demo, ["own", "dr_grpo"], [0, WARM - 1, WARM, WARM + UPDATES - 1])
    assert [e.phase for e in report.experiments] == ["sft", "sft", "rl", "rl"]
    assert all(e.lines[0].recorded for e in report.experiments)


def test_what_was_added_since_changes_neither_verdict_nor_explanation(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    run = shutil.copytree(trained, tmp_path / "run")
    with Store.open(run, write=True) as store:
        use = next(s.record for s in store.run_records("use") if s.record.items)
        tape, call, *_ = use.items[0]
        mate = next(name for name in use.info["tapes"] if name != tape)
        before = Explainer(store).explain(mate)
        store.append_layer(Label(tape=tape, call=call, use="discarded"))
        store.writer.sync()
        after = Explainer(store).explain(mate)
    assert after == before
    assert any(token.advantage is not None for row in after.rows for token in row.tokens)
    assert answer_of(capsys, "reproduce", str(run))["outcome"] == "verified"


def test_a_demo_has_one_recipe_and_writes_down_which():
    config = DemoConfig(algo="ppo")
    assert config.loop.recipe == "ppo"
    assert load_config(DemoConfig, None, ["algo=ppo", "loop.recipe=ppo"]) == config
    with pytest.raises(ConfigError, match=r"loop\.recipe\b.*'rloo'.*\balgo\b.*'grpo'"):
        load_config(DemoConfig, None, ["loop.recipe=rloo"])
    with pytest.raises(ConfigError, match=r"held_out\b.*\b60\b.*\b64\b"):
        load_config(DemoConfig, None, ["tasks=64", "held_out=60"])
