"""`tapereel check model`: a model whose calls are read ends with 0, and one whose calls aren't read with 1."""

from __future__ import annotations

import copy
import json
from pathlib import Path

import pytest

from tapereel.cli import main
from tapereel.cli.console import Exit

from ..agents.families import tokenizer
from ..agents.rendering.test_faults import SPEC, UNKNOWN
from .lab import SCENE, answer_of


@pytest.fixture
def unknown(tmp_path: Path) -> str:
    words = copy.deepcopy(tokenizer("chatml"))
    words.chat_template = UNKNOWN
    words.save_pretrained(tmp_path / "words")
    return str(tmp_path / "words")


def test_a_known_and_an_unknown_family(unknown: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tokenizer("qwen3").save_pretrained(tmp_path / "qwen3")
    capsys.readouterr()
    found = answer_of(capsys, "check", "model", str(tmp_path / "qwen3"))
    assert found["ok"]
    assert found["end_tokens"] == ["<|im_end|>"]
    assert any("thinking" in note for note in found["template"])
    assert not answer_of(capsys, "check", "model", unknown, code=1)["ok"]
    (tmp_path / "mine.json").write_text(json.dumps(SPEC))
    words = ("check", "model", unknown, "--set")
    assert main([*words, f"response_template={tmp_path / 'mine.json'}"]) == Exit.HOLDS
    assert main([*words, f"response_template={tmp_path / 'none.json'}"]) == Exit.USAGE
    assert "none.json" in capsys.readouterr().err


def test_a_run_says_so_at_its_start(unknown: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    settings = ["engine.answers=['7']", f"engine.tokenizer={unknown}", "sampling.temperature=0"]
    words = [word for one in settings for word in ("--set", one)]
    main(["run", *SCENE, *words, "--out", str(tmp_path / "run")])
    told = capsys.readouterr().err
    assert "CALL lookup" in told
    assert "temperature" in told
