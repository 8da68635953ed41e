"""The interface of a command: one answer on stdout, progress on stderr, and an exit code.

A command is a module with `EXAMPLE: str`, `configure(parser)` and `run(args) -> int`. During `run`, stdout is
redirected to stderr, so output of libraries counts as progress. Only `answer` writes to the real stdout, once.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import cached_property
from itertools import chain
from pathlib import Path
from textwrap import wrap
from typing import TYPE_CHECKING, Any, Protocol, TextIO

from pydantic import BaseModel
from pydantic_core import to_jsonable_python

from ..tapes.common.text import safe, tell
from ..tapes.errors import UsageError

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.table import Table
    from rich.text import Text


class Exit(IntEnum):
    """Exit codes, for scripts."""

    HOLDS = 0
    """The command succeeded, or its check passed."""
    BROKEN = 1
    """The command failed, or its check failed, for example because bytes differ or a replay diverged."""
    UNVERIFIABLE = 2
    """The check needs data that the run doesn't have. The answer names the missing data."""
    USAGE = 64
    """An argument or setting is invalid, or it names an invalid file, folder or piece of code."""
    AWAY = 69
    """The model's server did not answer within `engine.patience`. The run can be resumed."""
    BUDGET = 75
    """The budget or the provider's quota is spent. The run can be resumed."""
    KEY = 77
    """The model's server or provider rejects the API key."""
    MODEL = 78
    """The model's server or provider doesn't have the model, or has other weights than the run."""


def at_least(least: int) -> Callable[[str], int]:
    """Return an argparse type that accepts integers of at least `least`."""

    def integer(text: str) -> int:
        value = int(text)
        if value < least:
            raise argparse.ArgumentTypeError(f"{value} is too small: give {least:,} or more")
        return value

    return integer


def positive(text: str) -> float:
    """Parse a number above 0, as an argparse type."""
    value = float(text)
    if not value > 0:
        raise argparse.ArgumentTypeError(f"{value:g} is not above 0")
    return value


def given(args: argparse.Namespace, names: Iterable[str]) -> list[str]:
    """Return the flags of the arguments that differ from their defaults. `names` are attributes of `args`."""
    return [
        _FLAGS.get(name, f"--{name.replace('_', '-')}")
        for name in names
        if getattr(args, name) != args.parser.get_default(name)
    ]


_FLAGS = {"tape": "a tape", "imports": "--import", "updates": "--update", "agents": "--agent"}
"""How attributes of `args` are spelled on the command line, if they have different names there."""


def command(verb: str, *arguments: str) -> str:
    """Return a command line, quoted for a shell."""
    return " ".join(("tapereel", verb, *map(shlex.quote, arguments)))


def check_target(flag: str, path: str | Path | None) -> None:
    """Raise UsageError if a file can't be written at `path`, which is the value of `flag`. A command calls this before
    its work. Otherwise, hours of work could end with an answer that can't be written."""
    if path is not None and not Path(path).parent.is_dir():
        raise UsageError(
            f"{flag} {path}: the folder {Path(path).parent} doesn't exist; create it, or name another file"
        )
    if path is not None and Path(path).is_dir():
        raise UsageError(f"{flag} {path} is a folder; name a file in it")


class Verb(Protocol):
    """The interface of a module that implements a command."""

    EXAMPLE: str
    """One or more valid command lines, shown by `--help`."""

    def configure(self, parser: argparse.ArgumentParser) -> None:
        """Declare the command's own arguments."""
        ...

    def run(self, args: argparse.Namespace) -> int:
        """Run the command and return an `Exit`. `args.json` asks for an answer in JSON."""
        ...


def say(text: str) -> None:
    """Print one line of progress to stderr. Control characters are escaped, so text from a tape can't control the
    terminal."""
    tell(text)


def answer(args: argparse.Namespace, data: BaseModel | Mapping[str, object], *shown: Section | RenderableType) -> None:
    """Print the command's answer. With `--json`, the answer is `data` as one JSON object. Otherwise, it is `shown`,
    which is meant for people.

    Strings and sections are escaped here, so text from a tape can't control the terminal. Rich renderables are printed
    unchanged. A terminal breaks a string of one line at words. A string of several lines is a document, which is
    printed unchanged."""
    out = getattr(args, "answer_to", None) or sys.stdout
    if getattr(args, "json", False):
        out.write(_escape_unprintable(json.dumps(_json_value(data), ensure_ascii=False, allow_nan=False)) + "\n")
    else:
        console = console_for(out)
        for item in chain.from_iterable(_rendered(part, console.width) for part in shown):
            if isinstance(item, str):
                # In a file or pipe, a sentence is not broken, so that grep finds it.
                whole = "\n" in item or not out.isatty()
                console.print(item if whole else _broken(item, console.width), soft_wrap=True)
            else:
                console.print(item, crop=False)
    out.flush()


