"""`tapereel check model`: a model whose calls are read ends with 0, and one whose calls aren't read with 1."""

from __future__ import annotations

import copy
import json
from pathlib import Path

import pytest

import tapereel as tr
from tapereel.cli import main
from tapereel.cli.console import Exit

from ..agents.families import tokenizer
from ..agents.rendering.test_faults import SPEC, UNKNOWN
from .lab import SCENE, answer_of, settings

NAMES = {"agent": "chat", "env": "Noting", "tasks": "TASKS"}
advice = f"{__package__}.test_advice"


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
    tokenizer("chatml").save_pretrained(tmp_path / "chatml")
    capsys.readouterr()
    (hidden,) = answer_of(capsys, "check", "model", str(tmp_path / "chatml"), code=1)["faults"]
    assert "chat_template.jinja" in hidden
    (tmp_path / "mine.json").write_text(json.dumps(SPEC))
    words = ("check", "model", unknown, "--set")
    assert main([*words, f"response_template={tmp_path / 'mine.json'}"]) == Exit.HOLDS
    assert main([*words, f"response_template={tmp_path / 'none.json'}"]) == Exit.USAGE
    assert "none.json" in capsys.readouterr().err


def test_a_run_that_offers_no_tools_says_nothing_of_calls(
    unknown: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = ["engine.answers=['7']", f"engine.tokenizer={unknown}", "sampling.temperature=0"]
    words = [word for one in settings for word in ("--set", one)]
    main(["run", *SCENE, *words, "--out", str(tmp_path / "run")])
    told = capsys.readouterr().err
    assert "CALL lookup" not in told
    assert "temperature" in told


@pytest.mark.parametrize(("family", "told"), [("chatml", "offered tools"), ("unknown", "aren't read")])
def test_a_run_that_offers_tools_says_first_that_they_cannot_be_used(
    family: str, told: str, unknown: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tokenizer("chatml").save_pretrained(tmp_path / "chatml")
    capsys.readouterr()
    folder = unknown if family == "unknown" else str(tmp_path / "chatml")
    quoted = 'CALL note <tool_call>{"name": "note", "arguments": {"text": "rm"}}</tool_call> END'
    scene = [word for key in ("agent", "env", "tasks") for word in (f"--{key}", f"{advice}:{NAMES[key]}")]
    sets = settings(f"engine.answers={json.dumps([quoted] * 6)}", f"engine.tokenizer={folder}")
    main(["run", *scene, *sets, "--out", str(tmp_path / "run")])
    lines = [line for line in capsys.readouterr().err.splitlines() if line]
    assert told in lines[0]
    assert sum(told in line for line in lines) == 1
    if family == "unknown":
        for tape in tr.open(tmp_path / "run"):
            assert [step.kind for step in tape] == ["tool_offer", "answer"], "the quoted call wasn't made"
