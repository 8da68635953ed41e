"""Rescoring: runs reward code again over recorded tapes, without an agent, environment or model.

Each component is compared with the recorded component of the same name. A component that isn't on the tape is new and
can be added as a layer. Two reward functions can also be compared with each other. A source that needs more than the
tape (`pure=False`) can't be verified.
"""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from itertools import combinations
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...tapes import Tape
from ...tapes.audit.checking import check_run, chosen_tapes
from ...tapes.audit.verdict import (
    Divergence,
    Failure,
    Likely,
    Verdict,
    Verdicts,
    diverged,
    unverifiable,
    verified,
)
from ...tapes.common.progress import Progress, silent
from ...tapes.common.run_async import run_async
from ...tapes.common.stats import mean_of, total
from ...tapes.errors import UsageError
from ...tapes.records import Reward, total_reward
from ...tapes.store.summary import GROUP_LAYER
from ...tapes.value import Value
from ..rewards import Rewards, RewardSource
from ..rewards.named_rewards import RewardLike, load_reward
from ..rewards.sources import as_recorded

if TYPE_CHECKING:
    from ...tapes.store.store import Store


async def rescore(
    tape: Tape, rewards: Rewards[Tape], *, layer: str | None = None, tolerance: float = 0.0
) -> tuple[Verdict, list[Reward]]:
    """Return the verdict on the recorded components, and new records for the components without a record.

    The sources must reproduce each of their recorded components. Components from other sources are not compared. If a
    source fails, no new records are returned, because a sum without this source would be a different reward. With
    `layer`, the records of the later scoring of that name are compared, and the new records belong to it. Without
    `layer`, the rewards from the episode itself are compared.
    """
    if not tape.closed:
        return unverifiable("rescore", tape.id, "the tape has no end yet"), []
    if layer is None:  # another source's name, if the environment has a component of this name
        names = as_recorded([s.name for s in rewards.sources], {r.name for r in tape.rewards})
        rewards = Rewards([replace(source, name=name) for source, name in zip(rewards.sources, names, strict=True)])
    now = await rewards.score(tape, layer=layer)
    own = tape.rewards if layer is None else [r for r in tape.layers if isinstance(r, Reward) and r.layer == layer]
    then, computed = _by_name(own), _by_name(now)
    failed = {record.name: record for record in now if math.isnan(record.value)}
    fresh = [] if failed else [r for r in now if r.name not in then]
    sides, skipped, notes = _sides(then, computed, failed, rewards)
    found = [_difference(tape, *pair, tolerance) for side in sides for pair in _pairs(*side)]
    notes += (_uncompared(tape, name, layer) for name in dict.fromkeys(r.name for r in fresh))
    failures = tuple(map(_failure, failed.values()))
    more: dict[str, Any] = {
        "checked": {"rewards": 0 if failed else found.count(None)},
        "not_checked": tuple(notes),
        "failures": failures,
    }
    if (first := next(filter(None, found), None)) is not None:
        return diverged("rescore", first, **more), fresh
    if failures:
        return unverifiable("rescore", tape.id, "; ".join(f.error for f in failures), **more), fresh
    if skipped:
        reason = f"{', '.join(sorted(skipped))} needs more than the tape (pure=False) and can't be recomputed from it"
        return unverifiable("rescore", tape.id, reason, **more), fresh
    if not sides:
        return unverifiable("rescore", tape.id, _nothing(then, computed, layer), **more), fresh
    return verified("rescore", tape.id, **more), fresh


Scores = dict[int | None, Reward]
"""The records of one component, by the index of the step. The key None stands for the episode as a whole."""


def _sides(
    then: dict[str, Scores], computed: dict[str, Scores], failed: dict[str, Reward], rewards: Rewards[Tape]
) -> tuple[list[tuple[Scores, Scores]], list[str], list[str]]:
    """Pair the recorded scores with the computed scores. Components with a recorded failure come first.

    Return the pairs, the names of components that can't be recomputed, and a note on each other component that is not
    compared.
    """
    sides: list[tuple[Scores, Scores]] = []
    skipped: list[str] = []
    notes: list[str] = []
    for name in sorted(then, key=lambda name: not any(math.isnan(r.value) for r in then[name].values())):
        source = _source(name, rewards.sources)
        if source is None:
            notes.append(f"reward component {name!r}: its source did not run")
        elif not source.pure:
            skipped.append(name)
        elif source.name in failed:
            sides.append((then[name], {None: failed[source.name]}))
        elif failed:
            # After a failure, `Rewards.score` records every component with weight 0, so no value can be compared.
            notes.append(f"reward component {name!r}: another source failed")
        else:
            sides.append((then[name], computed.get(name, {})))
    return sides, skipped, notes


