"""`tapereel rescore`: does reward code still give what is on the tapes, and what would another one have given?"""

from __future__ import annotations

import argparse
import asyncio
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..tapes.attempts import GROUP_LAYER
from ..tapes.checking import add_tape_arguments, check_run, tell
from ..tapes.console import Exit, UsageError, answer, table
from .rescore import disagreement, opinion, rescore
from .rewards.named import load_reward

if TYPE_CHECKING:
    from ..tapes.records import Reward
    from ..tapes.store import Store
    from ..tapes.tape import Tape
    from ..tapes.verdict import Verdict
    from .rescore import Disagreement
    from .rewards import Rewards

EXAMPLE = """
tapereel rescore runs/digits --reward rewards.py:exact
tapereel rescore runs/digits --reward rewards.py:brief --layer brief
tapereel rescore runs/digits --reward rewards.py:exact --against rewards.py:lenient
"""


def configure(parser: argparse.ArgumentParser) -> None:
    """The arguments of the verb."""
    add_tape_arguments(parser)
    parser.add_argument("--reward", metavar="NAME", help="module:name of a Rewards, a RewardSource, or a function from "
                        "a tape to its score")  # fmt: skip
    parser.add_argument("--against", metavar="NAME", help="another one: show where the two disagree")
    parser.add_argument("--layer", metavar="LAYER", help="compare with this later scoring; where a tape hasn't got it, "
                        "add it")  # fmt: skip
    parser.add_argument("--tolerance", type=float, default=0.0, metavar="X", help="difference that is none (default 0)")


def run(args: argparse.Namespace) -> int:
    """Score again, and print the verdicts, or the table of two."""
    if args.reward is None:
        raise UsageError("which reward? give --reward module:name. What an environment's own code scored is checked by "
                         "`tapereel reexec`")  # fmt: skip
    if args.against is not None and args.layer is not None:
        raise UsageError("--against only compares two rewards, and --layer records one: give one of them")
    if args.layer == GROUP_LAYER:
        raise UsageError(f"layer {GROUP_LAYER!r} is what training adds to a tape's reward; give another name")
    rewards = load_reward(args.reward)
    if args.against is not None:
        return _set_against(args, rewards, load_reward(args.against))
    added, told = None, []
    if args.layer is not None:
        fresh = _add_layer(args, rewards)
        added, failed = len(fresh), [record for record in fresh if math.isnan(record.value)]
        told.append(f"layer {args.layer!r}: {added:,} records added")
        if failed:
            told.append(f"{len(failed):,} of them say that the reward failed, as on {failed[0].tape}: "
                        f"{failed[0].evidence}")  # fmt: skip
    verdicts = check_run(args, "rescore", RescorePlan(args.reward, args.layer, args.tolerance))
    return tell(args, verdicts, *told, data={"added": added})


def _chosen(args: argparse.Namespace, store: Store) -> list[str]:
    named = [store.tape(name).id for name in args.tape]
    return named or [summary.id for summary in store.summaries(split=args.split, closed=True)]


def _add_layer(args: argparse.Namespace, rewards: Rewards[Tape]) -> list[Reward]:
    """Give the layer to the tapes that haven't got it; gives the records."""
    from ..tapes.store import Store

    added: list[Reward] = []
    with Store.open(args.run, write=True) as store:
        for name in _chosen(args, store):
            _, fresh = asyncio.run(rescore(store.tape(name, refresh=False), rewards, layer=args.layer))
            for record in fresh:
                store.append_layer(record)
            added += fresh
        store.writer.sync()
    return added


def _set_against(args: argparse.Namespace, ours: Rewards[Tape], theirs: Rewards[Tape]) -> int:
    from ..tapes.store import Store

    async def both(store: Store) -> list[Any]:
        return [await opinion(store.tape(name, refresh=False), ours, theirs) for name in _chosen(args, store)]

    with Store.open(args.run) as store:
        found = disagreement(asyncio.run(both(store)))
    answer(args, {"run": str(args.run), "reward": args.reward, "against": args.against, **found.model_dump()},
           _furthest(found), *_lines(found))  # fmt: skip
    return Exit.HOLDS if found.tapes else Exit.UNVERIFIABLE


def _furthest(found: Disagreement) -> Any:
    made = table("tape", "group", "#reward", "#against", "#difference", fold=("group",))
    for o in found.furthest:
        if o.ours is not None and o.theirs is not None:
            made.add_row(o.tape, o.group or "", f"{o.ours:g}", f"{o.theirs:g}", f"{o.ours - o.theirs:+g}")
    return made


def _lines(found: Disagreement) -> list[str]:
    lines = [f"{found.tapes:,} tapes: {found.equal:,} equal, {found.higher:,} get more than by the other, "
             f"{found.lower:,} less, {found.unscored:,} unscored by one of them"]  # fmt: skip
    if found.mean_ours is not None and found.mean_theirs is not None:
        lines.append(f"mean {found.mean_ours:.4g} against {found.mean_theirs:.4g}")
    if found.pairs:
        lines.append(f"of {found.pairs:,} pairs of attempts that one of them tells apart, {found.turned:,} "
                     "are preferred the other way round")  # fmt: skip
    return lines


@dataclass(frozen=True)
class RescorePlan:
    """What a process needs to know to score tapes again."""

    reward: str
    layer: str | None
    tolerance: float

    def __call__(self, store: Store) -> Callable[[Tape], Verdict]:
        rewards = load_reward(self.reward)

        def check(tape: Tape) -> Verdict:
            verdict, _ = asyncio.run(rescore(tape, rewards, layer=self.layer, tolerance=self.tolerance))
            return verdict

        return check