def console_for(out: TextIO) -> Console:
    """Return a rich console on `out` that ignores markup, because text from a model must not style the terminal."""
    from rich.console import Console

    return Console(file=out, markup=False, highlight=False, emoji=False, width=_width_of(out))


def _width_of(out: TextIO) -> int | None:
    """Return the width of a file or pipe, or None if rich can find out: for a terminal, or with COLUMNS."""
    return None if out.isatty() or os.environ.get("COLUMNS", "").isdecimal() else PIPE


_MARKDOWN = re.compile(r"([\\`*_\[\]<>|&~#!$])")
_WORDS = re.compile(r"""(?:--[\w-]+ (?!-))?(?:'[^']*'|"[^"]*"|[^\s'"])+|\S""")
"""Matches the words of a command line, an option with its value."""
PIPE = 140
"""The width of a file or pipe, in characters. Tables of this width are readable."""
UNBROKEN = 24
"""Maximum length of a word in a table that is never broken, in characters. An id of a tape has 22."""
NARROWEST = 12
"""Minimum width of a column whose words are longer than `UNBROKEN` or whose cells are cut, in characters."""
GAP = 2
"""Width between two columns, and of both margins together, in characters."""


@dataclass(frozen=True)
class Section:
    """A table with a title and with sentences below it."""

    headings: tuple[str, ...]
    """A leading `#` marks a column of numbers. Numbers are never cut, and other columns break long text at words."""
    rows: Sequence[Sequence[str | Text]]
    """The last cells of a row may be missing."""
    title: str = ""
    empty: str = ""
    """Text to print if the table has no rows. If this text is empty, the headings are printed."""
    notes: tuple[str, ...] = ()
    cut: Collection[str] = ()
    """Names of columns with one line per cell. Longer text ends with an ellipsis. An empty column is left out."""
    optional: tuple[str, ...] = ()
    """Names of columns that are left out if they are empty, or if the room is small. The first one is left out first,
    until the columns of text have half of the width or all that they need."""


def styled(text: str, style: str = "") -> Text:
    """Return escaped text in a rich style."""
    from rich.text import Text

    return Text(safe(text), style)


def broken_command(line: str, width: int) -> str:
    """Return a command line in lines of at most `width` characters, each of which ends with a backslash except the
    last. Words are not broken, so a shell reads the result as the same command."""
    start = line[: len(line) - len(line.lstrip())]
    lines: list[str] = []
    for word in _WORDS.findall(line):
        if lines and len(lines[-1]) + len(word) + 3 <= width:
            lines[-1] += f" {word}"
        else:
            lines.append(f"{start}    {word}" if lines else f"{start}{word}")
    return line if len(line) <= width else " \\\n".join(lines)


def _broken(sentence: str, width: int) -> str:
    """Return a sentence or a command line in lines of at most `width` characters, unless a word is longer."""
    if sentence.lstrip().startswith("tapereel "):
        return broken_command(sentence, width)
    start = sentence[: len(sentence) - len(sentence.lstrip())]
    lines = wrap(sentence, width, subsequent_indent=start, break_long_words=False, break_on_hyphens=False)
    return "\n".join(lines)


def _rendered(part: Section | RenderableType, width: int) -> Iterator[RenderableType]:
    if not isinstance(part, Section):
        yield safe(part) if isinstance(part, str) else part
        return
    yield _table(part, width) if part.rows or not part.empty else safe(f"{part.title}: {part.empty}")
    yield from map(safe, part.notes)


@dataclass(frozen=True)
class _Column:
    name: str
    number: bool
    cut: bool
    cells: list[str | Text]

    @cached_property
    def most(self) -> int:
        """The width of the longest line."""
        return _longest(line for cell in (self.name, *self.cells) for line in str(cell).splitlines())

    @cached_property
    def least(self) -> int:
        """The width of the longest word that must not be broken."""
        if self.cut:
            return min(self.most, NARROWEST)
        words = [word for cell in (self.name, *self.cells) for word in str(cell).split()]
        return _longest(word if self.number or len(word) <= UNBROKEN else word[:NARROWEST] for word in words)