def _source(component: str, sources: Iterable[RewardSource[Any]]) -> RewardSource[Any] | None:
    """Return the source of a component. The component has the same name as its source (`judge`), or this name before a
    slash (`judge/style`)."""
    named = {source.name: source for source in sources}
    parts = component.split("/")
    return next((named[name] for k in range(len(parts), 0, -1) if (name := "/".join(parts[:k])) in named), None)


def _failure(record: Reward) -> Failure:
    found = record.evidence if isinstance(record.evidence, dict) else {}
    frame = found.get("frame")
    return Failure(source=record.name, error=str(found.get("failed")), where=frame if isinstance(frame, str) else None)


def _by_name(records: Iterable[Reward]) -> dict[str, Scores]:
    found: dict[str, Scores] = defaultdict(dict)
    for record in records:
        found[record.name][record.step] = record
    return dict(found)


def _pairs(then: Scores, now: Scores) -> list[tuple[Reward | None, Reward | None]]:
    """Pair the records of each step. If only one side scores single steps, pair the sums over all steps instead."""
    if now and set(then) != set(now) and ({None} in (set(then), set(now))):
        return [(_sum(then), _sum(now))]
    return [(then.get(step), now.get(step)) for step in dict.fromkeys([*then, *now])]


def _sum(parts: Scores) -> Reward:
    """Return one record with the sum of all contributions, at the step of the last record."""
    last = list(parts.values())[-1]
    return last.model_copy(update={"value": total(_worth(part) or 0.0 for part in parts.values()), "weight": 1.0})


def _uncompared(tape: Tape, name: str, layer: str | None) -> str:
    """Explain why a computed component can't be compared with a recorded one."""
    held = dict.fromkeys(r.layer for r in tape.layers if isinstance(r, Reward) and r.name == name and r.layer != layer)
    if held:
        return (
            f"reward component {name!r}: the tape doesn't have it, but layer {', '.join(map(repr, held))} does; "
            "name that layer to compare with it"
        )
    where = "the tape" if layer is None else f"layer {layer!r}"
    return f"reward component {name!r}: {where} doesn't have it, so there is nothing to compare"


def _nothing(then: Iterable[str], now: Iterable[str], layer: str | None) -> str:
    has, gives = ", ".join(sorted(then)) or "none", ", ".join(sorted(now)) or "none"
    where = "the tape" if layer is None else f"layer {layer!r}"
    return f"no component to compare: {where} has {has}; the sources give {gives}"


def _worth(record: Reward | None) -> float | None:
    """Return the contribution of a component to the reward. For a metric (weight 0), return its value."""
    return None if record is None else record.value * (record.weight or 1.0)


def _difference(tape: Tape, then: Reward | None, now: Reward | None, tolerance: float) -> Divergence | None:
    a, b = _worth(then), _worth(now)
    if a is not None and b is not None and (abs(a - b) <= tolerance or (a != a and b != b)):
        return None
    one = then if then is not None else now
    assert one is not None
    turn = tape.entries[one.step].turn if one.step is not None else None
    failure = _failure(now) if now is not None and b != b else None
    sentence = f"reward component {one.name!r} was {_number(a)} and is now {_number(b)}"
    return Divergence(
        tape=tape.id,
        turn=turn,
        step=one.step,
        field=f"reward.{one.name}",
        recorded=None if a != a else a,
        observed=None if b != b else b,
        cause=Likely.REWARD,
        where=failure.where if failure else None,
        sentence=f"{sentence}: {failure.error}" if failure else sentence,
    )


def _number(value: float | None) -> str:
    return "not scored" if value is None else "a failure" if value != value else f"{value:g}"


# Two reward functions


class Opinion(Value):
    """The scores that two reward functions give to one tape."""

    tape: str
    group: str | None
    ours: float | None
    """The first function's score, or None if the tape was not scored or a source failed."""
    theirs: float | None
    failures: tuple[Failure, ...] = ()
    """The failed sources of both functions. A function with a failed source has the score None."""


class Disagreement(Value):
    """How two reward functions disagree."""

    tapes: int
    equal: int
    higher: int
    """Number of tapes that the first function scores higher."""
    lower: int
    unscored: int
    """Number of tapes without a reward from one function or both."""
    failed: int
    """Number of unscored tapes on which a source of either function failed."""
    mean_ours: float | None
    """The mean over the tapes that both functions score."""
    mean_theirs: float | None
    pairs: int
    """Number of pairs of attempts in the same group, without the pairs that both functions score as equal."""
    turned: int
    """Number of pairs that the two functions order differently. In training, the sign of the advantage would be
    reversed."""
    furthest: tuple[Opinion, ...]
    """Up to 10 tapes on which the functions differ most."""


async def opinion(tape: Tape, ours: Rewards[Tape], theirs: Rewards[Tape]) -> Opinion:
    one, two = await ours.score(tape), await theirs.score(tape)
    return Opinion(
        tape=tape.id,
        group=tape.begin.group,
        ours=total_reward(one),
        theirs=total_reward(two),
        failures=tuple(_failure(r) for r in (*one, *two) if math.isnan(r.value)),
    )


