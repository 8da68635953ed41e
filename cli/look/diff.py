"""`tapereel diff`: show where two tapes first differ, or how two runs solved the same tasks. It only reads."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

from ...tapes.common.stats import fixed, number
from ...tapes.errors import UsageError
from ...tapes.transcript import joined, plain
from ..console import Section, answer, markdown
from ..progress_bars import live_progress

if TYPE_CHECKING:
    from pydantic import JsonValue

    from ...tapes.audit.compare import Parting, RunDiff, TapeDiff
    from ...tapes.store.store import Store
    from ...tapes.tape import Tape
    from ...tapes.transcript import StepLine

EXAMPLE = """
tapereel diff runs/digits 019a3c 019a41
tapereel diff runs/digits:019a3c runs/digits-again:019a41
tapereel diff runs/digits-passk runs/digits-later --split eval --markdown
tapereel diff runs/digits runs/digits --split eval-before-sampled --against-split eval-after-sampled
"""

SHOWN = 20
"""Maximum number of steps to print, and of tasks to print for each kind of change. `--json` has all of them."""
CLIP = 300
"""Maximum number of characters that are printed from a step."""


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the verb's arguments."""
    parser.add_argument(
        "what",
        nargs="+",
        metavar="RUN|RUN:TAPE|TAPE",
        help="two runs, two tapes (each as RUN:TAPE or as a file), or a run and two of its tapes; the first "
        "characters of a tape's id are enough",
    )
    parser.add_argument("--split", help="with two runs: only tapes of this split")
    parser.add_argument(
        "--against-split",
        metavar="SPLIT",
        help="only the second run's tapes of this split (default: the same as --split)",
    )
    parser.add_argument("--markdown", action="store_true", help="print the result as Markdown")


def run(args: argparse.Namespace) -> int:
    """Compare two tapes or two runs, and print the differences."""
    with ExitStack() as stack:
        found = _compare(args, stack)
    from ...tapes.audit.compare import TapeDiff

    parts = list(_tape_parts(found) if isinstance(found, TapeDiff) else _run_parts(found))
    answer(args, found, *([markdown(parts)] if args.markdown else parts))
    return found.exit_code


def _compare(args: argparse.Namespace, stack: ExitStack) -> TapeDiff | RunDiff:
    """Return the difference between the two runs or tapes. `stack` closes the stores later, since tapes are read
    lazily."""
    from ...tapes.audit.compare import diff_runs, diff_tapes

    words: list[str] = args.what
    stores: dict[str, Store] = {}
    if len(words) == 3:
        words = [f"{words[0]}:{name}" for name in words[1:]]
    if len(words) != 2:
        raise UsageError(f"diff takes two runs, two tapes, or a run and two of its tapes, not {len(words)} arguments")
    runs = [Path(word).is_dir() for word in words]
    if len(args.what) == 2 and all(runs):
        first, second = (_store(word, stores, stack) for word in words)
        with live_progress() as progress:
            return diff_runs(first, second, args.split, against_split=args.against_split, progress=progress)
    if len(args.what) == 2 and any(runs):
        raise UsageError(f"{words[0]} and {words[1]} are a run and a tape: name two runs, or two tapes as RUN:TAPE")
    if args.split is not None or args.against_split is not None:
        raise UsageError(
            "--split and --against-split are for two runs: remove them, or name two runs instead of two tapes"
        )
    return diff_tapes(*(_tape(word, stores, stack) for word in words))


def _store(path: str, stores: dict[str, Store], stack: ExitStack) -> Store:
    from ...tapes.store.store import Store

    if path not in stores:
        stores[path] = stack.enter_context(Store.open(path))
    return stores[path]


def _tape(word: str, stores: dict[str, Store], stack: ExitStack) -> Tape:
    from ...tapes.tape import Tape

    if Path(word).is_file():
        return Tape.model_validate_json(Path(word).read_bytes())
    path, colon, name = word.rpartition(":")
    if not colon or not name:
        raise UsageError(f"{word!r} is neither a run directory nor a file. Name a tape as RUN:TAPE")
    return _store(path, stores, stack).tape(name)


def _tape_parts(found: TapeDiff) -> Iterator[str | Section]:
    a, b = found.first, found.second
    if not found.same_task:
        yield "The tapes have different tasks."
    rows = [
        ("status", a.status, b.status),
        ("reward", number(a.reward), number(b.reward)),
        ("turns", str(a.turns), str(b.turns)),
        ("forked from", a.parent or "", b.parent or ""),
        *((setting.field, _value(setting.first), _value(setting.second)) for setting in found.settings),
    ]
    yield _section(("", a.id, b.id), rows)
    if found.parting is None:
        yield f"No step differs: {found.shared} steps, {found.shared_turns} turns."
        return
    p = found.parting
    where = "in how they end" if p.step is None else f"at step {p.step}, turn {p.turn}, by {p.by}"
    yield (
        f"{found.shared} steps are equal ({found.shared_turns} whole turns). The tapes first differ {where}: "
        f"{p.field} is {_value(p.first)} and {_value(p.second)}"
    )
    if found.steps:
        steps = [(str(found.shared + k), _step(one), _step(two)) for k, (one, two) in enumerate(found.steps)]
        yield _section(("step", "first", "second"), steps, "steps")


def _section(headings: tuple[str, ...], rows: Sequence[tuple[str, ...]], what: str = "") -> Section:
    notes = (f"and {len(rows) - SHOWN:,} more {what}: --json has all",) if what and len(rows) > SHOWN else ()
    return Section(headings, rows[:SHOWN] if what else rows, notes=notes)


def _run_parts(found: RunDiff) -> Iterator[str | Section]:
    from ...tapes.audit.compare import SHOWN_FIRST

    splits = ["" if split is None else f", split {split}" for split in found.splits]
    yield f"{found.first}{splits[0]}, and {found.second}{splits[1]}"
    for change in SHOWN_FIRST:
        rows = [
            (
                task.name or task.task[:12],
                change.replace("_", " "),
                number(task.first),
                number(task.second),
                " ".join(task.tapes or ()),
                _place(task.parting),
            )
            for task in found.tasks
            if task.change == change
        ]
        if rows:
            headings = ("task", "change", "first", "second", "tapes", "differ at")
            yield _section(headings, rows, change.replace("_", " "))
    counts = ", ".join(f"{n:,} {change.replace('_', ' ')}" for change, n in found.counts.items())
    yield f"{sum(found.counts.values()):,} tasks, from the first run to the second: {counts}"
    if found.mean_first is not None and found.mean_second is not None:
        yield (
            f"mean reward on the {found.scored:,} tasks that both scored: {fixed(found.mean_first)} and "
            f"{fixed(found.mean_second)} ({fixed(found.mean_second - found.mean_first, '+.3f')}); tapereel scores "
            "--against adds intervals"
        )


def _place(parting: Parting | None) -> str:
    if parting is None:
        return ""
    return parting.field if parting.turn is None else f"turn {parting.turn}: {parting.field}"


def _step(line: StepLine | None) -> str:
    if line is None:
        return ""
    earned = "".join(f"  [{name} {number(value)}]" for name, value in line.rewards.items())
    return f"{line.by} {line.kind}: {_cut(joined(line.fragments, line.role))}{earned}"


def _cut(text: str) -> str:
    return text if len(text) <= CLIP else f"{text[:CLIP]}…"


def _value(value: JsonValue) -> str:
    return "nothing" if value is None else _cut(plain(value))
