"""The runs of a folder: which are found, what is told of each, and how two are compared."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tapereel.agents.runs.runner import score_run
from tapereel.cli import main
from tapereel.cli.console import Exit
from tapereel.cli.look.view import _compare
from tapereel.tapes.errors import NoSuchTape
from tapereel.tapes.store import Store, append_metrics
from tapereel.tapes.view import Runs
from tapereel.tapes.view.runs import find_runs

from .lab import HOSTILE, Recording, training_run
from .serving import ask, serving_view

CONFIG = "engine:\n  model: models/tiny\nloop:\n  recipe: grpo\n  updates: {updates}\n"
WRITER = """
import sys, time
from pathlib import Path
from tapereel.tapes.store.store import Store
from tapereel.tests.tapes.view.lab import episode
store = Store.create(Path(sys.argv[1]))
episode(store, "t", ["42"], 1.0)
store.writer.sync()
print("written", flush=True)
time.sleep(600)
"""


def run_of(path: Path, rewards: dict[str, float], split: str = "eval") -> Path:
    """A run with one scored tape for each task."""
    with Store.create(path) as store:
        for task, reward in rewards.items():
            made = Recording(store, f"{path.name}-{task}", split=split, task=task, public=task)
            made.act("42", made.ask(task, "42"))
            made.earn(reward)
            made.end()
    return path


def loop_of(path: Path, updates: int, done: int, rewards: tuple[float, ...] = ()) -> Path:
    """Give the run the settings of a loop, and the metrics of its first updates."""
    (path / "config.yaml").write_text(CONFIG.format(updates=updates))
    for k in range(done):
        append_metrics(path / "metrics.jsonl", {"phase": "rl", "update": k + 1, "reward": rewards[k]})
    return path


def states(runs: Runs) -> dict[str, str]:
    return {one["name"]: runs.row(one["key"]).state for one in runs.overview()["runs"]}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Runs in all states, on both levels, among things that are no runs."""
    top = tmp_path / "runs"
    training_run(top / "plain")
    loop_of(training_run(top / "group" / "done"), 2, 2, (0.25, 0.75))
    loop_of(training_run(top / "stopped"), 3, 1, (0.5,))
    loop_of(training_run(top / "bare"), 3, 0)
    training_run(top / "a" / "b" / "too-deep")
    (top / "tapes-only" / "tapes").mkdir(parents=True)
    (top / "file").write_text("x")
    broken = training_run(top / "broken")
    (segment,) = (broken / "tapes").glob("*.jsonl")
    segment.write_bytes(segment.read_bytes().replace(b"go on", b"GO on"))
    (broken / "tapes" / "index.sqlite").unlink(missing_ok=True)
    return top


def test_runs_are_found_on_two_levels_and_nothing_else_is_one(folder: Path) -> None:
    found = [str(path.relative_to(folder)) for path in find_runs(folder)]
    assert found == ["bare", "broken", "group/done", "plain", "stopped"]
    assert find_runs(folder / "nowhere") == []


def test_each_run_has_its_state_and_what_is_known_of_it(folder: Path) -> None:
    with Runs(folder) as runs:
        assert states(runs) == {
            "bare": "finished",
            "broken": "broken",
            "group/done": "finished",
            "plain": "finished",
            "stopped": "stopped",
        }
        rows = {one["name"]: runs.row(one["key"]) for one in runs.overview()["runs"]}
    done = rows["group/done"]
    assert (done.model, done.recipe, done.tapes) == ("models/tiny", "grpo", 13)
    assert (done.updates, done.updates_planned, done.reward, done.before) == (2, 2, 0.5, None)
    assert (rows["plain"].recipe, rows["plain"].reward) == (None, pytest.approx(7 / 9))
    assert "metrics.jsonl" in rows["bare"].problems[0]
    assert rows["bare"].updates is None, "unknown is not zero"
    assert rows["broken"].tapes == 13, "the rest is shown"
    assert any("000001" in problem for problem in rows["broken"].problems)


def test_a_file_that_cant_be_read_is_named_and_the_rest_is_shown(folder: Path) -> None:
    (folder / "plain" / "config.yaml").write_text("a: [")
    (folder / "stopped" / "metrics.jsonl").write_text("no line\n")
    (folder / "group" / "done" / "results.json").write_text("[]")
    with Runs(folder) as runs:
        rows = {one["name"]: runs.row(one["key"]) for one in runs.overview()["runs"]}
    for name, file in (("stopped", "metrics.jsonl"), ("group/done", "results.json")):
        assert any(file in problem for problem in rows[name].problems), name
    assert rows["plain"].problems
    assert all(row.tapes == 13 for row in rows.values())


