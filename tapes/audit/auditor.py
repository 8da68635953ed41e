"""The audit of a run's tapes: attrition, the cost of calls, the actions that earned the reward, and anomalies.

The audit reads all records in order in one pass. Ended tapes are only added to sums. The audit keeps a few numbers for
each group, and for each call the versions that sampled it. Its memory therefore grows with the number of open tapes,
groups and calls, but not with the number of tokens.
The rules are:

1. Sums over rewards include only ended tapes. The cost of calls also includes open tapes.
2. A call and its prompt are counted for the version in use when the call began. Its completion tokens are divided among
   the versions that sampled them. Its seconds and dollars are divided in the same proportion.
3. Unknown values are counted separately, not in sums: unscored tapes, calls without a cost or a time, rewards that
   are NaN or infinite. A tape on which a reward source failed, or that the environment, the model or the machine
   ended, is unscored, and its other components count as metrics.
4. The rewards in a layer (a later scoring) are listed separately and have no share of the total.

The audit doesn't decide whether an anomaly is a fault. A person decides this by looking at the tapes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import Field

from ..common.stats import DOWN, total
from ..errors import NotATape, remedy
from ..records import Use
from ..store.books import Books, BooksFold, Lost, bucket
from ..store.summary import CallFacts, EndFacts, Facts, RewardFacts, StepFacts, Summary, TapeFold, read_facts
from ..value import Value
from .anomalies import Anomalies, Anomaly, Component
from .verdict_files import Checks

if TYPE_CHECKING:
    from pydantic import JsonValue

    from ..common.progress import Progress
    from ..store.store import Store

EXAMPLES = 5
"""Maximum number of tapes that each line of the audit names."""
INHERITED = "(before the fork)"
"""The kind under which the audit lists actions that a fork inherited from its parent."""


class Ended(Lost, frozen=False):
    """Episodes that ended with the same status and cause, with sums that only an audit needs. In contrast to the books,
    `sampled` includes authored completions that have token ids."""

    unscored: int = 0
    """Number of these episodes that have no reward."""
    seconds: float = 0.0
    """Sum of the seconds in the episodes' `end` records."""
    tokens: dict[str, int] = Field(default={})
    """Number of episodes by their number of completion tokens (`0`, `1`, `2-3`, `4-7`, ...)."""
    tapes: tuple[str, ...] = ()
    """Ids of some of these episodes."""


class Spent(Value, frozen=False):
    """The cost of calls from one agent path to one engine, sampled by one policy version."""

    by: str
    """The path of the agent."""
    engine: str
    """The engine's name, or an empty string if the calls don't name an engine."""
    version: str | None
    """The policy version, or None for calls that name no version."""
    calls: int = 0
    prompt: int | None = None
    """Number of prompt tokens, or None if no call has a known number."""
    completion: int | None = None
    """Number of completion tokens, or None if no call has a known number."""
    uncounted: int = 0
    """Number of calls with an unknown number of prompt or completion tokens."""
    seconds: float | None = None
    """Seconds of all tries together, or None if no call was timed."""
    untimed: int = 0
    cost: float | None = None
    """Cost in US dollars, or None if no call has a known cost."""
    unpriced: int = 0


class Earned(Value):
    """What actions of one kind earned from one component."""

    name: str
    kind: str | None
    """The action's kind, or None for rewards of the episode as a whole."""
    scores: int
    mean: float
    """Mean of weight * value."""
    total: float
    share: float | None
    """|total| divided by the sum of |total| over the component's kinds, or None if that sum is 0."""
    tapes: tuple[str, ...]
    """Some of the tapes that earned most."""


