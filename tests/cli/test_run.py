"""`tapereel run`: every place is filled once, whatever breaks, and whoever goes on with it."""

from __future__ import annotations

import asyncio
import errno
import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tapereel.agents import RunConfig
from tapereel.agents.setup import EmbeddedConfig, make_engine
from tapereel.cli import main
from tapereel.finetune.api import save_tiny_model
from tapereel.tapes.common import load_config
from tapereel.tapes.store import Disk, Store
from tapereel.tapes.store.run_directory import recorded_config

from ..tapes.common.test_config import VALUES
from .lab import DEADLY, NEXT, SCENE, WORLD, answer_of, killed, refusal_of, settings, tapes_of
from .world import EXAMPLE

SCRIPT = ("--set", f"engine.policy={NEXT}")
TEN = ("--set", "count=10")


def places(run: Path) -> Counter[tuple[str | None, int]]:
    return Counter((tape.begin.group, tape.begin.attempt) for tape in tapes_of(run))


def test_tasks_are_a_list_on_the_command_line_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["run", *SCENE, *SCRIPT, "--out", str(tmp_path / "r")]
    words[words.index("--tasks") + 1] = '[1, {"a": 2.5}, "x"]'
    answer_of(capsys, *words, code=1)
    assert [tape.begin.task.private for tape in tapes_of(tmp_path / "r")][:3] == [1, {"a": 2.5}, "x"]
    words[words.index("--tasks") + 1] = "[1, "
    assert "not JSON" in refusal_of(capsys, *words)


def test_every_task_is_attempted_and_the_summary_says_how_it_ended(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    found = answer_of(capsys, "run", *SCENE, *SCRIPT, *TEN, "--attempts", "2", "--out", str(tmp_path / "r"))
    assert (found["tasks"], found["attempts"], found["episodes"], found["recorded"]) == (10, 2, 20, 20)
    assert found["ends"] == [{"status": "finished", "cause": None, "episodes": 20}]
    assert (found["reward"], found["error"], found["scored"]) == (1.0, 0.0, 20)
    tapes = tapes_of(tmp_path / "r")
    assert set(places(tmp_path / "r").values()) == {1}
    for group in {tape.begin.group for tape in tapes}:
        members = [tape for tape in tapes if tape.begin.group == group]
        assert [tape.begin.attempt for tape in members] == [0, 1]
        assert len({tape.begin.env_seed for tape in members}) == 1
        assert len({tape.begin.seed for tape in members}) == 2
    assert {tape.begin.split for tape in tapes} == {"eval"}
    recorded = load_config(RunConfig, tmp_path / "r" / "config.yaml")
    assert (recorded.attempts, recorded.count) == (2, 10)


def test_people_get_a_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["run", *SCENE, *TEN, *settings('engine.answers=["7"]'), "--out", str(tmp_path / "r")]) == 0
    out, err = capsys.readouterr()
    assert "all 10 tasks have a result; mean reward 0.000 ± 0.000 (standard error over tasks) of 10 scored" in out
    assert "10 tasks x 1 attempt: 10 episodes on tape, 10 of them recorded now" in out
    assert "rolling out: 10/10 reward 0.000" in err


@pytest.mark.parametrize(("attempts", "reward", "scored"), [(1, 1.0, 1), (2, 1.0, 2)])
def test_what_the_world_broke_is_in_no_mean(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], attempts: int, reward: float, scored: int
):
    """Those episodes and their retries were scored before they broke, and the index has no reward of them."""
    out = tmp_path / "r"
    words = (
        "--agent",
        f"{WORLD}:goes_on",
        "--env",
        f"{WORLD}:ScoresThreeAndBreaks",
        "--tasks",
        f"{WORLD}:few",
        "--attempts",
        str(attempts),
    )
    found = answer_of(capsys, "run", *words, *settings('engine.answers=["6", "6"]'), "--out", str(out))
    with Store.open(out) as store:
        broken = [summary.reward for summary in store.summaries() if summary.status == "error"]
    assert broken == [None] * 2 * attempts
    assert (found["reward"], found["error"], found["scored"]) == (reward, None, scored)
    told = answer_of(capsys, "scores", str(out))["scores"]
    assert found["reward"] == told["reward"]["value"]
    assert found["scored"] == told["attempts"] - told["unscored"]


