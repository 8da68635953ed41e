"""`tapereel rescore`: does reward code still give what is on the tapes, and what would another one have given?"""

from __future__ import annotations

import argparse
import asyncio
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ...envs.checks.rescore import disagreement, opinion, rescore
from ...envs.rewards.reward_names import load_reward
from ...tapes.audit.checking import chosen_tapes
from ...tapes.audit.verdict import Verdicts
from ...tapes.common.text import safe
from ...tapes.errors import UsageError
from ...tapes.store.attempts import GROUP_LAYER
from ..console import Exit, answer, table
from ..progress_bars import live_progress
from .verdict_output import add_tape_arguments, check_named, tell

if TYPE_CHECKING:
    from ...envs.checks.rescore import Disagreement, Opinion
    from ...envs.rewards import Rewards
    from ...tapes.audit.verdict import Failure, Verdict
    from ...tapes.store.store import Store
    from ...tapes.tape import Tape

EXAMPLE = """
tapereel rescore runs/digits --reward rewards.py:exact
tapereel rescore runs/digits --reward rewards.py:brief --layer brief
tapereel rescore runs/digits --reward rewards.py:exact --against rewards.py:lenient
"""

SHOWN = 5
"""Kinds of failure that are shown to people; `--json` has them all."""


def configure(parser: argparse.ArgumentParser) -> None:
    """The arguments of the verb."""
    add_tape_arguments(parser)
    parser.add_argument(
        "--reward",
        metavar="NAME",
        help="module:name of a Rewards, a RewardSource, or a function from a tape to its score",
    )
    parser.add_argument("--against", metavar="NAME", help="another one: show where the two disagree")
    parser.add_argument(
        "--layer", metavar="LAYER", help="compare with this later scoring; where a tape hasn't got it, add it"
    )
    parser.add_argument("--tolerance", type=float, default=0.0, metavar="X", help="difference that is none (default 0)")


def run(args: argparse.Namespace) -> int:
    """Score again, and print the verdicts, or the table of two."""
    if args.reward is None:
        raise UsageError(
            "which reward? give --reward module:name. What an environment's own code scored is checked by "
            "`tapereel reexec`"
        )
    if args.against is not None and args.layer is not None:
        raise UsageError("--against only compares two rewards, and --layer records one: give one of them")
    if args.layer == GROUP_LAYER:
        raise UsageError(f"layer {GROUP_LAYER!r} is what training adds to a tape's reward; give another name")
    rewards = load_reward(args.reward)
    if args.against is not None:
        return _set_against(args, rewards, load_reward(args.against))
    if args.layer is not None:
        return _with_layer(args, rewards)
    verdicts = check_named(args, "rescore", RescorePlan(args.reward, args.tolerance))
    return _tell(args, verdicts, len(verdicts.verdicts))


def _chosen(args: argparse.Namespace, store: Store) -> list[str]:
    return chosen_tapes(store, args.tape, args.split)


def _with_layer(args: argparse.Namespace, rewards: Rewards[Tape]) -> int:
    """Give the layer to the tapes that haven't got it, and compare what the others have. One process: it writes."""
    from ...tapes.store.store import Store

    started = time.perf_counter()
    verdicts: list[Verdict] = []
    added: Counter[str] = Counter()
    with Store.open(args.run, write=True) as store, live_progress() as progress:
        names = _chosen(args, store)
        for k, name in enumerate(names):
            tape = store.tape(name, refresh=False)
            verdict, fresh = asyncio.run(rescore(tape, rewards, layer=args.layer, tolerance=args.tolerance))
            for record in fresh:
                store.append_layer(record)
            added[name] += len(fresh)
            compared = verdict.checked.get("rewards") or verdict.outcome == "diverged"
            if compared or not fresh:
                verdicts.append(verdict.of(tape))
            progress("rescore", k + 1, len(names), f"{added.total():,} added")
        store.writer.sync()
    found = Verdicts(
        verb="rescore", run=str(args.run), verdicts=tuple(verdicts), seconds=round(time.perf_counter() - started, 3)
    )
    to = sum(n > 0 for n in added.values())
    return _tell(
        args,
        found,
        len(names),
        f"layer {args.layer!r}: {added.total():,} records added to {to:,} tapes",
        added=added.total(),
    )


