"""The interface of a command: one answer on stdout, progress on stderr, and an exit code.

A command is a module with `EXAMPLE: str`, `configure(parser)` and `run(args) -> int`. During `run`, stdout is
redirected to stderr, so output of libraries counts as progress. Only `answer` writes to the real stdout, once.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from itertools import chain
from pathlib import Path
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
    unchanged."""
    out = getattr(args, "answer_to", None) or sys.stdout
    if getattr(args, "json", False):
        out.write(_escape_unprintable(json.dumps(_json_value(data), ensure_ascii=False, allow_nan=False)) + "\n")
    else:
        console = console_for(out)
        own = console.width
        for item in chain.from_iterable(map(_rendered, shown)):
            # A sentence is not wrapped, so that grep finds it. A table is fitted to the width.
            console.width = max(own, _least_width(item, console))
            console.print(item, soft_wrap=isinstance(item, str))
    out.flush()


def console_for(out: TextIO) -> Console:
    """Return a rich console on `out` that ignores markup, because text from a model must not style the terminal."""
    from rich.console import Console

    # A file or a pipe has no width of its own. With 140 characters, tables are readable.
    return Console(file=out, markup=False, highlight=False, emoji=False, width=None if out.isatty() else 140)


_MARKDOWN = re.compile(r"([\\`*_\[\]<>|&~#!$])")
NARROWEST = 12
"""Minimum width of a column that wraps, in characters. A column may be narrower if all its cells are shorter."""
WIDEST = 10_000


@dataclass(frozen=True)
class Section:
    """A table with a title and with sentences below it."""

    headings: tuple[str, ...]
    """A leading `#` marks a column of numbers."""
    rows: Sequence[Sequence[str | Text]]
    title: str = ""
    empty: str = ""
    """Text to print if the table has no rows. If this text is empty, the headings are printed."""
    notes: tuple[str, ...] = ()
    fold: Collection[str] = ()
    """Names of the columns that wrap long text."""


def styled(text: str, style: str = "") -> Text:
    """Return escaped text in a rich style."""
    from rich.text import Text

    return Text(safe(text), style)


def _rendered(part: Section | RenderableType) -> Iterator[RenderableType]:
    if not isinstance(part, Section):
        yield safe(part) if isinstance(part, str) else part
        return
    yield _table(part) if part.rows or not part.empty else safe(f"{part.title}: {part.empty}")
    yield from map(safe, part.notes)


def _table(part: Section) -> Table:
    from rich import box
    from rich.table import Table

    made = Table(box=box.SIMPLE_HEAD, pad_edge=False, title=part.title or None, title_justify="left")
    for heading in part.headings:
        name = heading.removeprefix("#")
        side = "right" if heading.startswith("#") else "left"
        made.add_column(name, justify=side, no_wrap=name not in part.fold, overflow="fold")
    for row in part.rows:
        made.add_row(*(safe(cell) if isinstance(cell, str) else cell for cell in row))
    return made


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


def _least_width(item: RenderableType, console: Console) -> int:
    """Return the smallest width at which a table shows every number in full. A narrower terminal wraps the lines."""
    from rich.cells import cell_len
    from rich.table import Table

    if not isinstance(item, Table):
        return 0
    for column in item.columns:
        lines = [line for cell in (column.header, *column.cells) for line in str(cell).splitlines()]
        longest = max(map(cell_len, lines), default=0)
        column.min_width = column.width = longest if column.no_wrap else min(longest, NARROWEST)
    least = console.measure(item, options=console.options.update(width=WIDEST)).minimum
    for column in item.columns:
        column.width = None
    return least


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
