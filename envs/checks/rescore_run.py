"""Rescoring of a whole run: reward code runs again over its tapes, is compared, or is added as a layer."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ...tapes.audit.checking import check_run, chosen_tapes
from ...tapes.audit.verdict import Failure, Verdict, Verdicts
from ...tapes.common.progress import Progress, silent
from ...tapes.errors import UsageError
from ...tapes.store.summary import GROUP_LAYER
from ...tapes.value import Value
from ..rewards.reward_names import load_reward
from .rescore import Disagreement, Opinion, disagreement, opinion, rescore

if TYPE_CHECKING:
    from ...tapes.store.store import Store
    from ...tapes.tape import Tape


class Added(Value):
    """What `add_reward_layer` wrote."""

    verdicts: Verdicts
    """On the tapes that had the layer already, and on those whose reward failed."""
    scored: int
    """Tapes that the reward code read."""
    tapes: int
    """Tapes that got records of the layer."""
    records: int


class FailureKind(Value):
    """Failures of one reward source at one line."""

    source: str
    where: str | None
    """`file:line in function`; None where no line is known."""
    tapes: int
    tape: str
    """The first tape of that kind."""
    first: str
    """What the first failure says."""


def rescore_run(
    run: str | Path,
    reward: str,
    *,
    tolerance: float = 0.0,
    tapes: Sequence[str] = (),
    split: str | None = None,
    jobs: int | None = None,
    progress: Progress = silent,
) -> Verdicts:
    """Score the named tapes of a run again, or all closed tapes of a split, and compare with the recorded rewards.

    reward: `module:name` of a Rewards, a RewardSource or a function from a tape to its score. tolerance: the largest
    difference that counts as equal.
    """
    load_reward(reward)  # a wrong name is refused here, before any process starts
    plan = RescorePlan(reward, tolerance)
    return check_run(run, "rescore", plan, tapes=tapes, split=split, jobs=jobs, progress=progress)


def add_reward_layer(
    run: str | Path,
    reward: str,
    layer: str,
    *,
    tolerance: float = 0.0,
    tapes: Sequence[str] = (),
    split: str | None = None,
    progress: Progress = silent,
) -> Added:
    """Write the scores of `reward` as `layer` to the tapes that lack the layer, and compare it on the others.

    It runs in one process, since a store has one writer. A tape whose reward fails gets no records. UsageError for the
    layer that training writes.
    """
    from ...tapes.store.store import Store

    if layer == GROUP_LAYER:
        raise UsageError(f"training writes the layer {GROUP_LAYER!r}; choose another name for the new layer")
    rewards, started = load_reward(reward), time.perf_counter()
    verdicts: list[Verdict] = []
    records = changed = 0
    with Store.open(run, write=True) as store:
        names = chosen_tapes(store, tapes, split)
        for k, name in enumerate(names):
            tape = store.tape(name, refresh=False)
            verdict, fresh = asyncio.run(rescore(tape, rewards, layer=layer, tolerance=tolerance))
            for record in fresh:
                store.append_layer(record)
            records, changed = records + len(fresh), changed + bool(fresh)
            # A tape that only got new records had nothing to compare, so it has no verdict.
            if verdict.checked.get("rewards") or verdict.outcome == "diverged" or not fresh:
                verdicts.append(verdict.of(tape))
            progress("rescore", k + 1, len(names), f"{records:,} added")
        store.writer.sync()
    found = Verdicts(
        verb="rescore", run=str(run), verdicts=tuple(verdicts), seconds=round(time.perf_counter() - started, 3)
    )
    return Added(verdicts=found, scored=len(names), tapes=changed, records=records)


def compare_rewards(
    run: str | Path, reward: str, against: str, *, tapes: Sequence[str] = (), split: str | None = None
) -> tuple[Disagreement, list[FailureKind]]:
    """(how two reward functions disagree on a run's tapes, the failures of either). Nothing is written."""
    from ...tapes.store.store import Store

    ours, theirs = load_reward(reward), load_reward(against)

    async def opinions(store: Store) -> list[Opinion]:
        names = chosen_tapes(store, tapes, split)
        return [await opinion(store.tape(name, refresh=False), ours, theirs) for name in names]

    with Store.open(run) as store:
        found = asyncio.run(opinions(store))
    return disagreement(found), failure_kinds((one.tape, one.failures) for one in found)


def failure_kinds(failures: Iterable[tuple[str, Iterable[Failure]]]) -> list[FailureKind]:
    """Failures counted by source and line, the most frequent first. failures: (tape, what failed on it)."""
    kinds: dict[tuple[str, str | None], FailureKind] = {}
    for tape, found in failures:
        for failure in found:
            key = (failure.source, failure.where)
            first = FailureKind(source=key[0], where=key[1], tapes=0, tape=tape, first=failure.error)
            kind = kinds.get(key, first)
            kinds[key] = kind.model_copy(update={"tapes": kind.tapes + 1})
    return sorted(kinds.values(), key=lambda kind: -kind.tapes)


@dataclass(frozen=True)
class RescorePlan:
    """What a worker process needs to score tapes again. It is pickled, so it holds names and no objects."""

    reward: str
    tolerance: float

    def __call__(self, store: Store) -> Callable[[Tape], Verdict]:
        rewards = load_reward(self.reward)

        def check(tape: Tape) -> Verdict:
            verdict, _ = asyncio.run(rescore(tape, rewards, tolerance=self.tolerance))
            return verdict

        return check
