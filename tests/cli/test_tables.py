"""Tables and sentences fit the terminal: which columns are cut, broken at words or left out, and what is never cut."""

from __future__ import annotations

import argparse
import io
import re
import shlex

import pytest
from rich.cells import cell_len

from tapereel.cli.console import Section, answer, broken_command

from .terminal import Terminal

NAME = "01a20da95e60f252e6b438"
WORDS = "the reason is that the shelf could not be found in the catalogue of the library"


@pytest.fixture(autouse=True)
def _plain(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")


def shown(part: Section | str, width: int | None, monkeypatch: pytest.MonkeyPatch, out: io.StringIO) -> list[str]:
    """The lines of a part of an answer, without styles and without margins."""
    if width is not None:
        monkeypatch.setenv("COLUMNS", str(width))
    answer(argparse.Namespace(answer_to=out), {}, part)
    lines = [re.sub(r"\x1b\[[\d;]*m", "", line).rstrip() for line in out.getvalue().splitlines()]
    return [line for line in lines if line]


@pytest.mark.parametrize("width", [40, 60, 80, 120])
def test_a_table_fits_and_keeps_numbers_and_ids_whole(width: int, monkeypatch: pytest.MonkeyPatch):
    part = Section(("tape", "#number", "why"), [(NAME, "1,234,567", WORDS), (NAME, "-", "漢字" * 60)])
    lines = shown(part, width, monkeypatch, Terminal())
    assert max(map(cell_len, lines)) <= width
    text = "\n".join(lines)
    assert text.count("1,234,567") == 1
    if width > 40:  # otherwise the id alone has more than half of the width
        assert text.count(NAME) == 2
        assert all(word in text.split() for word in WORDS.split())


def test_cut_columns_have_one_line_per_row(monkeypatch: pytest.MonkeyPatch):
    part = Section(("tape", "question", "given"), [(NAME, f"a\nb\tc {WORDS}", "7")] * 3, cut=("question", "given"))
    lines = shown(part, 60, monkeypatch, Terminal())
    assert len(lines) == 2 + 3
    assert all(re.search(r" a b c the .*… +7$", line) for line in lines[2:])


def test_columns_are_left_out_by_importance_and_come_back_in_wider_terminals(monkeypatch: pytest.MonkeyPatch):
    row = (NAME, WORDS, "train", "1,000", "")
    part = Section(("tape", "why", "split", "#tokens", "empty"), [row], optional=("empty", "tokens", "split"))
    heads = {width: shown(part, width, monkeypatch, Terminal())[0].split() for width in (40, 60, 72, 90, 140)}
    assert heads == {
        40: ["tape", "why"],
        60: ["tape", "why"],
        72: ["tape", "why", "split"],
        90: ["tape", "why", "split", "tokens"],
        140: ["tape", "why", "split", "tokens"],
    }


def test_numbers_alone_may_be_wider_than_the_terminal(monkeypatch: pytest.MonkeyPatch):
    part = Section(("#a", "#b", "word"), [("1234567890" * 3, "1234567890" * 3, WORDS)])
    text = "\n".join(shown(part, 40, monkeypatch, Terminal()))
    assert text.count("1234567890" * 3) == 2


def test_a_pipe_has_its_own_width_and_columns_changes_it(monkeypatch: pytest.MonkeyPatch):
    part = Section(("why",), [(WORDS * 5,)])
    assert 120 < max(map(len, shown(part, None, monkeypatch, io.StringIO()))) <= 140
    assert 60 < max(map(len, shown(part, 80, monkeypatch, io.StringIO()))) <= 80


def test_a_sentence_is_broken_at_words_in_a_terminal_only(monkeypatch: pytest.MonkeyPatch):
    sentence = f"{WORDS} {'/folder' * 12} {WORDS}"
    lines = shown(sentence, 40, monkeypatch, Terminal())
    assert " ".join(lines) == sentence
    assert [line for line in lines if len(line) > 40] == ["/folder" * 12]
    assert shown(sentence, 40, monkeypatch, io.StringIO()) == [sentence]
    assert shown(f"    {WORDS}", 40, monkeypatch, Terminal())[1].startswith("    ")
    document = f"{WORDS}\n| {WORDS} |"
    assert shown(document, 40, monkeypatch, Terminal()) == document.splitlines()


@pytest.mark.parametrize("width", [20, 40, 80, 200])
def test_a_broken_command_is_the_same_command(width: int, monkeypatch: pytest.MonkeyPatch):
    line = """  tapereel run --set engine.answers='["7", "8"]' --tasks "[1, 5]" --json --out 'my runs/a' file.py:name"""
    broken = broken_command(line, width)
    assert shlex.split(broken.replace("\\\n", "")) == shlex.split(line), "a shell joins the lines"
    assert all(len(part) <= max(width, 42) for part in broken.splitlines())
    assert (broken == line) == (width == 200)
    assert shown(line, width, monkeypatch, Terminal()) == broken.splitlines()
