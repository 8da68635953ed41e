"""Runs with rewards of up to 1e308, which earlier versions recorded: every verb reads them, and training goes on."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import pytest

from tapereel.cli import main
from tapereel.envs.rewards import relative
from tapereel.tapes.common import REWARD_LIMIT, stats
from tapereel.tapes.store import METRICS, read_metrics
from tapereel.tapes.view import RunView

from .lab import MICRO, WORLD, answer_of, settings, tapes_of
from .world import EXAMPLE

pytestmark = pytest.mark.attack

SCENE = ("--agent", f"{EXAMPLE}:player", "--env", f"{WORLD}:Extreme", "--tasks", f"{EXAMPLE}:tasks")
EVERY = ("loop.groups=8", "loop.max_lag=0", "evaluation.fraction=0.2", "evaluation.limit=20")


@pytest.fixture(scope="module")
def old(model: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run as it was recorded before rewards had a limit."""
    out = tmp_path_factory.mktemp("old") / "run"
    with pytest.MonkeyPatch.context() as patch:
        for module in (stats, relative):
            patch.setattr(module, "REWARD_LIMIT", sys.float_info.max)
        words = ("train", *SCENE, "--model", model, "--out", str(out), *settings(*MICRO, *EVERY))
        assert main(words) in (0, 1)  # 1: it learned nothing, which rewards of this kind may do
    return out


def large(run: Path) -> set[str]:
    return {tape.id for tape in tapes_of(run) if any(abs(reward.value) > REWARD_LIMIT for reward in tape.rewards)}


def test_every_verb_reads_a_run_with_extreme_rewards(old: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    tapes = [tape for tape in tapes_of(old) if tape.id in large(old)]
    assert {abs(tape.rewards[0].value) for tape in tapes} == {1e200, 1e308}
    assert abs(answer_of(capsys, "scores", str(old))["scores"]["reward"]["value"]) > 1e300
    found = {one["name"]: one for one in answer_of(capsys, "audit", str(old))["audit"]["components"]}
    assert -1e308 <= found["exact"]["low"] <= found["exact"]["mean"] <= found["exact"]["high"] <= 1e308
    assert found["exact"]["share"] == pytest.approx(1.0)
    report = str(tmp_path / "view.html")
    for words in (
        ("show", str(old)),
        ("show", str(old), tapes[0].id),
        ("scores", str(old), "--against", str(old)),
        ("audit", str(old)),
        ("diff", str(old), str(old)),
        ("view", str(old), "--out", report),
    ):
        assert main([*words]) == 0, words
        out, err = capsys.readouterr()
        assert "Traceback" not in out + err
        assert max((len(number) for number in out.split() if number.strip("-+.[],").isdigit()), default=0) < 24
    with RunView(old) as view:
        json.dumps(view.curve())


@pytest.mark.parametrize("from_the_first_update", [False, True])
def test_training_goes_on_after_extreme_rewards(
    old: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], from_the_first_update: bool
):
    run = tmp_path / "run"
    shutil.copytree(old, run)
    before = large(run)
    if from_the_first_update:  # their updates are applied again, with the recorded result
        for path in (run / "checkpoints").glob("update-00000[1-9]"):
            shutil.rmtree(path)
    more = settings("loop.updates=5")
    done = main(["train", "--config", str(run / "config.yaml"), "--out", str(run), "--resume", *more])
    out, err = capsys.readouterr()
    assert done in (0, 1), err
    assert "Traceback" not in out + err
    assert (run / "report.html").exists()
    assert large(run) == before, "no further one is recorded: it is an error of the environment"
    lines = [line for line in read_metrics(run / METRICS) if line["phase"] == "rl"]
    assert [line["update"] for line in lines] == [1, 2, 3, 4, 5]
    assert sum(int(line.get("lost/environment") or 0) for line in lines[3:]) > 0
    assert main(["verify", str(run)]) == 0