def _tell(args: argparse.Namespace, verdicts: Verdicts, of: int, *more: str, added: int | None = None) -> int:
    """`of`: tapes that were scored. Adding where nothing was to be compared is what was asked for."""
    kinds = _kinds((v.tape, v.failures) for v in verdicts.verdicts)
    failed = sum(bool(v.failures) for v in verdicts.verdicts)
    code = tell(args, verdicts, *_told(kinds, failed, of), *more, data={"added": added, "failures": kinds})
    return Exit.HOLDS if added and not verdicts.verdicts else code


def _kinds(failures: Iterable[tuple[str, Iterable[Failure]]]) -> list[dict[str, Any]]:
    """What failed, by source and line: on how many tapes, and what the first of them had to say."""
    kinds: dict[tuple[str, str | None], dict[str, Any]] = {}
    for tape, found in failures:
        for failure in found:
            kind = kinds.setdefault(
                (failure.source, failure.where),
                {
                    "source": failure.source,
                    "where": failure.where,
                    "tapes": 0,
                    "tape": tape,
                    "first": failure.error,
                },
            )
            kind["tapes"] += 1
    return sorted(kinds.values(), key=lambda kind: -kind["tapes"])


def _told(kinds: Sequence[dict[str, Any]], failed: int, of: int) -> Iterator[str]:
    if failed:
        yield f"the reward failed on {failed:,} of {of:,} tapes, so these have no score by it"
    for kind in kinds[:SHOWN]:
        at = "" if kind["where"] is None else f", at {kind['where']}"
        yield safe(f"{kind['tapes']:,} times, first on {kind['tape']}: {kind['first']}{at}")
    if len(kinds) > SHOWN:
        yield f"and {len(kinds) - SHOWN:,} more kinds of failure: --json has them all"


def _set_against(args: argparse.Namespace, ours: Rewards[Tape], theirs: Rewards[Tape]) -> int:
    from ...tapes.store.store import Store

    async def both(store: Store) -> list[Opinion]:
        return [await opinion(store.tape(name, refresh=False), ours, theirs) for name in _chosen(args, store)]

    with Store.open(args.run) as store:
        opinions = asyncio.run(both(store))
    found = disagreement(opinions)
    kinds = _kinds((o.tape, o.failures) for o in opinions)
    shown = (_furthest(found),) if found.furthest else ()
    answer(
        args,
        {"run": str(args.run), "reward": args.reward, "against": args.against, **found.model_dump(), "failures": kinds},
        *shown,
        *_told(kinds, found.failed, found.tapes),
        *_lines(found),
    )
    return Exit.UNVERIFIABLE if found.failed or found.unscored == found.tapes else Exit.HOLDS


def _furthest(found: Disagreement) -> Any:
    made = table("tape", "group", "#reward", "#against", "#difference", fold=("group",))
    for o in found.furthest:
        if o.ours is not None and o.theirs is not None:
            made.add_row(o.tape, o.group or "", f"{o.ours:g}", f"{o.theirs:g}", f"{o.ours - o.theirs:+g}")
    return made


def _lines(found: Disagreement) -> list[str]:
    lines = [
        f"{found.tapes:,} tapes: {found.equal:,} equal, {found.higher:,} get more than by the other, "
        f"{found.lower:,} less, {found.unscored:,} unscored by one of them"
    ]
    if found.mean_ours is not None and found.mean_theirs is not None:
        lines.append(f"mean {found.mean_ours:.4g} against {found.mean_theirs:.4g}")
    if found.pairs:
        lines.append(
            f"of {found.pairs:,} pairs of attempts that one of them tells apart, {found.turned:,} "
            "are preferred the other way round"
        )
    return lines


@dataclass(frozen=True)
class RescorePlan:
    """What a process needs to know to score tapes again."""

    reward: str
    tolerance: float

    def __call__(self, store: Store) -> Callable[[Tape], Verdict]:
        rewards = load_reward(self.reward)

        def check(tape: Tape) -> Verdict:
            verdict, _ = asyncio.run(rescore(tape, rewards, tolerance=self.tolerance))
            return verdict

        return check
