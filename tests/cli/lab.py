"""What the tests of the verbs share: short ways to a run and to its answer."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tapereel.cli import main
from tapereel.tapes import Tape
from tapereel.tapes.store import Store

from .world import EXAMPLE

ROOT = Path(__file__).resolve().parents[2]
WORLD = str(Path(__file__).with_name("world.py"))
NEXT = f"{EXAMPLE}:counting"
SCENE = ("--agent", f"{EXAMPLE}:player", "--env", f"{EXAMPLE}:Digits", "--tasks", f"{EXAMPLE}:tasks")
DEADLY = ("--agent", f"{EXAMPLE}:player", "--env", f"{WORLD}:Deadly", "--tasks", f"{EXAMPLE}:tasks")
MICRO = (
    "loop.updates=3",
    "loop.groups=2",
    "loop.group_size=4",
    "loop.checkpoint_every=2",
    "loop.keep_checkpoints=3",
    "loop.optimiser.lr=1e-2",
    "loop.sampling.max_tokens=1",
    "evaluation.fraction=0.2",
    "evaluation.limit=4",
)


def settings(*texts: str) -> list[str]:
    """`--set` before each."""
    return [word for text in texts for word in ("--set", text)]


def answer_of(capsys: pytest.CaptureFixture[str], *words: str, code: int = 0) -> Any:
    """The JSON object that a command prints."""
    found = main([*words, "--json"])
    out, err = capsys.readouterr()
    assert found == code or ((code, found) == (0, 1) and learned_nothing(out)), err
    return json.loads(out)


def learned_nothing(out: str) -> bool:
    """Whether this is what `train` answers where all groups were flat, as in a run of a few episodes they may be."""
    told = json.loads(out or "{}")
    return bool(told.get("updates")) and told["books_close"] and told["tokens"]["trained"] == 0


def refusal_of(capsys: pytest.CaptureFixture[str], *words: str, code: int = 64) -> str:
    """What a command says that is refused."""
    found = main([*words])
    out, err = capsys.readouterr()
    assert (found, out) == (code, ""), err
    assert err.startswith(f"tapereel {words[0]}") or "\ntapereel " in err
    return err


def killed(at: int, *words: str) -> None:
    """Run a command in a process of its own that the world kills at its step `at`."""
    environment = {**os.environ, "DEADLY_STEP": str(at), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-m", "tapereel.cli", *words]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == -9, done.stderr[-2000:]


def tapes_of(run: Path, **where: Any) -> list[Tape]:
    """The tapes of a run."""
    with Store.open(run) as store:
        return list(store.tapes(**where))
