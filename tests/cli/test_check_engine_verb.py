"""`tapereel check engine`: a sound engine ends with 0, a broken one with 1 and the finding."""

from __future__ import annotations

from pathlib import Path

import pytest

from tapereel.cli import main
from tapereel.cli.console import Exit

from .lab import answer_of

ENGINES = """
from tapereel.agents import ScriptedEngine


def sound():
    return ScriptedEngine(["one"] * 9)


class Broken:
    pass
"""


def test_a_sound_engine_and_a_broken_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    (tmp_path / "engines_of_a_test.py").write_text(ENGINES)
    monkeypatch.chdir(tmp_path)
    assert main(["check", "engine", "engines_of_a_test.py:sound"]) == Exit.HOLDS, capsys.readouterr()
    assert "ScriptedEngine: ok" in capsys.readouterr().out
    found = answer_of(capsys, "check", "engine", "engines_of_a_test.py:Broken", code=1)
    assert found["checks"]["members"] == "failed"
    assert "complete" in found["findings"][0]["sentence"]
