"""A wrong setting of `train` is answered before torch is imported."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from .lab import SCENE
from .world import EXAMPLE

CODE = """
import sys
from tapereel.cli import main
try:
    code = main(sys.argv[1:])
except SystemExit as exit:
    code = exit.code
assert not {"torch", "transformers"} & set(sys.modules), "imported"
sys.exit(code)
"""
MODEL = ("--model", "{model}")
GOOD = (*SCENE, *MODEL)


@pytest.mark.parametrize(
    ("words", "says", "code"),
    [
        (("--help",), "usage: tapereel train", 0),
        ((*GOOD, "--dry-run"), "# at most: unknown", 0),
        ((*GOOD, "--set", "loop.lrr=3"), "loop.lrr", 64),
        ((*GOOD, "--set", "loop.updates=-1"), "loop.updates", 64),
        ((*GOOD, "--set", "loop.recipe=grop"), "'grop'", 64),
        ((*GOOD, "--set", "warm.tapes=nowhere"), "nowhere", 64),
        ((*GOOD, "--set", "curriculum.tapes=nowhere"), "nowhere", 64),
        ((*GOOD, "--set", "evaluation.tasks=missing.jsonl"), "missing.jsonl", 64),
        ((*GOOD[:4], *MODEL, "--tasks", "missing.jsonl"), "missing.jsonl", 64),
        ((*GOOD[2:], "--agent", f"{EXAMPLE}:nobody"), "'nobody'", 64),
        ((*SCENE, "--model", "no-such-folder"), "'no-such-folder'", 64),
        ((*SCENE, "--model", "no-such/model"), "'no-such/model'", 64),
        ((*SCENE, "--model", "openai/x", "--set", "engine.kind=litellm"), "warm.tapes=RUN", 64),
    ],
)
def test_the_answer_needs_no_torch(words: tuple[str, ...], says: str, code: int, tmp_path: Path):
    (tmp_path / "config.json").write_text("{}")
    filled = [word.format(model=tmp_path) for word in words]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-c", CODE, "train", *filled, "--out", str(tmp_path / "run")]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert (done.returncode, says in done.stdout + done.stderr) == (code, True), done.stderr
    assert not (tmp_path / "run").exists()
