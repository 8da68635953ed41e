"""Runs by two processes that share the weights, killed in each step of a save, and with damaged checkpoints."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tapereel.finetune.trainer import checkpoints
from tapereel.tapes.store import Store

from .test_pieces import places
from .test_processes import environment, free_port, model, words

__all__ = ["model"]

pytestmark = [pytest.mark.kill, pytest.mark.timeout(1200)]

SETTINGS = (
    "processes.shard=true",
    "loop.checkpoint_every=1",
    "loop.keep_checkpoints=3",
    "loop.groups=4",
    "loop.group_size=4",
)
CHECKPOINT, RANKS = "finetune.trainer.checkpoint", "finetune.trainer.distributed"
KILLS = (
    ("rank 1 before its part of the weights", "1", f"{RANKS}:write_parts", "1", []),
    ("rank 1 with files that have no digest yet", "1", f"{CHECKPOINT}:_digests", "1", []),
    ("rank 1 between weights and trainer", "1", f"{RANKS}:write_parts", "-1", []),
    ("rank 0 between weights and trainer", "0", f"{RANKS}:write_parts", "2", []),
    ("rank 0 while it gathers weights", "0", f"{RANKS}:write_tensors", "1", []),
    ("rank 0 before anything is synced", "0", f"{CHECKPOINT}:_sync", "1", []),
    ("rank 0 before the checkpoint has its name", "0", f"{CHECKPOINT}:os.rename", "1", []),
    ("rank 0 before the second one's digests are durable", "0", "finetune.loop.history:prune", "2", [1, 2]),
    ("rank 0 with the checkpoint of that name set aside", "0", f"{CHECKPOINT}:os.rename", "-1", [1]),
)
"""The step, the rank that is killed, where it is killed (`dying.py`), and the complete checkpoints that are left."""


def torchrun(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [str(Path(sys.executable).parent / "torchrun"), "--nproc-per-node", "2", "-m", *arguments]
    return subprocess.run(
        command, capture_output=True, text=True, env=environment(MASTER_PORT=str(free_port())), timeout=200
    )


def uses(run: Path) -> list[Any]:
    """The updates of the run, and nothing is trained on twice."""
    with Store.open(run) as store:
        assert store.books().closes, store.books().findings
        found = store.ledger(json.loads((run / "results.json").read_text())["lineage"]).uses
    trained = Counter(tape for use in found for tape in {item[0] for item in use.items})
    assert set(trained.values()) <= {1}
    return found


def test_a_rank_that_is_killed_in_a_save_leaves_the_checkpoint_before(model: str, tmp_path: Path) -> None:
    run = tmp_path / "run"
    command = words(model, run, *SETTINGS)
    for k, (step, *trap, left) in enumerate(KILLS):
        done = torchrun("tapereel.tests.finetune.trainer.dying", *trap, *command, *(["--resume"] if k else []))
        assert "Signal 9 (SIGKILL)" in done.stderr, f"{step}: {done.stderr[-3000:]}"
        found = checkpoints(run / "checkpoints")
        assert [one.update for one in found] == left, step
        assert not any(one.damage() for one in found), step
    assert "update-000002; the checkpoint before it is used" in done.stderr  # the one whose digests were lost
    done = torchrun("tapereel.cli", *command, "--resume")
    assert done.returncode == 0, done.stderr[-3000:]
    assert sorted(path.name for path in (run / "checkpoints").iterdir()) == [f"update-00000{k}" for k in (2, 3, 4)]
    assert [use.update for use in uses(run)] == [0, 1, 2, 3]
    done = torchrun("tapereel.cli", "reproduce", str(run), "--json")
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]


def test_a_damaged_checkpoint_is_set_aside_with_the_name_of_the_tensor(model: str, tmp_path: Path) -> None:
    run = tmp_path / "run"
    done = torchrun("tapereel.cli", *words(model, run, *SETTINGS, "loop.updates=2"))
    assert done.returncode == 0, done.stderr[-3000:]
    newest = checkpoints(run / "checkpoints")[-1]
    files = sorted(newest.path.glob("*/shard-*"))
    assert {(file.parent.name, file.name[:11]) for file in files} == {
        (folder, f"shard-0000{rank}") for folder in ("policy", "trainer") for rank in (1, 2)
    }
    for file in files:
        whole = file.read_bytes()
        for name, (first, last) in places(file).items():
            at = (first + last) // 2
            file.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
            (found,) = newest.damage()
            assert str(file) in found
            assert (f"tensor {name} " if name else "the header") in found
        file.write_bytes(whole)
    assert newest.damage() == []

    file = files[-1]
    name, (_, last) = sorted(places(file).items())[-1]
    whole = file.read_bytes()
    file.write_bytes(whole[:last] + bytes([whole[last] ^ 1]))
    done = torchrun("tapereel.cli", *words(model, run, *SETTINGS, "loop.updates=3"), "--resume")
    assert done.returncode == 0, done.stderr[-3000:]
    assert f"{file}: the piece of tensor {name} was changed" in done.stderr
    assert "; the checkpoint before it is used" in done.stderr
    assert [use.update for use in uses(run)] == [0, 1, 2]
