"""The four commands of `replay` on whole runs: verdicts, exit codes, one JSON object."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tapereel.cli import main
from tapereel.tapes.records import Reward
from tapereel.tapes.store import Store

from ...cli.lab import answer_of, refusal_of
from .conftest import DEMO, THOUSAND

ROOT = Path(__file__).resolve().parents[3]
SOLVER = f"{DEMO}:calculator_agent"


def ids(run: Path, **where: Any) -> list[str]:
    with Store.open(run) as store:
        return [summary.id for summary in store.summaries(**where)]


@pytest.mark.parametrize("seed", ["0", "1"])
def test_a_thousand_tapes_of_the_demo_replay_under_any_hash_seed(thousand: Path, seed: str):
    command = [sys.executable, "-m", "tapereel.cli", "replay", "agent", str(thousand), "--jobs", "1", "--json"]
    environment = {**os.environ, "PYTHONHASHSEED": seed, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout)
    assert found["counts"] == {"verified": THOUSAND, "diverged": 0, "unverifiable": 0}
    assert {note for v in found["verdicts"] for note in v["not_checked"]} == set()
    assert all(v["checked"]["prompts"] == v["checked"]["calls"] > 0 for v in found["verdicts"])


def test_the_same_tapes_in_two_processes_and_one_turn_of_one(thousand: Path, capsys: pytest.CaptureFixture[str]):
    some = ids(thousand)[:8]
    found = answer_of(capsys, "replay", "agent", str(thousand), *some, "--jobs", "2", "--agent", SOLVER)
    assert [v["tape"] for v in found["verdicts"]] == some
    assert found["exit_code"] == 0
    found = answer_of(capsys, "replay", "agent", str(thousand), some[0], "--turn", "0")
    assert (found["turn"], found["verdicts"][0]["checked"]["calls"]) == (0, 1)
    found = answer_of(capsys, "replay", "agent", str(thousand), some[0], "--turn", "50", code=2)
    assert found["verdicts"][0]["outcome"] == "unverifiable"


def test_a_run_whose_agent_changed_ends_with_1_and_says_where(
    thousand: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    (tmp_path / "edited_agent.py").write_text(
        "from tapereel.agents import ChatAgent\n"
        "from tapereel.envs.adapters.calculator import Calculate, read_action\n\n\n"
        "def read(text):\n"
        "    action = read_action(text)\n"
        "    return Calculate(expression=action.expression + '+1') if isinstance(action, Calculate) else action\n\n\n"
        "def make():\n"
        "    return ChatAgent(parse=read, name='solver', misreads=0)\n"
    )
    monkeypatch.chdir(tmp_path)
    some = ids(thousand)[:60]
    found = answer_of(capsys, "replay", "agent", str(thousand), *some, "--agent", "edited_agent.py:make", code=1)
    calculated = [v for v in found["verdicts"] if v["outcome"] == "diverged"]
    assert 0 < len(calculated) < 60
    assert {v["divergence"]["cause"] for v in calculated} == {"parser"}
    assert {v["divergence"]["field"] for v in calculated} == {"calculator_call.expression"}
    assert {v["divergence"]["turn"] for v in calculated} == {0}
    assert main(["replay", "agent", str(thousand), *some, "--agent", "edited_agent.py:make"]) == 1
    out = capsys.readouterr().out
    assert "parser" in out
    assert "calculator_call.expression" in out
    assert f"{len(calculated)} diverged" in out


def test_an_agent_that_nobody_names_and_one_of_another_name(
    trained: Path, thousand: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    shutil.copytree(trained, tmp_path / "run")
    (tmp_path / "run" / "config.yaml").unlink()
    assert "`--agent " in refusal_of(capsys, "replay", "agent", str(tmp_path / "run"))
    name = ids(thousand)[0]
    words = ("replay", "agent", str(thousand), name, "--agent", f"{ROOT}/examples/digits.py:player")
    found = answer_of(capsys, *words, code=2)
    assert "'solver'" in found["verdicts"][0]["reason"]


def test_a_training_run_replays_and_is_executed_again_by_its_own_configuration(
    trained: Path, capsys: pytest.CaptureFixture[str]
):
    closed = len(ids(trained, closed=True))
    found = answer_of(capsys, "replay", "agent", str(trained))
    assert found["counts"]["verified"] == closed > 30
    assert all(v["checked"]["prompts"] for v in found["verdicts"])
    found = answer_of(capsys, "replay", "env", str(trained), "--times", "2")
    assert found["counts"]["verified"] == closed
    assert found["proposed"] == {}


def test_the_demos_environment_is_found_and_executed_again(thousand: Path, capsys: pytest.CaptureFixture[str]):
    found = answer_of(capsys, "replay", "env", str(thousand), *ids(thousand)[:50])
    assert found["counts"]["verified"] == 50
    assert all(v["checked"]["rewards"] == 2 for v in found["verdicts"])


# rescore

REWARDS = """
from tapereel.envs import Rewards, RewardSource