class Audit(Value):
    """The audit of a run's tapes."""

    tapes: int
    """Number of tapes that began."""
    open: int
    unscored: int
    """Number of tapes that ended without a reward."""
    ends: tuple[Ended, ...]
    spent: tuple[Spent, ...]
    components: tuple[Component, ...]
    earned: tuple[Earned, ...]
    anomalies: tuple[Anomaly, ...]

    def lost_by(self, length: str) -> dict[str, tuple[int, int]]:
        """Return (ended episodes, episodes that are never trained on) per bucket. `length` is `turns` or `tokens`."""
        found: dict[str, tuple[int, int]] = {}
        for end in self.ends:
            for name, n in getattr(end, length).items():
                ended, lost = found.get(name, (0, 0))
                found[name] = ended + n, lost + (0 if end.trainable else n)
        return dict(sorted(found.items(), key=lambda item: int(item[0].partition("-")[0])))


class _Tape(TapeFold):
    """A tape that has not ended, with its actions and rewards."""

    __slots__ = ("kinds", "last", "repeats", "rewards")

    def __init__(self, begun: Summary, inherited: int) -> None:
        super().__init__(begun)
        self.kinds: list[str] = [INHERITED] * inherited
        """The kind of every step."""
        self.last: dict[str, tuple[str, JsonValue, int]] = {}
        """The kind and content of each path's last action, and how often in a row the path repeated it."""
        self.repeats: tuple[int, str] = 0, ""
        """Length of the longest run of equal actions, and the kind of these actions."""
        self.rewards: list[RewardFacts] = []

    def act(self, step: StepFacts) -> None:
        """Compare an action with the path's previous action."""
        content = step.content
        before = self.last.get(step.by)
        same = before is not None and before[:2] == (step.kind, content)
        times = before[2] + 1 if before is not None and same else 1
        self.last[step.by] = step.kind, content, times
        self.repeats = max(self.repeats, (times, step.kind))

    def kind(self, step: int | None) -> str | None:
        if step is None:
            return None
        return self.kinds[step] if 0 <= step < len(self.kinds) else "(missing step)"


@dataclass(slots=True)
class _Earnings:
    """What actions of one kind earned from one component so far."""

    scores: int = 0
    total: float = 0.0
    """Sum of weight * value, scaled by `DOWN`."""
    most: list[tuple[float, str]] = field(default_factory=list)
    """(reward, tape) pairs for the tapes that earned most, in descending order."""

    def add(self, tape: str, earned: float) -> None:
        self.scores += 1
        self.total += DOWN * earned
        if len(self.most) < EXAMPLES or earned > self.most[-1][0]:
            best = max([earned, *(old for old, at in self.most if at == tape)])
            others = [(old, at) for old, at in self.most if at != tape]
            self.most = sorted([*others, (best, tape)], key=lambda pair: -pair[0])[:EXAMPLES]


