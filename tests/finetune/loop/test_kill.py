"""`tapereel demo` in processes of its own, killed with SIGKILL at random moments and resumed until it is done.

The moments follow what is on the disk, not a clock: so many bytes of tapes after the process began, or a checkpoint
that is being written.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tapereel.tapes.common import dump_config
from tapereel.tapes.store import Store

from .micro import MICRO, PICTURED, assert_reproduced, assert_sound, closed_tapes

KILLS = 7
"""Of each run."""
BYTES = 240_000
"""A process is killed within this many bytes of tapes; the whole run writes about 1.5 MB, with controls twice that."""


def start(path: Path, *options: str) -> subprocess.Popen[str]:
    """The command as a user gives it."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "MPLBACKEND": "Agg"}
    arguments = ["demo", "--out", str(path / "run"), "--config", str(path / "micro.yaml"), "--json", *options]
    with (path / "log").open("a") as log, (path / "summary").open("w") as summary:
        return subprocess.Popen(
            [sys.executable, "-m", "tapereel.cli", *arguments],
            stdout=summary,
            stderr=log,
            text=True,
            env=environment,
        )


def bytes_on_tape(run: Path) -> int:
    """Of all the demo's runs; nothing that comes and goes is walked through, as the checkpoints beside them do."""
    runs = (".", "demonstrations", "controls/*")
    return sum(path.stat().st_size for kind in runs for path in run.glob(f"{kind}/tapes/*.jsonl"))


def moment(run: Path, rng: random.Random, scale: int) -> Callable[[], bool]:
    """A condition that becomes true at some point of the work."""
    if rng.random() < 0.2:
        return lambda: any(part for kind in (".", "controls/*") for part in run.glob(f"{kind}/checkpoints/.update-*"))
    limit = bytes_on_tape(run) + int(rng.random() * BYTES * scale)
    return lambda: bytes_on_tape(run) > limit


def lived(process: subprocess.Popen[str], condition: Callable[[], bool]) -> bool:
    """True when the process ended by itself before the condition held; else it is killed, whatever happens here."""
    try:
        while process.poll() is None:
            if condition():
                return False
            try:
                process.wait(timeout=0.002)
            except subprocess.TimeoutExpired:
                continue
        return True
    finally:
        process.kill()
        process.wait()


@pytest.mark.kill
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("seed", "options"), [(0, []), (1, []), (2, ["--controls"]), pytest.param(3, ["--pictures"], id="pictures")]
)
def test_a_demo_that_is_killed_and_resumed(tmp_path: Path, seed: int, options: list[str]) -> None:
    rng = random.Random(seed)
    run = tmp_path / "run"
    config = PICTURED if options == ["--pictures"] else MICRO
    (tmp_path / "micro.yaml").write_text(dump_config(config))
    kept: dict[str, str] = {}
    kills = 0
    while kills < KILLS:
        resume = ["--resume"] if (run / "demo.yaml").exists() else []
        process = start(tmp_path, *options, *resume)
        if lived(process, moment(run, rng, 2 if options == ["--controls"] else 1)):
            break
        kills += 1
        assert process.returncode == -9, (tmp_path / "log").read_text()[-3000:]
        print(f"kill {kills}: {bytes_on_tape(run)} bytes of tapes; {(tmp_path / 'log').read_text().splitlines()[-1:]}")
        now = closed_tapes(run)
        assert {name: now.get(name) for name in kept} == kept, "a closed tape is gone"
        kept = now
    summary = finish(tmp_path, options)
    assert kills == KILLS, f"the run was done after {kills} kills; log: {(tmp_path / 'log').read_text()[-2000:]}"
    assert summary["held_out"]["after"] is not None
    lineage = json.loads((run / "results.json").read_text())["lineage"]
    assert_sound(run, kept, lineage)
    assert_reproduced(run, tmp_path / "fresh", lineage, config)
    if options == ["--controls"]:
        assert set(summary["controls"]) == {"sft", "shuffled"}
        for name in summary["controls"]:
            store = Store.open(run / "controls" / name, cache=False)
            assert store.books().closes, store.books().findings
            store.close()


def finish(path: Path, options: list[str]) -> dict[str, Any]:
    """Let it come to its end, and again: what is done is done."""
    summaries = []
    for _ in range(2):
        process = start(path, *options, "--resume")
        process.wait(timeout=600)
        assert process.returncode == 0, (path / "log").read_text()[-3000:]
        summaries.append(json.loads((path / "summary").read_text()))
    first, second = summaries
    assert first["held_out"] == second["held_out"]
    assert first["tokens"] == second["tokens"]
    assert first["episodes"] == second["episodes"]
    return second