def _table(part: Section, width: int) -> Table:
    """Return the table for a terminal of this width. It is wider only if the numbers need more."""
    from rich import box
    from rich.table import Table

    columns: list[_Column] = []
    for k, heading in enumerate(part.headings):
        name = heading.removeprefix("#")
        cells = [_cell(row[k] if k < len(row) else "", name in part.cut) for row in part.rows]
        if any(cells) or name not in (*part.cut, *part.optional):
            columns.append(_Column(name, heading.startswith("#"), name in part.cut, cells))
    for name in part.optional:
        if _roomy(columns, width):
            break
        columns = [column for column in columns if column.name != name]
    widths = _widths(columns, width)
    made = Table(
        box=box.SIMPLE_HEAD,
        padding=(0, GAP - 1, 0, 0),
        pad_edge=False,
        title=part.title or None,
        title_justify="left",
        width=sum(widths) + GAP * len(columns),
    )
    for column, wide in zip(columns, widths, strict=True):
        made.add_column(
            column.name,
            justify="right" if column.number else "left",
            width=wide,
            no_wrap=column.cut,
            overflow="ellipsis" if column.cut else "fold",
        )
    for row in zip(*(column.cells for column in columns), strict=True):
        made.add_row(*row)
    return made


def _cell(cell: str | Text, cut: bool) -> str | Text:
    if isinstance(cell, str):
        cell = safe(cell).expandtabs(4)
        return " ".join(cell.split()) if cut else cell
    return cell


def _roomy(columns: Sequence[_Column], width: int) -> bool:
    """Return whether the columns that can shrink have half of the width, or all that they need."""
    shrinking = [column for column in columns if column.least < column.most]
    fixed = sum(column.most for column in columns if column.least >= column.most)
    need = max(min(sum(column.most for column in shrinking), width // 2), sum(column.least for column in shrinking))
    return width - GAP * len(columns) - fixed >= need


def _widths(columns: Sequence[_Column], width: int) -> list[int]:
    """Return the width of each column. Columns of text share the room that the others leave, and none gets more than it
    needs. If that is not enough, more is cut, and then words are broken."""
    least = [column.least for column in columns]
    cut = [1 if column.cut else column.least for column in columns]
    broken = [column.least if column.number else 1 for column in columns]
    for lows in (least, cut, broken):
        for level in range(width, 0, -1):
            widths = [max(low, min(column.most, level)) for low, column in zip(lows, columns, strict=True)]
            if sum(widths) <= width - GAP * len(columns):
                return widths
    return least


def _longest(parts: Iterable[str]) -> int:
    from rich.cells import cell_len

    return max(map(cell_len, parts), default=0)


def markdown(parts: Iterable[Section | str]) -> str:
    """Return sections and sentences as Markdown. Text from a tape is escaped, so it can't act as Markdown or HTML."""
    blocks: list[str] = []
    for part in parts:
        if isinstance(part, str):
            blocks.append(escaped(part))
            continue
        if part.title:
            blocks.append(f"## {escaped(part.title)}")
        names = [heading.removeprefix("#") for heading in part.headings]
        rules = ["---:" if heading.startswith("#") else "---" for heading in part.headings]
        cells = [map(escaped, names), rules, *(map(escaped, map(str, row)) for row in part.rows)]
        lines = "\n".join(f"| {' | '.join(line)} |" for line in cells)
        blocks += [lines if part.rows else escaped(part.empty), *map(escaped, part.notes)]
    return "\n\n".join(blocks) + "\n"


def escaped(text: str) -> str:
    """Return the text as one line of Markdown that shows every character as it is."""
    return _MARKDOWN.sub(r"\\\1", " ".join(safe(text).split()))


def _escape_unprintable(text: str) -> str:
    """Return the JSON with every unprintable character escaped. These characters occur only inside strings, so the
    JSON's value stays the same."""
    return text if text.isprintable() else "".join(c if c.isprintable() else json.dumps(c)[1:-1] for c in text)


def _json_value(value: Any) -> Any:
    return _finite(to_jsonable_python(value, inf_nan_mode="constants"))


def _finite(value: Any) -> Any:
    """Return the value with NaN as null and infinities as strings, since JSON has neither."""
    if isinstance(value, dict):
        return {k: _finite(v) for k, v in value.items()}
    if isinstance(value, list):
        return [_finite(v) for v in value]
    if isinstance(value, float) and value != value:
        return None
    if value in (float("inf"), float("-inf")):
        return str(value)
    return value
