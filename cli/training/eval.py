"""`tapereel eval`: what recorded episodes say of a policy, with intervals; and whether another one's say otherwise.

It reads tapes and rolls nothing out.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from pydantic import BaseModel, ConfigDict

from ...agents.runs.pass_at_k import Comparison, Interval, Rewards, Scores, compare, evaluate_rewards
from ...agents.runs.runner import rewards_of, scores_of
from ...finetune.report.plots import plot_curve
from ...tapes.common.text import safe
from ...tapes.errors import UsageError
from ...tapes.store.store import Store
from ...tapes.view.curves import Curve
from ..console import Exit, answer, check_target
from ..rollout.run import read_k, score_lines

EXAMPLE = """
tapereel eval runs/digits-passk --k 1,4,16 --plot runs/digits-passk/passk.png
tapereel eval runs/digits --split eval-after-sampled --against runs/digits --against-split eval-before-sampled
"""


class Evaluated(BaseModel):
    """What the verb answers."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    run: str
    split: str | None
    """None: all splits."""
    scores: Scores
    against: str | None = None
    against_scores: Scores | None = None
    difference: Comparison | None = None
    """`run` less `against`, paired by task; None without another run."""


def configure(parser: argparse.ArgumentParser) -> None:
    """The arguments of the verb."""
    parser.add_argument("run", help="a run directory")
    parser.add_argument("--split", help="only the tapes of this split")
    parser.add_argument("--k", metavar="K,K", help="pass@k for these (the powers of two that there are attempts for)")
    parser.add_argument("--success", type=float, default=1.0, help="the least reward of a success (1)")
    parser.add_argument("--by", metavar="KEY", help="by label as well: the value under KEY in each task's public part")
    parser.add_argument("--against", metavar="RUN", help="another run: the difference, paired by task")
    parser.add_argument("--against-split", metavar="SPLIT", help="only its tapes of this split (that of --split)")
    parser.add_argument("--plot", metavar="FILE", help="draw pass@k over k, as PNG")


def run(args: argparse.Namespace) -> int:
    """Read, and print what it comes to."""
    check_target("--plot", args.plot)
    with ExitStack() as open_stores:
        store = open_stores.enter_context(Store.open(args.run))
        rewards = _rewards(store, args.run, args.split)
        other: Rewards | None = None
        if args.against is not None:
            beside = open_stores.enter_context(Store.open(args.against)) if args.against != args.run else store
            other = _rewards(beside, args.against, args.against_split or args.split)
        k = read_k(args.k) if args.k else _powers(rewards, other)
        found = _evaluated(args, k, rewards, scores_of(store, args.split, k=k, success=args.success, by=args.by), other)
    if args.plot is not None:
        beside = {} if other is None else {f"{args.against} {args.against_split or ''}".strip(): other}
        draw_pass_at_k(args.plot, {args.run: rewards, **beside}, success=args.success)
    answer(args, found, *_lines(found))
    return Exit.HOLDS


def _evaluated(
    args: argparse.Namespace, k: Sequence[int], rewards: Rewards, scores: Scores, other: Rewards | None
) -> Evaluated:
    found = Evaluated(run=args.run, split=args.split, scores=scores)
    if other is None:
        return found
    against = evaluate_rewards(other, k=k, success=args.success)
    return found.model_copy(
        update={
            "against": args.against,
            "against_scores": against,
            "difference": compare(rewards, other, k=k, success=args.success),
        }
    )


def draw_pass_at_k(path: str | Path, evaluations: dict[str, Rewards], *, success: float = 1.0) -> None:
    """pass@k over every k that all tasks have attempts for, with its interval, as a PNG; a curve for each evaluation.

    UsageError where no task was scored.
    """
    curves: list[Curve] = []
    for name, rewards in evaluations.items():
        least = min((n for own in rewards.values() if (n := sum(r is not None for r in own))), default=0)
        if not least:
            raise UsageError(f"nothing of {name} is scored: there is no pass@k to draw")
        found = evaluate_rewards(rewards, k=range(1, least + 1), success=success).pass_at
        points = {k: interval for k, interval in found.items() if interval is not None}
        ends = [
            [end for interval in points.values() if (end := getattr(interval, side)) is not None]
            for side in ("low", "high")
        ]
        curves.append(
            Curve(
                name="pass@k" if len(evaluations) == 1 else name,
                x=tuple(map(float, points)),
                y=tuple(interval.value for interval in points.values()),
                band=(tuple(ends[0]), tuple(ends[1])),
            )
        )
    plot_curve(path, curves, title="Chance that one of k attempts succeeds", xlabel="k", ylabel="pass@k")


def _rewards(store: Store, name: str, split: str | None) -> Rewards:
    rewards = rewards_of(store, split)
    if not rewards:
        there = ", ".join(sorted({s.split for s in store.summaries()})) or "none"
        of = "" if split is None else f" of split {split!r}"
        raise UsageError(f"{name} has no closed tape{of}; its splits: {there}")
    return rewards


def _powers(*evaluations: Rewards | None) -> tuple[int, ...]:
    """1, 2, 4 ... as far as some task of each has so many scored attempts."""
    most = min(max(sum(r is not None for r in own) for own in rewards.values()) for rewards in evaluations if rewards)
    return tuple(2**i for i in range(most.bit_length()))


def _lines(found: Evaluated) -> list[str]:
    split = "" if found.split is None else f", split {found.split}"
    lines = [
        safe(f"{found.run}{split}: {found.scores.tasks:,} tasks, {found.scores.attempts:,} attempts"),
        *score_lines(found.scores),
    ]
    if found.against is None or found.against_scores is None or found.difference is None:
        return lines
    lines += [safe(f"{found.against}:"), *score_lines(found.against_scores, "  ")]
    difference = found.difference
    lines.append(
        f"Difference on the {difference.reward.tasks:,} tasks that both scored ({difference.only_first:,} and "
        f"{difference.only_second:,} more are in one alone):"
    )
    lines.append(f"  reward {_signed(difference.reward)}")
    lines += [f"  pass@{k} {_signed(part)}" for k, part in difference.pass_at.items() if part is not None]
    return lines


def _signed(interval: Interval) -> str:
    if interval.low is None or interval.high is None:
        return f"{interval.value:+.3f}"
    said = "" if interval.low <= 0 <= interval.high else "  (does not span 0)"
    return f"{interval.value:+.3f} [{interval.low:+.3f}, {interval.high:+.3f}]{said}"
