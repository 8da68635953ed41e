"""What every verb of the command line keeps: one answer on stdout, progress on stderr, four exit codes.

A verb is a module with `EXAMPLE: str`, `configure(parser)` and `run(args) -> int`; `cli.py` lists it by name. While
`run` works, stdout is stderr, so that whatever a library prints is progress; only `answer` writes to the real stdout,
once.
This module knows no verb.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Collection, Mapping
from enum import IntEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from pydantic import BaseModel
from pydantic_core import to_jsonable_python

from ..tapes.common.text import counted, number, safe
from ..tapes.errors import UsageError

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.table import Table


__all__ = [
    "Exit",
    "UsageError",
    "Verb",
    "answer",
    "check_port",
    "check_target",
    "console_for",
    "counted",
    "number",
    "safe",
    "say",
    "table",
]


class Exit(IntEnum):
    """How a command ended, for scripts."""

    HOLDS = 0
    """It worked; what was asked is so."""
    BROKEN = 1
    """It failed, or what was asked is not so: bytes differ, a replay diverged."""
    UNVERIFIABLE = 2
    """It can't be told from what is there; the answer says what is missing."""
    USAGE = 64
    """What was given makes no sense: a word of the command line, a setting, or a file, folder or code that it names."""


def check_port(port: int) -> None:
    """UsageError where `--port` is none."""
    if not 0 <= port < 65536:
        raise UsageError(f"--port is {port}; a port is a number from 0 (any free one) to 65535")


def check_target(flag: str, path: str | Path | None) -> None:
    """UsageError where no file can be written at `path`, the value of `flag`; before the work, not after it."""
    if path is not None and not Path(path).parent.is_dir():
        raise UsageError(f"{flag} {path}: there is no folder {Path(path).parent}")
    if path is not None and Path(path).is_dir():
        raise UsageError(f"{flag} {path} is a folder; name a file in it")


class Verb(Protocol):
    """The shape of a module that implements a verb."""

    EXAMPLE: str
    """One or more command lines that work, for `--help`."""

    def configure(self, parser: argparse.ArgumentParser) -> None:
        """Declare the verb's own arguments."""
        ...

    def run(self, args: argparse.Namespace) -> int:
        """Do it; give an `Exit`. `args.json` says that a program is reading."""
        ...


def say(text: str) -> None:
    """One line of progress, to stderr; what a tape put into it commands no terminal."""
    print(safe(text), file=sys.stderr, flush=True)


def answer(args: argparse.Namespace, data: BaseModel | Mapping[str, Any], *shown: RenderableType) -> None:
    """The verb's answer: `data` as one JSON object under `--json`, else what is `shown`, for people."""
    out = getattr(args, "answer_to", None) or sys.stdout
    if getattr(args, "json", False):
        out.write(_spelled(json.dumps(_plain(data), ensure_ascii=False, allow_nan=False)) + "\n")
    else:
        console = console_for(out)
        own = console.width
        for item in shown:
            # Sentences go on one line, for grep; a table keeps to the width.
            console.width = max(own, _least_width(item, console))
            console.print(item, soft_wrap=isinstance(item, str))
    out.flush()


def console_for(out: Any) -> Console:
    """A rich console on `out` that never takes text for markup: what a model wrote must not style the terminal."""
    from rich.console import Console

    # Into a file or a pipe there is no width to fit; 140 keeps tables readable.
    return Console(file=out, markup=False, highlight=False, emoji=False, width=None if out.isatty() else 140)


NARROWEST = 12
"""Characters that a column which may break its lines has at least, if it has so many."""
WIDEST = 10_000


def table(*headings: str, fold: Collection[str] = ()) -> Table:
    """A table to fill. A heading that begins with `#` is that of numbers; the columns in `fold` break their lines."""
    from rich import box
    from rich.table import Table

    made = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for heading in headings:
        name = heading.removeprefix("#")
        side = "right" if heading.startswith("#") else "left"
        made.add_column(name, justify=side, no_wrap=name not in fold, overflow="fold")
    return made


def _least_width(item: RenderableType, console: Console) -> int:
    """What a table needs at least: a terminal that is narrower breaks its lines, but no number is ever cut short."""
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


def _spelled(text: str) -> str:
    """JSON with every character that has no shape as an escape: such stand in strings only, and mean the same there."""
    return text if text.isprintable() else "".join(c if c.isprintable() else json.dumps(c)[1:-1] for c in text)


def _plain(value: Any) -> Any:
    value = to_jsonable_python(value, inf_nan_mode="constants")
    return _finite(value)


def _finite(value: Any) -> Any:
    """JSON has no NaN: unknown is null, infinities are words."""
    if isinstance(value, dict):
        return {k: _finite(v) for k, v in value.items()}
    if isinstance(value, list):
        return [_finite(v) for v in value]
    if isinstance(value, float) and value != value:
        return None
    if value in (float("inf"), float("-inf")):
        return str(value)
    return value
