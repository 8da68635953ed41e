"""Whatever the bytes are, reading them ends with lines or with an error of ours, in bounded memory."""

from __future__ import annotations

import io
from pathlib import Path

import pytest

from tapereel.tapes import NotATape
from tapereel.tapes.schema import parse_record
from tapereel.tapes.store import peek
from tapereel.tapes.store import reader as reader_module
from tapereel.tapes.store.segment import BadLine, parse_line, read_body

from . import fuzz


@pytest.mark.parametrize("path", sorted(fuzz.CORPUS.glob("*.bin")), ids=lambda path: path.stem)
def test_an_input_that_was_trouble_once(path: Path) -> None:
    fuzz.execute(path.read_bytes())


def test_there_is_a_corpus() -> None:
    assert len(list(fuzz.CORPUS.glob("*.bin"))) >= 5


def test_mutated_segments_end_with_an_error_of_ours() -> None:
    result = fuzz.run(2_000, seed=20)
    # Every kind of end was met, or the mutations are too tame or too wild to say anything.
    assert {"torn", "corrupt", "whole", "ValidationError", "BadLine"} <= set(result["ended"])


def test_memory_is_bounded_by_the_longest_line_not_by_the_file(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reader_module, "MAX_LINE", 1 << 16)
    endless = b"x" * (8 << 20)  # no line break anywhere
    assert fuzz.execute(endless, index=False) == "torn"
    held = fuzz.peak_memory(endless)
    assert held < 3 << 20, f"{held} bytes were held for lines of at most {1 << 16}"


@pytest.mark.parametrize(
    "line",
    [
        b"",
        b"{",
        b'{"n":0',
        b"\x00" * 300,
        b'{"n":00,"c":0,"p":"' + b"0" * 64 + b'","b":{},"h":"' + b"0" * 64 + b'"}',
        b'{"n":0,"c":0,"p":"' + b"0" * 64 + b'","b":{},"h":"' + b"0" * 64 + b'"}',
        b'{"n":0,"c":0,"p":"' + b"0" * 64 + b'","b":{"h":"' + b"0" * 64 + b'"}',
    ],
)
def test_what_is_no_line_is_refused(line: bytes) -> None:
    with pytest.raises(BadLine):
        parse_line(line)


@pytest.mark.parametrize(
    "body",
    [
        b"[]",
        b"{",
        b'{"t":1}',
        b'{"a":1}',
        b'{"t":"step","tape":{}}',
        b"[" * 100_000,
        b'{"a":' * 100_000,
        b'{"t":"begin","tape":"\xff"}',
    ],
)
def test_what_is_no_record_is_refused(body: bytes) -> None:
    with pytest.raises(NotATape):
        peek(body)
    with pytest.raises(ValueError, match=r"."):
        parse_record(body)


def test_a_body_is_read_as_plain_values() -> None:
    assert read_body(b'{"a":[1,null]}') == {"a": [1, None]}


def test_a_reader_of_an_empty_file_finds_nothing_and_no_break() -> None:
    class Empty(fuzz.OneFile):
        def open(self, path: Path) -> io.BytesIO:
            return io.BytesIO()

    lines = reader_module.SegmentReader(Path("/x"), "000001-abcdef", disk=Empty(b""))  # type: ignore[arg-type]
    assert list(lines) == []
    assert lines.broken() is None