def test_a_run_that_is_written_is_running_and_one_whose_writer_was_killed_has_died(tmp_path: Path) -> None:
    run = tmp_path / "runs" / "r"
    with subprocess.Popen([sys.executable, "-c", WRITER, str(run)], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "written\n"
        with Runs(tmp_path / "runs") as runs:
            assert states(runs) == {"r": "running"}
            process.send_signal(signal.SIGKILL)
            process.wait()
            assert states(runs) == {"r": "died"}


def test_a_link_out_of_the_folder_is_not_a_run(folder: Path, tmp_path: Path) -> None:
    training_run(tmp_path / "elsewhere")
    (folder / "link").symlink_to(tmp_path / "elsewhere")
    (folder / "half").mkdir()
    (folder / "half" / "tapes").symlink_to(tmp_path / "elsewhere" / "tapes")
    assert not {"link", "half"} & {path.name for path in find_runs(folder)}
    with Runs(folder) as runs:
        key = next(one["key"] for one in runs.overview()["runs"] if one["name"] == "plain")
        shutil.rmtree(folder / "plain")
        (folder / "plain").symlink_to(tmp_path / "elsewhere")
        with pytest.raises(NoSuchTape, match=key):
            runs.view(key)


def test_two_runs_are_compared_as_scores_does(tmp_path: Path) -> None:
    one = run_of(tmp_path / "one", {"a": 1.0, "b": 0.0, "c": 1.0, "mine": 1.0})
    other = run_of(tmp_path / "other", {"a": 0.0, "b": 0.5, "c": 1.0, "theirs": 0.25})
    with Runs(tmp_path, compare=_compare) as runs:
        keys = {entry["name"]: entry["key"] for entry in runs.overview()["runs"]}
        found: Any = runs.compared(keys["one"], keys["other"], "eval", "eval")
    expected = score_run(one, "eval", against=other, against_split="eval")
    assert found["scores"] == expected.model_dump(mode="json")
    assert expected.difference is not None
    assert expected.difference.reward.value == pytest.approx(0.5 / 3)
    rewards = {task["task"]: task["rewards"] for task in found["tasks"]}
    assert rewards == {"a": [1.0, 0.0], "b": [0.0, 0.5], "c": [1.0, 1.0], "mine": [1.0, None], "theirs": [None, 0.25]}
    assert found["tasks"][0]["tapes"] == ["one-a", "other-a"]
    assert (found["splits"], found["chosen"]) == ([["eval"], ["eval"]], ["eval", "eval"])


def test_runs_without_a_common_task_or_split_say_so_and_show_the_rest(tmp_path: Path) -> None:
    run_of(tmp_path / "one", {"a": 1.0})
    run_of(tmp_path / "other", {"b": 0.5}, split="train")
    with Runs(tmp_path, compare=_compare) as runs:
        keys = {entry["name"]: entry["key"] for entry in runs.overview()["runs"]}
        found: Any = runs.compared(keys["one"], keys["other"], None, None)
        assert found["chosen"] == ["", ""]
        assert found["scores"] is None
        assert found["problems"]
        assert {task["task"] for task in found["tasks"]} == {"a", "b"}
        assert len(runs.compared(keys["one"], keys["other"], "nowhere", None)["tasks"]) == 0  # type: ignore[arg-type]


def test_only_listed_runs_are_served_and_the_rules_of_the_server_hold(folder: Path) -> None:
    with serving_view(lambda: Runs(folder, compare=_compare)) as server:
        listed = ask(server, "/api/run").json
        keys = {one["name"]: one["key"] for one in listed["runs"]}
        assert ask(server, f"/api/runs/{keys['group/done']}").json["updates"] == 2
        plain = f"/run/{keys['plain']}/"
        assert ask(server, f"{plain}api/run").json["tapes"] == 13
        assert ask(server, f"{plain}api/tape/g0a1/items/0").json["items"]
        assert ask(server, f"{plain}api/verify").json["verdict"] == "holds"
        assert ask(server, f"/run/{keys['broken']}/api/run").json["integrity"]["verdict"] == "broken"
        assert ask(server, plain).headers["Content-Type"].startswith("text/html")
        compared = ask(server, f"/api/compare/{keys['plain']}/{keys['stopped']}?split=train&against=train").json
        assert compared["scores"]["difference"]["reward"]["value"] == 0
        for path in (
            "/run/000000000000/api/run",
            "/api/runs/000000000000",
            f"/api/compare/{keys['plain']}/000000000000",
            "/run/../plain/api/run",
            "/run/..%2fplain/api/run",
            "/run/plain/api/run",
            "/api/runs/..%2f..%2fetc",
            "/api/table/0",
            f"{plain}../../pyproject.toml",
        ):
            assert ask(server, path).status == 404, path
        cookie = ask(server, f"/?token={server.token}", authorization="").headers["Set-Cookie"].split(";")[0]
        assert ask(server, f"{server.home}run/{keys['plain']}/api/run", authorization="", Cookie=cookie).status == 200
        for path in (plain, f"{plain}api/run", f"{plain}app.js", f"/api/runs/{keys['plain']}", "/api/run"):
            assert ask(server, path, authorization="").status == 401, path
            assert ask(server, path, Sec_Fetch_Site="cross-site").status == 403, path
            assert ask(server, path, host="evil.example").status == 403, path


def test_a_folder_without_runs_has_a_page_and_one_file_needs_one_run(
    tmp_path: Path, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "empty").mkdir()
    command = [sys.executable, "-m", "tapereel.cli", "view", str(tmp_path / "empty"), "--no-browser", "--json"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, cwd=tmp_path) as process:
        assert process.stdout is not None
        assert json.loads(process.stdout.readline())["run"] == str(tmp_path / "empty")
        process.send_signal(signal.SIGTERM)
        assert process.wait() == Exit.HOLDS
    assert main(["view", str(folder), "--out", str(tmp_path / "x.html")]) == Exit.USAGE
    assert main(["view", str(folder), "--tape", "g0a0"]) == Exit.USAGE
    assert str(folder) in capsys.readouterr().err
    assert not (tmp_path / "x.html").exists()


def test_a_name_that_no_text_encodes_is_listed(tmp_path: Path) -> None:
    training_run(tmp_path / "good")
    os.rename(os.fsencode(tmp_path / "good"), os.fsencode(tmp_path) + b"/\xff\x1b[2J" + HOSTILE[:8].encode())
    with serving_view(lambda: Runs(tmp_path)) as server:
        (one,) = ask(server, "/api/run").json["runs"]
        assert "\x1b" not in one["name"]
        assert ask(server, f"/run/{one['key']}/api/run").json["tapes"] == 13