def exact(tape):
    said = [step.answer for step in tape.actions if step.kind == "calculator_answer"]
    right = tape.begin.task.private["answer"]
    return float(bool(said) and said[-1].lstrip("-").isdigit() and int(said[-1]) == int(right))


def brief(tape):
    return {"turns": -float(tape.turns), "steps": float(len(tape))}


def lenient(tape):
    return max(exact(tape), 0.5 if tape.turns > 1 else 0.0)


def judge(tape):
    return 1.0


def breaks(tape):
    raise OSError("no such file")


off = RewardSource(score=lenient, name="exact")
impure = RewardSource(score=judge, name="exact", pure=False)
broken = RewardSource(score=breaks, name="exact")
several = Rewards([exact, RewardSource(score=brief, weight=0.1)])
"""


@pytest.fixture
def rewards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    name = f"rewards_{tmp_path.name.replace('-', '_')}"
    (tmp_path / f"{name}.py").write_text(REWARDS)
    monkeypatch.chdir(tmp_path)
    return f"{name}.py"


def test_recorded_rewards_are_recomputed_and_an_edited_reward_is_found(
    thousand: Path, rewards: str, capsys: pytest.CaptureFixture[str]
):
    found = answer_of(capsys, "replay", "rewards", str(thousand), "--reward", f"{rewards}:exact")
    assert found["counts"] == {"verified": THOUSAND, "diverged": 0, "unverifiable": 0}
    found = answer_of(capsys, "replay", "rewards", str(thousand), "--reward", f"{rewards}:off", code=1)
    wrong = [v for v in found["verdicts"] if v["outcome"] == "diverged"]
    assert 0 < len(wrong) < THOUSAND
    assert {
        (v["divergence"]["cause"], v["divergence"]["field"], v["divergence"]["recorded"], v["divergence"]["observed"])
        for v in wrong
    } == {("reward", "reward.exact", 0.0, 0.5)}
    some = ids(thousand)[:5]
    found = answer_of(capsys, "replay", "rewards", str(thousand), *some, "--reward", f"{rewards}:broken", code=1)
    assert "no such file" in found["verdicts"][0]["divergence"]["sentence"]
    assert rewards in found["verdicts"][0]["divergence"]["where"]
    found = answer_of(capsys, "replay", "rewards", str(thousand), *some, "--reward", f"{rewards}:impure", code=2)
    assert "pure=False" in found["verdicts"][0]["reason"]
    found = answer_of(capsys, "replay", "rewards", str(thousand), *some, "--reward", f"{rewards}:brief", code=2)
    assert " exact, reasoning_gym" in found["verdicts"][0]["reason"]


def test_a_new_reward_is_a_layer_that_verifies_afterwards(
    thousand: Path, rewards: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    run = tmp_path / "copy"
    shutil.copytree(thousand, run)
    some = ids(run)[:20]
    words = ("replay", "rewards", str(run), *some, "--reward", f"{rewards}:several", "--layer", "v2")
    assert answer_of(capsys, *words)["added"] == 60
    assert answer_of(capsys, *words)["added"] == 0
    with Store.open(run) as store:
        tape = store.tape(some[0])
        layers = [layer for layer in tape.layers if isinstance(layer, Reward)]
        assert [(r.name, r.weight, r.layer) for r in layers] == [
            ("exact", 1.0, "v2"),
            ("brief/turns", 0.1, "v2"),
            ("brief/steps", 0.1, "v2"),
        ]
        assert tape.reward == next(r.value for r in tape.rewards if r.name == "exact"), "the tape's own stays as it is"
    assert main(["verify", str(run)]) == 0


def test_two_rewards_are_set_against_each_other(thousand: Path, rewards: str, capsys: pytest.CaptureFixture[str]):
    words = ("replay", "rewards", str(thousand), "--reward", f"{rewards}:exact", "--against", f"{rewards}:lenient")
    found = answer_of(capsys, *words)
    assert found["tapes"] == THOUSAND == found["equal"] + found["lower"]
    assert found["higher"] == found["unscored"] == found["turned"] == 0
    assert found["mean_theirs"] - found["mean_ours"] == pytest.approx(0.5 * found["lower"] / THOUSAND)
    assert all(o["theirs"] - o["ours"] == 0.5 for o in found["furthest"])
    assert main([*words]) == 0
    assert "pairs" in capsys.readouterr().out
    assert "--reward" in refusal_of(capsys, "replay", "rewards", str(thousand), "--against", "x:y")
    for alone in (("--layer", "v2"), ("--tolerance", "1"), ("--jobs", "2"), ("--no-keep",)):
        assert alone[0] in refusal_of(capsys, *words, *alone)
    assert "dict" in refusal_of(capsys, "replay", "rewards", str(thousand), "--reward", "tapereel.cli:VERBS")


# requery


def test_tokens_come_from_the_weights_of_their_version(trained: Path, capsys: pytest.CaptureFixture[str]):
    found = answer_of(capsys, "replay", "model", str(trained))
    assert found["counts"]["diverged"] == 0
    assert found["counts"]["unverifiable"] == 0, found["verdicts"][-1]
    assert found["counts"]["verified"] > 30
    assert max(v["measured"]["largest"] for v in found["verdicts"]) < 2e-5


def test_a_swapped_checkpoint_is_flagged(trained: Path, capsys: pytest.CaptureFixture[str]):
    checkpoints = sorted((trained / "checkpoints").glob("update-*"))
    first, last = checkpoints[0], checkpoints[-1]
    after = ("--split", "eval-after-sampled")
    splits = {split for split in ("eval-after-sampled", "eval-after") if ids(trained, split=split)}
    after = ("--split", splits.pop())
    assert answer_of(capsys, "replay", "model", str(trained), *after, "--model", str(last))["exit_code"] == 0
    found = answer_of(capsys, "replay", "model", str(trained), *after, "--model", str(first), code=1)
    assert found["counts"]["verified"] == 0, "every tape of the last policy is told from the first one's"
    divergence = found["verdicts"][0]["divergence"]
    assert (divergence["cause"], divergence["field"]) == ("weights", "logprobs[0]")
    assert abs(divergence["recorded"] - divergence["observed"]) > 1e-4


def test_weights_that_are_gone_make_a_tape_unverifiable(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    run = tmp_path / "run"
    shutil.copytree(trained, run)
    shutil.rmtree(run / "checkpoints")
    found = answer_of(capsys, "replay", "model", str(run), code=2)
    assert found["counts"]["unverifiable"] > 0
    assert any("checkpoint" in v["reason"] for v in found["verdicts"] if v["reason"])


def test_a_tape_that_nobody_sampled_has_nothing_to_put_to_a_model(thousand: Path, capsys: pytest.CaptureFixture[str]):
    found = answer_of(capsys, "replay", "model", str(thousand), ids(thousand)[0], code=2)
    assert "log-prob" in found["verdicts"][0]["reason"]