def disagreement(opinions: Sequence[Opinion]) -> Disagreement:
    """Summarise the scores of two reward functions."""
    both = [(o, o.ours, o.theirs) for o in opinions if o.ours is not None and o.theirs is not None]
    groups: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for o, a, b in both:
        if o.group is not None:
            groups[o.group].append((a, b))
    pairs = [(x[0] - y[0], x[1] - y[1]) for group in groups.values() for x, y in combinations(group, 2)]
    n = len(both)
    furthest = sorted((row for row in both if row[1] != row[2]), key=lambda row: -abs(row[1] - row[2]))
    return Disagreement(
        tapes=len(opinions),
        equal=sum(a == b for _, a, b in both),
        higher=sum(a > b for _, a, b in both),
        lower=sum(a < b for _, a, b in both),
        unscored=len(opinions) - n,
        failed=sum(bool(o.failures) for o in opinions),
        mean_ours=mean_of([a for _, a, _ in both]),
        mean_theirs=mean_of([b for _, _, b in both]),
        pairs=sum(a != 0 or b != 0 for a, b in pairs),
        turned=sum(a * b < 0 for a, b in pairs),
        furthest=tuple(o for o, _, _ in furthest[:10]),
    )


# A whole run


class Added(Value):
    """What `add_reward_layer` wrote."""

    verdicts: Verdicts
    """Verdicts on the tapes that already had the layer, and on those for which the reward failed."""
    scored: int
    """Number of tapes that the reward code read."""
    tapes: int
    """Number of tapes that received records in the layer."""
    records: int


class FailureKind(Value):
    """Failures of one reward source at one line."""

    source: str
    where: str | None
    """The line as `file:line in function`, or None if no line is known."""
    tapes: int
    tape: str
    """The first tape with this failure."""
    first: str
    """The message of the first failure."""


def rescore_run(
    run: str | Path,
    reward: RewardLike,
    *,
    tolerance: float = 0.0,
    tapes: Sequence[str] = (),
    split: str | None = None,
    jobs: int | None = None,
    progress: Progress = silent,
) -> Verdicts:
    """Score tapes of a run again, and compare the scores with the recorded rewards.

    `tapes` names the tapes. If it is empty, all closed tapes in `split` are scored. `reward` is a Rewards, a
    RewardSource or a function that scores a tape, or the `module:name` of one. An object scores in this process, a name
    in `jobs` processes. `tolerance` is the largest difference that counts as equal.
    """
    load_reward(reward)  # a wrong name is refused here, before any process starts
    jobs = jobs if isinstance(reward, str) else 1
    plan = partial(_plan, reward, tolerance)
    return check_run(run, "rescore", plan, tapes=tapes, split=split, jobs=jobs, progress=progress)


def add_reward_layer(
    run: str | Path,
    reward: RewardLike,
    layer: str,
    *,
    tolerance: float = 0.0,
    tapes: Sequence[str] = (),
    split: str | None = None,
    progress: Progress = silent,
) -> Added:
    """Score the tapes with `reward`, and write the scores as `layer`. On tapes that already have this layer, the scores
    are only compared.

    This runs in one process, because a store has one writer. A tape for which the reward fails gets no records. Raises
    UsageError if `layer` is the one that training writes.
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
            verdict, fresh = run_async(rescore(tape, rewards, layer=layer, tolerance=tolerance))
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
    """Return how two reward functions disagree on the tapes of a run, and the failures of both. Nothing is written."""
    from ...tapes.store.store import Store

    ours, theirs = load_reward(reward), load_reward(against)

    async def opinions(store: Store) -> list[Opinion]:
        names = chosen_tapes(store, tapes, split)
        return [await opinion(store.tape(name, refresh=False), ours, theirs) for name in names]

    with Store.open(run) as store:
        found = run_async(opinions(store))
    return disagreement(found), failure_kinds((one.tape, one.failures) for one in found)


def failure_kinds(failures: Iterable[tuple[str, Iterable[Failure]]]) -> list[FailureKind]:
    """Count failures by source and line, the most frequent first. `failures` pairs each tape with its failures."""
    kinds: dict[tuple[str, str | None], FailureKind] = {}
    for tape, found in failures:
        for failure in found:
            key = (failure.source, failure.where)
            first = FailureKind(source=key[0], where=key[1], tapes=0, tape=tape, first=failure.error)
            kind = kinds.get(key, first)
            kinds[key] = kind.model_copy(update={"tapes": kind.tapes + 1})
    return sorted(kinds.values(), key=lambda kind: -kind.tapes)


def _plan(reward: RewardLike, tolerance: float, store: Store) -> Callable[[Tape], Verdict]:
    """Return the function that checks one tape. Each worker process makes its own."""
    rewards = load_reward(reward)
    return lambda tape: run_async(rescore(tape, rewards, tolerance=tolerance))[0]