class AuditFold:
    """Computes an audit. Pass every record of a run to `take`, in order, and then call `audit()`."""

    def __init__(
        self,
        *,
        only: Container[str] | None = None,
        repeats: int = 3,
        inherited: Callable[[str], int] | None = None,
        replayed: Mapping[str, str] | None = None,
    ) -> None:
        """`only` holds the ids of the tapes to count. None means all tapes.

        A tape is reported if it has at least `repeats` equal actions in a row. `inherited` takes the id of a fork and
        returns how many steps the fork has from its parent. A run with forks needs this function. For `replayed`,
        see `Anomalies`.
        """
        self._only, self._inherited = only, inherited
        self._open: dict[str, _Tape] = {}
        self._tapes = self._unscored = 0
        self._ends: dict[tuple[str, str | None], Ended] = {}
        self._spent: dict[tuple[str, str, str | None], Spent] = {}
        self._components: dict[tuple[bool, str, str, bool], Component] = {}
        self._earned: dict[tuple[str, str | None], _Earnings] = {}
        self._odd = Anomalies(EXAMPLES, repeats, replayed)

    def take(self, name: str, facts: Facts | None) -> None:
        """Add the facts of one record. `name` is the id of the record's tape."""
        if isinstance(facts, Use):
            self._odd.update(facts, self._only)
        elif self._only is not None and name not in self._only:
            return
        elif isinstance(facts, Summary):
            self._begin(facts)
        elif isinstance(facts, RewardFacts) and (facts.layer is not None or name not in self._open):
            self._component(facts, facts.layer or "")
        elif (tape := self._open.get(name)) is not None and facts is not None:
            self._add_to(tape, facts)
        # The remaining records come after the end of their tape, or their tape never began. The books report both.

    def _begin(self, begun: Summary) -> None:
        self._tapes += 1
        steps = 0
        if begun.parent is not None:
            if self._inherited is None:
                raise NotATape(f"tape {begun.id} is a fork: construct AuditFold with `inherited`")
            steps = self._inherited(begun.id)
        self._open[begun.id] = _Tape(begun, steps)
        self._odd.begun(begun)

    def _add_to(self, tape: _Tape, facts: Facts) -> None:
        tape.add(facts)
        if isinstance(facts, StepFacts):
            tape.kinds.append(facts.kind)
            if facts.role == "action":
                tape.act(facts)
        elif isinstance(facts, CallFacts):
            self._call(tape, facts)
        elif isinstance(facts, RewardFacts):
            tape.rewards.append(facts._replace(kind=tape.kind(facts.step)))
        elif isinstance(facts, EndFacts):
            self._end(self._open.pop(tape.begun.id), facts)

    def _end(self, tape: _Tape, end: EndFacts) -> None:
        made = Ended(status=end.status, cause=end.cause, trainable=tape.trainable)
        of = self._ends.setdefault((end.status, end.cause), made)
        unscored = tape.reward is None
        lost = tape.failed or not tape.trainable
        rewards = [one._replace(weight=0.0) if lost and math.isfinite(one.value) else one for one in tape.rewards]
        self._unscored += unscored
        of.episodes += 1
        of.unscored += unscored
        of.sampled += tape.sampled
        of.seconds += end.seconds
        for lengths, n in ((of.turns, tape.actions), (of.tokens, tape.sampled)):
            lengths[bucket(n)] = lengths.get(bucket(n), 0) + 1
        if len(of.tapes) < EXAMPLES:
            of.tapes += (tape.begun.id,)
        for one in rewards:
            self._component(one, None)
            if one.weight and math.isfinite(one.value):
                earned = self._earned.setdefault((one.name, one.kind), _Earnings())
                earned.add(tape.begun.id, one.weight * one.value)
        self._odd.ended(tape, tape.repeats, rewards)

    def _call(self, tape: _Tape, call: CallFacts) -> None:
        n, prompt = call.completion_tokens, call.prompt_tokens
        seconds = total(one["seconds"] for one in call.attempts) if call.attempts else None
        spans: Sequence[tuple[str | None, int, int]] = call.spans or [(None, 0, n or 0)]
        whole = sum(end - start for _, start, end in call.spans)
        for k, (version, start, end) in enumerate(spans):
            # An answer without tokens gives no proportion to divide by, so its spans share its cost equally.
            part = (end - start) / whole if whole else 1 / len(spans)
            self._spend(
                (call.by, call.engine or "", version),
                k == 0,
                prompt=0 if k and prompt is not None else prompt,
                completion=None if n is None else end - start,
                seconds=_part(seconds, part),
                cost=_part(call.usage.get("cost"), part),
            )
        self._odd.call(tape.begun.id, call)

    def _spend(self, key: tuple[str, str, str | None], first: bool, **amounts: float | None) -> None:
        by, engine, version = key
        of = self._spent.setdefault(key, Spent(by=by, engine=engine, version=version))
        if first:
            of.calls += 1
            of.uncounted += amounts["prompt"] is None or amounts["completion"] is None
            of.untimed += amounts["seconds"] is None
            of.unpriced += amounts["cost"] is None
        for name, value in amounts.items():
            if value is not None:
                setattr(of, name, (getattr(of, name) or 0) + value)

    def _component(self, one: RewardFacts, layer: str | None) -> None:
        made = Component(name=one.name, layer=layer, metric=not one.weight)
        self._components.setdefault((layer is not None, layer or "", one.name, made.metric), made).add(one)

    # The result

    def audit(self) -> Audit:
        """Return the audit of the records so far."""
        whole = total(abs(one.total) for one in self._components.values() if one.layer is None)
        components = tuple(one.sealed(whole) for _, one in sorted(self._components.items()))
        ends = sorted(self._ends.values(), key=lambda one: (one.status, one.cause or ""))
        return Audit(
            tapes=self._tapes,
            open=len(self._open),
            unscored=self._unscored,
            ends=tuple(one.model_copy(deep=True) for one in ends),
            spent=tuple(one.model_copy() for one in self._spent.values()),
            components=components,
            earned=self._all_earned(),
            anomalies=self._odd.found(components),
        )

    def _all_earned(self) -> tuple[Earned, ...]:
        whole: dict[str, float] = {}
        for (name, _), of in self._earned.items():
            whole[name] = whole.get(name, 0.0) + abs(of.total)
        return tuple(
            Earned(
                name=name,
                kind=kind,
                scores=of.scores,
                mean=of.total / of.scores / DOWN,
                total=of.total / DOWN,
                share=abs(of.total) / whole[name] if whole[name] else None,
                tapes=tuple(tape for _, tape in of.most),
            )
            for (name, kind), of in sorted(self._earned.items(), key=lambda item: (item[0][0], item[0][1] or ""))
        )