def test_a_run_without_any_sound_episode_has_no_mean(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    words = ("--agent", f"{WORLD}:goes_on", "--env", f"{WORLD}:ScoresThreeAndBreaks", "--tasks", f"{WORLD}:three")
    code = main(["run", *words, *settings('engine.answers=["6", "6"]'), "--out", str(tmp_path / "r")])
    out, _ = capsys.readouterr()
    assert code == 1
    assert "no attempt was scored" in out
    assert "mean reward" not in out


def test_a_model_directory_is_sampled_and_names_its_version(model: str, tmp_path: Path, capsys):
    words = ("run", *SCENE, "--model", model, *TEN, "--seed", "3")
    first = answer_of(capsys, *words, "--out", str(tmp_path / "a"))
    again = answer_of(capsys, *words, "--out", str(tmp_path / "b"), "--set", "concurrency=3")
    assert first["tokens"]["sampled"] == again["tokens"]["sampled"] == 10
    with Store.open(tmp_path / "a") as store:
        (publish,) = [stored.record for stored in store.run_records("publish")]
        tapes = list(store.tapes())
    assert publish.version == f"{publish.digest[:12]}:0"
    assert {span[0] for tape in tapes for call in tape.calls for span in call.spans} == {publish.version}

    def said(run: str) -> dict[str | None, list[Any]]:
        return {tape.begin.group: [list(c.completion or ()) for c in tape.calls] for tape in tapes_of(tmp_path / run)}

    assert said("a") == said("b")  # the same seed, whatever runs beside it
    assert len({str(ids) for ids in said("a").values()}) > 1


def test_the_answers_of_a_script_are_those_of_each_episode(tmp_path: Path, capsys):
    scene = ("--agent", f"{WORLD}:changes_its_mind", "--env", f"{EXAMPLE}:Digits", "--tasks", f"{EXAMPLE}:tasks")
    found = answer_of(capsys, "run", *scene, *TEN, *settings('engine.answers=["4", "5"]'), "--out", str(tmp_path / "r"))
    assert found["ends"] == [{"status": "finished", "cause": None, "episodes": 10}]
    assert [[call.text for call in tape.calls] for tape in tapes_of(tmp_path / "r")] == [["4", "5"]] * 10


def test_what_broke_is_made_again_once_and_no_more(tmp_path: Path, capsys):
    scene = ("--agent", f"{EXAMPLE}:player", "--env", f"{WORLD}:BrokenForThree", "--tasks", f"{EXAMPLE}:tasks")
    words = ("run", *scene, *SCRIPT, "--set", "count=40", "--out", str(tmp_path / "r"))
    found = answer_of(capsys, *words)
    assert found["ends"] == [
        {"status": "finished", "cause": None, "episodes": 30},
        {"status": "error", "cause": "environment", "episodes": 20},
    ]
    assert (found["scored"], found["usable"], found["reward"]) == (30, 30, 1.0)
    assert sorted(places(tmp_path / "r").values()) == [1] * 30 + [2] * 10
    resumed = answer_of(capsys, *words, "--resume")
    assert (resumed["recorded"], resumed["episodes"]) == (0, 50)


def test_what_ended_episodes_is_told_with_its_place_and_a_tape(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    scene = ("--agent", f"{WORLD}:trips_over_nines", "--env", f"{WORLD}:BrokenForThree", "--tasks", f"{EXAMPLE}:tasks")
    words = ("run", *scene, *SCRIPT, "--set", "count=100")
    first, second = answer_of(capsys, *words, "--out", str(tmp_path / "a"))["faults"]
    assert (first["cause"], first["error"], first["episodes"]) == ("environment", "OSError: the world broke", 20)
    assert (second["cause"], second["error"], second["episodes"]) == ("agent", "ValueError: nine", 10)
    for fault in (first, second):
        assert fault["raised_at"].startswith(WORLD)
        assert fault["tape"] in {tape.id for tape in tapes_of(tmp_path / "a")}
    assert main([*words, "--out", str(tmp_path / "b")]) == 0
    told = capsys.readouterr().out.replace("\n", " ")
    assert f"10 x error of the agent: ValueError: nine ({second['raised_at']}), first on tape " in told
    assert main(["show", str(tmp_path / "a"), second["tape"]]) == 0
    assert f"raised at {second['raised_at']}" in capsys.readouterr().out.replace("\n", "")


def test_a_full_disk_is_told_once_however_many_episodes_meet_it(tmp_path: Path, capsys, caplog, monkeypatch):
    room, write = [900_000], Disk.write

    def bounded(self: Disk, handle: int, data: memoryview) -> int:
        room[0] -= len(data)
        if room[0] < 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(self, handle, data)

    monkeypatch.setattr(Disk, "write", bounded)
    scene = ("--agent", f"{EXAMPLE}:player", "--env", f"{WORLD}:WaitsForThree", "--tasks", f"{EXAMPLE}:tasks")
    told = refusal_of(capsys, "run", *scene, *SCRIPT, "--attempts", "4", "--out", str(tmp_path / "r"), code=1)
    assert told.count("No space left on device") == told.count("tapereel run: ") == 1
    assert not [record for record in caplog.records if record.name == "asyncio"]


@pytest.mark.parametrize("value", VALUES)
def test_an_option_is_taken_as_it_is_typed(capsys: pytest.CaptureFixture[str], value: str) -> None:
    names = dict.fromkeys(("agent", "env", "tasks"), value)
    words = [word for name, text in names.items() for word in (f"--{name}={text}",)]
    found = answer_of(capsys, "run", *words, f"--model={value}", "--seed=3", "--dry-run")
    assert {name: found[name] for name in names} == names
    assert (found["engine"]["model"], found["seed"]) == (value, 3)


def test_two_folders_whose_names_differ_behind_a_hash_are_two(tmp_path: Path, capsys) -> None:
    for k, name in enumerate(("m", "m #2")):
        save_tiny_model(tmp_path / name, "ab", size="micro", seed=k)
    found = []
    for name in ("m", "m #2"):
        model, out = str(tmp_path / name), tmp_path / f"r{name}"
        answer_of(capsys, "run", *SCENE, "--model", model, "--set", "count=1", "--out", str(out))
        (tape,) = tapes_of(out)
        found.append(tape.calls[0].logprobs)
        assert recorded_config(out)["engine"]["model"] == model
        assert main(["branch", str(out), tape.id, "--at", "0", "--seed", "x"]) == 64
        assert "--seed x" in capsys.readouterr().err
        answer_of(capsys, "branch", str(out), tape.id, "--at", "0", "--model", model)
    assert found[0] != found[1]


def test_a_run_of_which_nothing_is_of_use_is_broken(tmp_path: Path, capsys):
    scene = ("--agent", f"{EXAMPLE}:player", "--env", f"{WORLD}:Broken", "--tasks", f"{WORLD}:few")
    found = answer_of(capsys, "run", *scene, *SCRIPT, "--set", "retries=0", "--out", str(tmp_path / "r"), code=1)
    assert found["ends"] == [{"status": "error", "cause": "environment", "episodes": 2}]
    assert (found["reward"], found["usable"]) == (None, 0)


def test_a_killed_run_goes_on_and_ends_as_if_nothing_had_been(tmp_path: Path, capsys):
    words = ("run", *DEADLY, *SCRIPT, *TEN, "--attempts", "3", "--set", "concurrency=4")
    killed(17, *words, "--out", str(tmp_path / "r"))
    with Store.open(tmp_path / "r") as store:
        closed = {summary.id for summary in store.summaries(closed=True)}
    assert 0 < len(closed) < 30
    found = answer_of(capsys, *words, "--out", str(tmp_path / "r"), "--resume", "--set", "concurrency=9")
    whole = answer_of(capsys, *words, "--out", str(tmp_path / "whole"))
    assert found["recorded"] == 30 - len(closed)
    tapes = [tape for tape in tapes_of(tmp_path / "r") if tape.status != "crashed"]
    assert closed <= {tape.id for tape in tapes}

    def seeds(tapes: list[Any]) -> list[tuple[Any, ...]]:
        return sorted((t.begin.group, t.begin.attempt, t.begin.seed, t.begin.env_seed, t.reward) for t in tapes)

    assert seeds(tapes) == seeds(tapes_of(tmp_path / "whole"))
    assert whole["episodes"] == 30
    assert found["ends"][0] == {"status": "finished", "cause": None, "episodes": 30}


def test_a_used_directory_is_refused_and_so_is_another_configuration(tmp_path: Path, capsys):
    words = ("run", *SCENE, *SCRIPT, *TEN, "--out", str(tmp_path / "r"))
    answer_of(capsys, *words)
    assert "`--resume`" in refusal_of(capsys, *words)
    other = refusal_of(capsys, *words, "--resume", *settings("seed=4", "limits.turns=3"))
    assert str(tmp_path / "r" / "config.yaml") in other
    assert "seed, limits.turns" in other
    assert answer_of(capsys, *words, "--resume", "--set", "concurrency=1")["recorded"] == 0
    (tmp_path / "r" / "config.yaml").unlink()
    assert "config.yaml" in refusal_of(capsys, *words)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("--set", "enginee.policy=x"), "enginee"),
        (("--set", "engine.kind=magic"), "engine"),
        (("--set", "engine.kind=scripted"), "`answers`"),
        ((*SCRIPT, "--set", "attempts=0"), "attempts = 0"),
        (("--model", "nowhere"), "'nowhere'"),
        (("--set", f"engine.policy={WORLD}:number"), "Request"),
        ((*SCRIPT, "--env", f"{WORLD}:instance"), f"{WORLD}:instance"),
    ],
)
def test_a_wrong_configuration_is_refused_before_anything_is_written(words: Any, says: str, tmp_path: Path, capsys):
    said = refusal_of(capsys, "run", *SCENE, *TEN, *words, "--out", str(tmp_path / "r"))
    assert says in said
    assert not (tmp_path / "r").exists()


