"""The text of commands in terminals of 80 and 120 columns, compared with the files in `golden/`.

After a deliberate change, write the files again and read the difference:

    python -m pytest tests/cli/test_golden_text.py --write-golden && git diff tests/cli/golden
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest
from rich.cells import cell_len

from tapereel.cli import command as cli
from tapereel.cli import main

from ..finetune.loop.test_recorded_training import SETTINGS
from ..recorded.worlds import train
from .library import ids, write_library
from .terminal import Terminal

GOLDEN = Path(__file__).parent / "golden"
DOCS = Path(__file__).resolve().parents[2] / "docs"
TAPES = ids(8)
VERBS = [name for verb in cli.VERBS for name in (verb, *(two for two in cli.commands() if two.startswith(f"{verb} ")))]
COMMANDS = {
    "show_run": ["show library", "show library --failed --split train", "show library --status cancelled"],
    "show_tape": [f"show library {name}" for name in (TAPES[0], *TAPES[2:4], *TAPES[5:7])],
    "scores": ["scores library", "scores library --split train --against other"],
    "audit": ["audit library"],
    "diff": ["diff library other", f"diff library {TAPES[0]} {TAPES[1]}"],
    "explain": ["explain trained TRAINED"],
    "help": ["--help", *(f"{name} --help" for name in dict.fromkeys(VERBS))],
}
"""Name of a file -> the command lines whose output it has."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with two runs that are written by hand."""
    made = tmp_path_factory.mktemp("golden")
    write_library(made / "library")
    write_library(made / "other", lost=0.5)
    return made


@pytest.fixture(scope="module")
def trained(folder: Path) -> str:
    """Train the run `trained` with the same numbers each time, and return the id of one of its tapes."""
    train("tools", folder, SETTINGS["tools"]).rename(folder / "trained")
    out = Terminal()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "stdout", out)
        assert main(["show", str(folder / "trained"), "--last", "100", "--json"]) == 0
    tapes = json.loads(out.getvalue())["tapes"]
    return next(tape["id"] for tape in tapes if tape["group"].endswith("000005") and tape["attempt"] == 2)


@pytest.mark.parametrize("width", [80, 120])
@pytest.mark.parametrize("name", COMMANDS)
def test_the_text_of_a_command_is_as_it_was_and_fits(
    name: str, width: int, folder: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
):
    monkeypatch.chdir(folder)
    for variable, value in (("COLUMNS", str(width)), ("NO_COLOR", "1"), ("TERM", "xterm")):
        monkeypatch.setenv(variable, value)
    tape = request.getfixturevalue("trained") if name == "explain" else ""
    blocks = [f"$ tapereel {line}\n{printed(line, tape, monkeypatch)}" for line in COMMANDS[name]]
    assert [line for block in blocks for line in block.splitlines()[1:] if cell_len(line) > width] == []
    found, file = "\n".join(blocks), GOLDEN / f"{name}-{width}.txt"
    if request.config.getoption("--write-golden"):
        file.parent.mkdir(exist_ok=True)
        file.write_text(found, encoding="utf-8")
    assert found == file.read_text(encoding="utf-8")


def printed(line: str, tape: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """The text of a command line on a terminal, without colours, ids of trained tapes and paths."""
    out = Terminal()
    monkeypatch.setattr(sys, "stdout", out)
    assert main(line.replace("TRAINED", tape).split()) in (0, 1)
    text = re.sub(r"\x1b\[[\d;]*m", "", out.getvalue())
    text = text.replace(str(DOCS), "DOCS")
    if tape:
        text = re.sub(r"\b01[0-9a-f]{20}\b", "TAPE".ljust(22, "_"), text)
        text = re.sub(r"\b[0-9a-f]{8}:", "LINEAGE_:", text)
    return "".join(f"{line.rstrip()}\n" for line in text.splitlines())