def _part(value: float | None, part: float) -> float | None:
    return None if value is None else value * part


_EVERY = 2_000
"""Number of records between two reports of progress."""


def audit_run(
    store: Store,
    *,
    split: str | None = None,
    limit: int | None = None,
    repeats: int = 3,
    progress: Progress | None = None,
) -> tuple[Books, Audit]:
    """Return the books of the whole run and the audit of its tapes. Every record is read once.

    If `split` is given, only the tapes in this split are audited. If `limit` is given, only the newest `limit` of these
    tapes are audited, together with all other tapes in their groups. Comparisons within a group need the whole group.
    """
    store.refresh()
    only = None if split is None and limit is None else _chosen(store, split, limit)
    books = BooksFold()
    fold = AuditFold(
        only=only,
        repeats=repeats,
        inherited=lambda tape: store.tape(tape, refresh=False).inherited,
        replayed=_replayed(store.path),
    )
    records = sum(segment.n for segment in store.index.segments())
    done = 0
    for done, stored in enumerate(store.records(), start=1):
        try:
            facts = read_facts(stored.t, stored.body)
            books.take(stored.t, stored.tape, facts)
            fold.take(stored.tape or "", facts)
        except (ValueError, TypeError, AttributeError, LookupError) as error:
            raise NotATape(
                f"a {stored.t} of tape {stored.tape} can't be audited: {error}; "
                f"{remedy('verify', '`verify(run)`')} lists all that can't be read"
            ) from error
        if progress is not None and done % _EVERY == 0:
            progress("audit", done, max(done, records), "records")
    if progress is not None and done >= _EVERY:
        progress("audit", done, done, "records")
    return books.books(), fold.audit()


def _replayed(run: Path) -> dict[str, str]:
    """Return what `replay model` last found with the run's own weights, by tape: `diverged`, or `rounded` if the tape
    was verified in bfloat16."""
    checks = Checks(run)
    found = dict[str, str]()
    for tape in checks.refresh():
        own = [verdict for check, verdict in checks.of(tape) if check.verb == "requery" and "model" not in check.given]
        if own and own[0].outcome == "diverged":
            found[tape] = "diverged"
        elif own and own[0].outcome == "verified" and (own[0].precision or "float32") != "float32":
            found[tape] = "rounded"
    return found


def _chosen(store: Store, split: str | None, limit: int | None) -> frozenset[str]:
    fitting = store.summaries(split=split)
    newest = fitting if limit is None else fitting[-limit:]
    groups = {summary.group for summary in newest} - {None}
    return frozenset(summary.id for summary in [*newest, *(s for s in fitting if s.group in groups)])
