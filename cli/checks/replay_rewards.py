"""`tapereel replay rewards`: score the recorded episodes again, to check scores, add scores or compare two rewards."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from ...envs.checks.rescore import FailureKind, add_reward_layer, compare_rewards, failure_kinds, rescore_run
from ...tapes.errors import UsageError
from ..console import Exit, Section, answer, given
from ..progress_bars import live_progress
from .verdict_output import add_jobs_argument, add_tape_arguments, print_verdicts, tape_arguments

if TYPE_CHECKING:
    from ...envs.checks.rescore import Disagreement
    from ...tapes.audit.verdict import Verdicts

EXAMPLE = """
tapereel replay rewards runs/digits --reward examples/digits.py:close --layer close
tapereel replay rewards runs/digits --reward rewards.py:exact --against rewards.py:lenient
"""

SHOWN = 5
"""Maximum number of kinds of failure that are printed. `--json` has all of them."""


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    add_tape_arguments(parser)
    parser.add_argument(
        "--reward",
        required=True,
        metavar="NAME",
        help="module:name of a Rewards, a RewardSource, or a function from a tape to its score",
    )
    parser.add_argument("--against", metavar="NAME", help="another reward: print the tapes on which the two disagree")
    parser.add_argument(
        "--layer", metavar="LAYER", help="compare with this later scoring, and add it to tapes that lack it"
    )
    parser.add_argument(
        "--tolerance",
        type=float,
        default=0.0,
        metavar="X",
        help="largest difference that counts as equal (default %(default)g)",
    )
    add_jobs_argument(parser)


def run(args: argparse.Namespace) -> int:
    """Score again, and print the verdicts, the number of added scores, or the table of two rewards."""
    if args.against is not None:
        for flag in given(args, ("layer", "tolerance", "jobs", "no_keep")):
            raise UsageError(f"{flag} doesn't go with --against, which only reads: remove one of the two")
        return _compare(args)
    with live_progress() as progress:
        if args.layer is None:
            verdicts = rescore_run(
                args.run,
                args.reward,
                tolerance=args.tolerance,
                jobs=args.jobs,
                progress=progress,
                **tape_arguments(args),
            )
            return _print(args, verdicts, len(verdicts.verdicts))
        for flag in given(args, ("jobs",)):
            raise UsageError(f"{flag} doesn't go with --layer, which is written by one process: remove {flag}")
        added = add_reward_layer(
            args.run, args.reward, args.layer, tolerance=args.tolerance, progress=progress, **tape_arguments(args)
        )
    line = f"layer {args.layer!r}: {added.records:,} records added to {added.tapes:,} tapes"
    return _print(args, added.verdicts, added.scored, line, added=added.records)


def _print(args: argparse.Namespace, verdicts: Verdicts, scored: int, *more: str, added: int | None = None) -> int:
    """Print the verdicts and the failures. If a layer was added, the command succeeds even without a comparison."""
    kinds = failure_kinds((v.tape, v.failures) for v in verdicts.verdicts)
    failed = sum(bool(v.failures) for v in verdicts.verdicts)
    lines = _failure_lines(kinds, failed, scored)
    code = print_verdicts(args, verdicts, *lines, *more, data={"added": added, "failures": kinds})
    return Exit.HOLDS if added and not verdicts.verdicts else code


def _failure_lines(kinds: Sequence[FailureKind], failed: int, scored: int) -> Iterator[str]:
    if failed:
        yield f"the reward failed on {failed:,} of {scored:,} tapes, which have no score from it"
    for kind in kinds[:SHOWN]:
        at = "" if kind.where is None else f", at {kind.where}"
        yield f"{kind.tapes:,} times, first on {kind.tape}: {kind.first}{at}"
    if len(kinds) > SHOWN:
        yield f"and {len(kinds) - SHOWN:,} more kinds of failure: --json has all"


def _compare(args: argparse.Namespace) -> int:
    found, kinds = compare_rewards(args.run, args.reward, args.against, **tape_arguments(args))
    answer(
        args,
        {
            "run": str(args.run),
            "reward": args.reward,
            "against": args.against,
            **found.model_dump(),
            "failures": kinds,
        },
        *((_furthest(found),) if found.furthest else ()),
        *_failure_lines(kinds, found.failed, found.tapes),
        *_disagreement_lines(found),
    )
    return Exit.UNVERIFIABLE if found.failed or found.unscored == found.tapes else Exit.HOLDS


def _furthest(found: Disagreement) -> Section:
    rows = [
        (o.tape, o.group or "", f"{o.ours:g}", f"{o.theirs:g}", f"{o.ours - o.theirs:+g}")
        for o in found.furthest
        if o.ours is not None and o.theirs is not None
    ]
    return Section(("tape", "group", "#reward", "#against", "#difference"), rows)


def _disagreement_lines(found: Disagreement) -> list[str]:
    lines = [
        f"{found.tapes:,} tapes: {found.equal:,} equal, {found.higher:,} higher than with the other reward, "
        f"{found.lower:,} lower, {found.unscored:,} unscored by one of the two"
    ]
    if found.mean_ours is not None and found.mean_theirs is not None:
        lines.append(f"mean {found.mean_ours:.4g} against {found.mean_theirs:.4g}")
    if found.pairs:
        lines.append(
            f"of {found.pairs:,} pairs of attempts with different rewards, {found.turned:,} are ranked the other way"
        )
    return lines
