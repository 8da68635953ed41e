"""What the verbs that check tapes share: the arguments that choose tapes, and how verdicts are printed and kept."""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...tapes.audit.checking import Plan, check_run
from ...tapes.audit.verdict import Divergence, Verdicts
from ...tapes.common.text import safe
from ..console import answer, say, table
from ..progress_bars import live_progress

if TYPE_CHECKING:
    from rich.console import RenderableType

SHOWN = 20
"""Verdicts that are shown to people one by one; `--json` has them all."""


GIVEN = ("agent", "env", "reward", "model", "layer", "mask", "tolerance")
"""Arguments that say against what the tapes were checked; kept with the verdicts where they were given."""


def add_tape_arguments(parser: argparse.ArgumentParser, *, turn: bool = False) -> None:
    """Which tapes, and how."""
    parser.add_argument("run", help="a run directory")
    parser.add_argument(
        "tape", nargs="*", default=[], help="ids of tapes, or their first characters; without any, all that ended"
    )
    if turn:
        parser.add_argument("--turn", type=int, metavar="K", help="this turn alone, counted from 0")
    parser.add_argument("--split", help="only tapes of this split (`train`, `eval`, `demo`, ...)")
    add_keep_argument(parser)
    parser.add_argument("--jobs", type=int, metavar="N", help="processes (default: as many as it pays to start)")


def add_keep_argument(parser: argparse.ArgumentParser) -> None:
    """Whether the verdicts stay."""
    parser.add_argument(
        "--no-keep", action="store_true", help="leave no file with the verdicts in the run, for `tapereel view`"
    )


def check_named(args: argparse.Namespace, verb: str, plan: Plan) -> Verdicts:
    """Check the tapes that the arguments name, with live progress."""
    with live_progress() as progress:
        return check_run(
            args.run,
            verb,
            plan,
            tapes=args.tape,
            split=args.split,
            turn=getattr(args, "turn", None),
            jobs=args.jobs,
            progress=progress,
        )


def tell(args: argparse.Namespace, verdicts: Verdicts, *more: RenderableType, data: Any = None) -> int:
    """Keep the verdicts beside the run's tapes, print them, and give the exit code. `data`: more fields of the JSON
    object."""
    kept = None if args.no_keep else _keep(args, verdicts)
    answer(args, {**verdicts.model_dump(mode="json"), **(data or {}), "kept": kept}, *_shown(verdicts), *more)
    return verdicts.exit_code


def _keep(args: argparse.Namespace, verdicts: Verdicts) -> str | None:
    """Where they were kept; None where nothing was, and why is said."""
    from ...tapes.audit.verdict_files import keep_verdicts

    given = {name: str(value) for name in GIVEN if (value := getattr(args, name, None))}
    try:
        path = keep_verdicts(Path(args.run), verdicts, given)
    except OSError as error:
        say(f"the verdicts are not kept, so `tapereel view` will not show them: {error.strerror or error}: {args.run}")
        return None
    return None if path is None else str(path)


def _shown(verdicts: Verdicts) -> Iterator[RenderableType]:
    yield from map(safe, verdicts.torn)
    bad = [v for v in verdicts.verdicts if v.outcome == "diverged"]
    if bad:
        made = table("tape", "#turn", "where", "likely cause", fold=("where", "likely cause"))
        for d in (v.divergence for v in bad[:SHOWN] if v.divergence is not None):
            made.add_row(d.tape, "" if d.turn is None else str(d.turn), safe(d.field), d.cause.value)
        yield made
    if len(bad) > SHOWN:
        yield f"and {len(bad) - SHOWN:,} more that diverge: --json has them all"
    if bad and bad[0].divergence is not None:
        yield from _first(bad[0].divergence)
    reasons = Counter(v.reason for v in verdicts.verdicts if v.reason is not None)
    for reason, n in reasons.most_common(SHOWN // 4):
        yield safe(f"{n:,} can't be verified: {reason}")
    if len(reasons) > SHOWN // 4:
        yield f"and {len(reasons) - SHOWN // 4} more reasons: --json has them all"
    notes = Counter(note for verdict in verdicts.verdicts for note in verdict.not_checked)
    for note, n in notes.most_common(SHOWN // 4):
        yield safe(f"not checked on {n:,}: {note}")
    checked: Counter[str] = Counter()
    for verdict in verdicts.verdicts:
        checked.update(verdict.checked)
    told = ", ".join(f"{n:,} {name}" for name, n in checked.items() if n) or "nothing"
    yield f"{verdicts.verb}: {', '.join(f'{n:,} {name}' for name, n in verdicts.counts.items())}; compared: {told}"


def _first(d: Divergence) -> Iterator[str]:
    yield safe(f"tape {d.tape}: {d.sentence}")
    if d.where is not None:
        yield safe(f"at {d.where}")
    yield from (safe(line[:400]) for line in d.diff[:40])
