"""A command ends with what happened and what to do next: paths as the user gave them, no pins and no zeros."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tapereel.cli import main

from .lab import SCENE, refusal_of, settings
from .test_longer import words

RUN = """
ended cause episodes share
finished 100 100.0%
100 tasks x 1 attempt: 100 episodes on tape, 100 of them recorded now, in N s.
all 100 tasks have a result; mean reward 0.100 ± 0.030 (standard error over tasks) of 100 scored attempts; \
100 text answers without a token count.
Next: tapereel show 'my runs/script'
"""
TRAIN = """
N updates by grpo in N s.
N episodes on tape; N tokens sampled; N trained on; all are accounted for.
The model: runs/first/checkpoints/update-N/hf
Next: open runs/first/report.html in a browser; tapereel explain runs/first
"""


def told(capsys: pytest.CaptureFixture[str]) -> str:
    """What a command printed, with single spaces, and without rules and empty lines."""
    lines = (" ".join(line.replace("─", "").split()) for line in capsys.readouterr().out.splitlines())
    return "\n".join(line for line in lines if line)


def test_a_run_ends_with_what_happened_and_what_to_do_next(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys):
    monkeypatch.chdir(tmp_path)
    out = "my runs/script"
    assert main(["run", *SCENE, *settings('engine.answers=["7"]'), "--out", out]) == 0
    assert re.sub(r"in [\d.]+ s", "in N s", told(capsys)).strip() == RUN.strip()
    assert main(["audit", out]) == 0
    audit = told(capsys)
    assert "100 episodes began, all of them ended" in audit.splitlines()
    assert {"sampled tokens: none", "attrition by length in turns: none"} <= {*audit.splitlines()}
    assert "authored" not in audit
    assert re.search(r"^\w[\w ]* 0( 0\.0%)?$", audit, re.MULTILINE) is None, "no row has only zeros"


def test_a_training_run_ends_with_relative_paths(model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main([*words(model, Path("runs/first"), 2)]) == 0
    lines = [re.sub(r"\d+", "N", re.sub(r" \(engine .*\)", "", line)) for line in told(capsys).splitlines()]
    assert lines[-4:] == TRAIN.strip().splitlines()
    refused = refusal_of(capsys, *words(model, Path("runs/first"), 2, "seed=3"), "--resume")
    assert "seed differs" in refused
