"""The commands of docs/reference/cli.md and of the examples' README run, in their order, at a small size."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from tapereel.cli import VERBS, main

from .lab import ROOT

SMALL = [
    "--set",
    "loop.updates=2",
    "--set",
    "loop.groups=2",
    "--set",
    "loop.group_size=4",
    "--set",
    'loop.changes.regulariser=[{"kind": "entropy", "coefficient": 0.05}]',
]
"""Few attempts may all earn the same, and an entropy is trained on even so."""

SERVES = ("view", "serve")
"""Until they are ended, which tests of their own do."""


def commands(document: str) -> list[list[str]]:
    text = (ROOT / document).read_text(encoding="utf-8").replace("\\\n", " ")
    fences = re.findall(r"^```bash\n(.*?)^```", text, flags=re.DOTALL | re.MULTILINE)
    return [shlex.split(line) for fence in fences for line in fence.splitlines() if line.strip()]


@pytest.mark.docs
@pytest.mark.parametrize("document", ["docs/reference/cli.md", "docs/how-to/training.md", "examples/README.md"])
def test_the_commands_run(document: str, model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys):
    monkeypatch.chdir(ROOT)
    made = {"runs/digits-model": model}
    ran = 0
    for program, *words in commands(document):
        if program == "python" or words[0] == "demo":  # the model is there; the demo has tests of its own
            continue
        if words[0] in SERVES and "--out" not in words:
            continue
        here = [made.get(word, re.sub(r"(^|=)runs/", rf"\1{tmp_path}/", word)) for word in words]
        assert program == "tapereel"
        assert main([*here, *(SMALL if words[0] == "train" else [])]) == 0, (words, capsys.readouterr())
        ran += 1
    assert ran > 0


def test_every_verb_has_its_row_in_the_page():
    text = (ROOT / "docs" / "reference" / "cli.md").read_text(encoding="utf-8").split("\n## ")[0]
    rows = re.findall(r"^\| (`.+?) \|", text, flags=re.MULTILINE)
    assert [verb for row in rows for verb in re.findall(r"`(\w+)`", row)] == list(VERBS)
