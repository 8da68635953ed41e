"""Functions that the commands of `tapereel replay` share. They declare arguments, and print and keep verdicts."""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TypedDict

from ...tapes.audit.verdict import Divergence, Verdicts
from ...tapes.audit.verdict_files import keep_verdicts
from ..console import Section, answer, given, say

SHOWN = 20
"""Maximum number of verdicts that are printed one by one. `--json` has all of them."""

KEPT = ("agent", "env", "reward", "model", "layer", "mask", "tolerance")
"""Names of arguments that are recorded with the verdicts if they are given."""

SPELLED = {"replay": "replay agent", "reexec": "replay env", "rescore": "replay rewards", "requery": "replay model"}
"""The command for each check, by the name of the check in verdicts."""


def add_tape_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare arguments for the run, its tapes, and whether their verdicts are kept."""
    parser.add_argument("run", help="a run directory")
    parser.add_argument(
        "tape", nargs="*", default=[], help="ids of tapes, or their first characters (default: all closed tapes)"
    )
    parser.add_argument("--split", help="only tapes of this split (`train`, `eval`, `demo`, ...)")
    parser.add_argument(
        "--no-keep", action="store_true", help="don't write the verdicts into the run for `tapereel view` to show"
    )


def add_jobs_argument(parser: argparse.ArgumentParser) -> None:
    """Declare the number of processes."""
    parser.add_argument("--jobs", type=int, metavar="N", help="processes (default: by the number of tapes)")


class Chosen(TypedDict):
    """The tapes that the arguments choose, as keyword arguments for the library's functions."""

    tapes: list[str]
    split: str | None


def tape_arguments(args: argparse.Namespace) -> Chosen:
    """Return the tapes that the arguments choose."""
    return {"tapes": args.tape, "split": args.split}


def print_verdicts(
    args: argparse.Namespace, verdicts: Verdicts, *more: str, data: Mapping[str, object] | None = None
) -> int:
    """Keep the verdicts in the run, print them, and return the exit code. `data` is added to the JSON output."""
    kept = None if args.no_keep else _keep(args, verdicts)
    answer(args, {**verdicts.model_dump(mode="json"), **(data or {}), "kept": kept}, *_shown(verdicts), *more)
    return verdicts.exit_code


def _keep(args: argparse.Namespace, verdicts: Verdicts) -> str | None:
    """Write the verdicts to a file and return its path. If the run can't be written to, report that and return None."""
    compared = {name: str(getattr(args, name)) for name in KEPT if name in args and given(args, [name])}
    try:
        path = keep_verdicts(Path(args.run), verdicts, compared)
    except OSError as error:
        say(f"the verdicts are not kept, so `tapereel view` will not show them: {error.strerror or error}: {args.run}")
        return None
    return None if path is None else str(path)


def _shown(verdicts: Verdicts) -> Iterator[str | Section]:
    yield from verdicts.torn
    bad = [v for v in verdicts.verdicts if v.outcome == "diverged"]
    if bad:
        rows = [
            (d.tape, "" if d.turn is None else str(d.turn), d.field, d.cause.value)
            for d in (v.divergence for v in bad[:SHOWN])
            if d is not None
        ]
        yield Section(("tape", "#turn", "where", "likely cause"), rows)
    if len(bad) > SHOWN:
        yield f"and {len(bad) - SHOWN:,} more that diverge: --json has all"
    if bad and bad[0].divergence is not None:
        yield from _divergence_lines(bad[0].divergence)
    reasons = Counter(v.reason for v in verdicts.verdicts if v.reason is not None)
    for reason, n in reasons.most_common(SHOWN // 4):
        yield f"{n:,} can't be verified: {reason}"
    if len(reasons) > SHOWN // 4:
        yield f"and {len(reasons) - SHOWN // 4} more reasons: --json has all"
    notes = Counter(note for verdict in verdicts.verdicts for note in verdict.not_checked)
    for note, n in notes.most_common(SHOWN // 4):
        yield f"not checked on {n:,}: {note}"
    checked: Counter[str] = Counter()
    for verdict in verdicts.verdicts:
        checked.update(verdict.checked)
    compared = ", ".join(f"{n:,} {name}" for name, n in checked.items() if n) or "nothing"
    counts = ", ".join(f"{n:,} {name}" for name, n in verdicts.counts.items())
    yield f"{SPELLED.get(verdicts.verb, verdicts.verb)}: {counts} (compared: {compared})"


def _divergence_lines(d: Divergence) -> Iterator[str]:
    yield f"tape {d.tape}: {d.sentence}"
    if d.where is not None:
        yield f"at {d.where}"
    yield from (line[:400] for line in d.diff[:40])