def test_what_is_missing_is_named(tmp_path: Path, capsys, monkeypatch: pytest.MonkeyPatch):
    assert "`--agent`" in refusal_of(capsys, "run", *SCRIPT, "--out", str(tmp_path / "r"))
    assert "--out DIR" in refusal_of(capsys, "run", *SCENE, *SCRIPT)
    monkeypatch.setitem(sys.modules, "transformers", None)
    said = refusal_of(capsys, "run", *SCENE, "--model", str(tmp_path), "--out", str(tmp_path / "r"), code=1)
    assert 'pip install "tapereel[train]"' in said


def test_a_broken_model_directory_is_a_sentence(model: str, tmp_path: Path, capsys):
    import shutil

    def refused(name: str) -> str:
        return refusal_of(capsys, "run", *SCENE, "--model", str(tmp_path / name), "--out", str(tmp_path / "r"))

    (tmp_path / "empty").mkdir()
    assert "tokenizer" in refused("empty")
    shutil.copytree(model, tmp_path / "bare")
    (tmp_path / "bare" / "chat_template.jinja").unlink()
    assert "template" in refused("bare")
    shutil.copytree(model, tmp_path / "cut")
    weights = tmp_path / "cut" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    assert f"{tmp_path / 'cut'}" in refused("cut")
    shutil.copytree(model, tmp_path / "other")
    config = json.loads((tmp_path / "other" / "config.json").read_text())
    (tmp_path / "other" / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 3}))
    assert "lacks" in refused("other")
    assert not (tmp_path / "r").exists()


def test_a_dry_run_prints_a_configuration_that_can_be_read_back(tmp_path: Path, capsys):
    words = ("run", *SCENE, *SCRIPT, *settings("tasks=[1, 2]", "limits.turns=3"))
    assert main([*words, "--dry-run"]) == 0
    printed = capsys.readouterr().out
    (tmp_path / "again.yaml").write_text(printed)
    config = load_config(RunConfig, tmp_path / "again.yaml")
    assert (config.tasks, config.limits.turns) == ((1, 2), 3)
    assert answer_of(capsys, *words, "--dry-run") == config.model_dump(mode="json")


def test_an_engine_of_a_folder_is_that_folder_s_model(model: str):
    made = asyncio.run(make_engine(EmbeddedConfig(model=model, capacity=20, slots=2)))
    assert made.publish is not None
    assert made.engine.context == 20
    assert made.engine.renderer is not None
