"""`tapereel scores`: report reward and pass@k of recorded episodes with intervals, and the difference from another run.

It only reads tapes, and runs no episodes.
"""

from __future__ import annotations

import argparse

from ...agents.runs.runner import RunScores, score_run
from ...tapes.common.text import counted
from ..console import Exit, answer
from ..score_lines import read_k, score_lines

EXAMPLE = """
tapereel scores runs/digits-passk --k 1,4,16
tapereel scores runs/digits --split eval-after-sampled --against runs/digits --against-split eval-before-sampled
"""


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the verb's arguments."""
    parser.add_argument("run", help="a run directory")
    parser.add_argument("--split", help="only tapes of this split")
    parser.add_argument(
        "--k", metavar="K,K", help="pass@k for these (default: powers of two up to the number of attempts)"
    )
    parser.add_argument(
        "--success", type=float, default=1.0, help="smallest reward that counts as a success (default 1)"
    )
    parser.add_argument(
        "--by", metavar="KEY", help="report by label too: the value under KEY in each task's public part"
    )
    parser.add_argument("--layer", help="the rewards of this later scoring (replay rewards --layer)")
    parser.add_argument("--against", metavar="RUN", help="another run: print the difference, paired by task")
    parser.add_argument(
        "--against-split",
        metavar="SPLIT",
        help="only the other run's tapes of this split (default: the same as --split)",
    )


def run(args: argparse.Namespace) -> int:
    """Evaluate, and print the scores."""
    found = score_run(
        args.run,
        args.split,
        k=read_k(args.k) if args.k else (),
        success=args.success,
        by=args.by,
        against=args.against,
        against_split=args.against_split,
        layer=args.layer,
    )
    answer(args, found, *_score_lines(found))
    return Exit.HOLDS


def _score_lines(found: RunScores) -> list[str]:
    scores, split = found.scores, "" if found.split is None else f", split {found.split}"
    lines = [
        f"{found.run}{split}: {counted(scores.tasks, 'task')}, {counted(scores.attempts, 'attempt')}",
        *score_lines(scores),
    ]
    if found.against is None or found.against_scores is None or found.difference is None:
        return lines
    lines += [f"{found.against}:", *score_lines(found.against_scores, "  ")]
    difference = found.difference
    lines.append(
        f"Difference on the {difference.reward.tasks:,} tasks that both scored ({difference.only_first:,} more only "
        f"in the first, {difference.only_second:,} only in the second):"
    )
    lines.append(f"  reward {difference.reward.signed}")
    lines += [f"  pass@{k} {part.signed}" for k, part in difference.pass_at.items() if part is not None]
    return lines
