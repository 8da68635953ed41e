"""TRL's own `GRPOTrainer` with our recorder as its rollout function: what it trained on is what the tapes say. And the
real classes of OpenEnv and verifiers read what we export.
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

import tapereel as tr
from tapereel.finetune.data.rows import rows
from tapereel.finetune.interchange import read, write
from tapereel.tapes import Tape
from tapereel.tapes.store.store import Store
from tapereel.tapes.store.verifier import verify

from ..finetune.interchange.world import record, tapes_of, tokens_of
from . import trl_env

pytestmark = [pytest.mark.contract, pytest.mark.timeout(300)]
STEPS, EPISODES = 3, 16


def started(script: str, *words: str | Path) -> None:
    """Run a script of this folder by the Python of the environment."""
    if not trl_env.DONE.exists():
        pytest.fail("the environment is not there: run python tests/contract/trl_env.py")
    command = [trl_env.PYTHON, Path(__file__).with_name(script), *words]
    done = subprocess.run(
        command, env={**os.environ, **trl_env.ENVIRONMENT}, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stderr[-3000:]


def ran(kind: str, out: Path) -> list[dict[str, Any]]:
    """What TRL saw in its loss, row by row."""
    started("trl_run.py", kind, out)
    return json.loads((out / "trained.json").read_text())


def own(tape: Tape) -> tuple[list[int], list[int]]:
    """(all ids, the agent's own) of the tape's only row."""
    (row,) = rows(tape)
    return row.input_ids.tolist(), row.input_ids[row.own].tolist()


def check(path: Path, seen: list[dict[str, Any]]) -> list[Tape]:
    """Ledger, books and digests, and each update's tokens against TRL's loss; gives the tapes."""
    assert verify(path).exit_code == 0
    with Store.open(path) as store:
        books, tapes = store.books(), {tape.id: tape for tape in store.tapes()}
        uses = [stored.record for stored in store.run_records("use")]
        published = [stored.record.version for stored in store.run_records("publish")]
    assert books.closes, books.findings
    assert (books.begun, books.open) == (STEPS * EPISODES, 0)
    assert books.tokens["trained"] == books.sampled == sum(len(line["trained"]) for line in seen)
    assert [use.update for use in uses] == list(range(STEPS))
    assert published == [f"{uses[0].lineage}:{k}" for k in range(STEPS)]
    for use in uses:
        mine = sorted(own(tapes[name]) for name in use.info["tapes"])
        theirs = sorted((line["ids"], line["trained"]) for line in seen if line["step"] == use.update)
        assert mine == theirs
        assert len(mine) == EPISODES
        assert sum((end - start) * weight for _, _, start, end, weight in use.items) == pytest.approx(1.0)
    return list(tapes.values())


def test_questions_and_reward_functions_of_trl(tmp_path: Path) -> None:
    seen = ran("prompts", tmp_path)
    tapes = check(tmp_path / "run", seen)
    scores = json.loads((tmp_path / "scores.json").read_text())
    assert {tape.id for tape in tapes} == set(scores)
    assert None in {given["brief"] for given in scores.values()}
    for tape in tapes:
        given = {name: score for name, score in scores[tape.id].items() if score is not None}
        assert {reward.name: reward.value for reward in tape.rewards} == given, "None is not zero"
        assert tape.reward == pytest.approx(given["right"] + 0.5 * given.get("brief", 0.0)), "as TRL weighs them"
    groups = {tape.begin.group for tape in tapes}
    assert len(groups) == STEPS * 4
    assert {len({t.begin.task_hash for t in tapes if t.begin.group == group}) for group in groups} == {1}
    ran("prompts", tmp_path)  # another trainer, from the base weights, in the same run
    with Store.open(tmp_path / "run") as store:
        assert store.books().closes
        assert len(store.lineages().living) == 1, "the first trainer's updates are void"
    assert verify(tmp_path / "run").exit_code == 0


def test_an_agent_and_an_environment_of_ours(tmp_path: Path) -> None:
    tapes = check(tmp_path / "run", ran("tools", tmp_path))
    assert {tape.turns for tape in tapes} == {2}, "several turns, and what the environment said is no target"
    assert {tape.reward for tape in tapes} <= {0.0, 1.0, 2.0}


def test_openenv_and_verifiers_read_our_exports_and_we_read_what_they_write(tmp_path: Path) -> None:
    tapes = tapes_of(record(tmp_path / "run"))
    assert write(tapes, tmp_path / "traces.jsonl", "openenv").records == 6
    assert write(tapes, tmp_path / "rollouts", "verifiers").records == 7
    started("formats_run.py", tmp_path)
    told = json.loads((tmp_path / "told.json").read_text())
    calls = [call for tape in tapes for call in tape.calls if call.completion is not None]
    assert told["tokens"] == sum(len(call.completion or ()) for call in calls)
    assert told["turns"] == len(calls)
    assert told["reward"] == pytest.approx(sum(tape.reward or 0.0 for tape in tapes))
    theirs = [row for tape in tapes if tape.begin.split == "train" for row in tokens_of(tape)]
    for format, path in (("openenv", tmp_path / "theirs.jsonl"), ("verifiers", tmp_path / "theirs")):
        read(path, tmp_path / format, format)
        back = [tape for tape in tapes_of(tmp_path / format) if tape.calls[0].prompt is not None]
        assert [row for tape in back for row in tokens_of(tape)] == theirs
        assert [tape.reward for tape in back] == [tape.reward for tape in tapes if tape.begin.split == "train"]


class Say(tr.Environment):
    """Asks for one letter."""

    async def reset(self, task: str) -> str:
        self.word = task
        return task

    async def step(self, action: tr.Action) -> tr.Outcome:
        return tr.Outcome(reward=float(str(action).startswith(self.word)), terminated=True)


@pytest.mark.ledger("F08")
def test_trls_own_trainers_train_on_the_rows_and_prompts_of_a_run(tmp_path: Path) -> None:
    folder = tr.save_tiny_model(tmp_path / "model", alphabet="ab", size="micro")
    settings = {"sampling.max_tokens": 6, "limits.turns": 2}
    run = tr.run(tr.ChatAgent(), Say, ["a", "b"], str(folder), attempts=4, out=tmp_path / "run", settings=settings)
    write(run.tapes(), tmp_path / "trl.jsonl", "trl")
    started("sft_run.py", tmp_path)
    got = json.loads((tmp_path / "seen.json").read_text())
    mine = [{"input_ids": line["input_ids"], "labels": line["labels"]} for line in run.dataset()]
    assert sorted(map(str, got["seen"])) == sorted(map(str, mine)), "each row once, with its own targets"
    assert len(got["losses"]) == 2
    assert all(loss > 0 for loss in got["losses"])
    assert got["moved"]
    assert {prompt[-1]["content"] for prompt in got["asked"]} <= {"a", "b"}
    assert got["asked"]
