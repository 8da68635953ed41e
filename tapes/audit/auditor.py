"""The audit of a run's tapes: attrition, what calls cost, which actions earned the reward, and anomalies.

One pass over the records, in their order, feeds everything. Of a tape that ended only sums are kept, of a group a few
numbers, so memory grows with open tapes and groups, not with tapes or tokens. The rules:

1. Sums over rewards include ended tapes only; the cost of calls includes open tapes.
2. A call and its prompt count at the version under which it began. Its completion is divided among the versions that
   sampled it, its seconds and dollars in proportion.
3. Unknown values are counted apart and are in no sum: unscored tapes, calls without a cost or a time, rewards that are
   NaN or infinite. A tape on which a reward source failed is unscored: its other components count as metrics.
4. The rewards of a layer (a later scoring) are listed by themselves and have no share of the total.

The audit doesn't decide whether an anomaly is a fault: a person looks at the tapes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Container
from typing import TYPE_CHECKING, Any

from ..errors import NotATape
from ..records import IN_TAPE, CauseType, Status, trains, unscores
from ..store.books import bucket
from ..store.index import column_length
from ..store.segment import read_body
from ..value import Value
from .anomalies import Anomalies, Anomaly, Scored

if TYPE_CHECKING:
    from ..common.progress import Progress
    from ..store.books import Books
    from ..store.store import Store

EXAMPLES = 5
"""How many tapes each line of the audit names."""
INHERITED = "(before the fork)"
"""Stands for the kind of an action that a fork inherited from its parent."""


class Ended(Value):
    """Episodes that ended the same way."""

    status: str
    cause: str | None
    trainable: bool
    """Whether such an end may be trained on."""
    episodes: int
    unscored: int
    """Episodes among these that have no reward."""
    sampled: int
    """Completion tokens of the calls whose engine returned token ids."""
    seconds: float
    """Sum over the episodes, as their `end` records state it."""
    turns: dict[str, int]
    """Episodes by length in actions: `0`, `1`, `2-3`, ... -> how many."""
    tokens: dict[str, int]
    """Episodes by completion tokens, in the same buckets."""
    tapes: tuple[str, ...]
    """Some of these episodes."""


class Spent(Value):
    """Cost of the calls of one agent path to one engine, sampled by one policy version."""

    by: str
    """The agents' path."""
    engine: str
    """Empty where the calls don't name it."""
    version: str | None
    """None for calls that name no version."""
    calls: int
    prompt: int | None
    """Tokens; None when no call has a known number."""
    completion: int | None
    """Tokens; None when no call has a known number."""
    uncounted: int
    """Calls with an unknown number of prompt or completion tokens."""
    seconds: float | None
    """Sum over all tries; None when no call was timed."""
    untimed: int
    cost: float | None
    """US dollars; None when no call has a known cost."""
    unpriced: int


class Component(Value):
    """One reward component."""

    name: str
    layer: str | None
    """None for what was recorded with the tapes."""
    metric: bool
    """Has weight 0: reported, never part of a reward."""
    scores: int
    unknown: int
    """Scores that are NaN or infinite; they are in no sum."""
    evidence: int
    """Scores with evidence."""
    low: float | None
    mean: float | None
    """Mean of the values without their weights."""
    high: float | None
    total: float
    """Sum of weight * value."""
    share: float | None
    """|total| divided by the sum of |total| over all components; None for metrics, layers, and where that sum is 0."""


class Earned(Value):
    """What one kind of action earned from one component."""

    name: str
    kind: str | None
    """The action's kind; None for the episode as a whole."""
    scores: int
    mean: float
    """Mean of weight * value."""
    total: float
    share: float | None
    """|total| divided by the sum of |total| over the component's kinds; None where that sum is 0."""
    tapes: tuple[str, ...]
    """Some of the tapes that earned most."""


class Audit(Value):
    """The audit of a run's tapes."""

    tapes: int
    """Tapes that began."""
    open: int
    unscored: int
    """Tapes that ended without a reward."""
    ends: tuple[Ended, ...]
    spent: tuple[Spent, ...]
    components: tuple[Component, ...]
    earned: tuple[Earned, ...]
    anomalies: tuple[Anomaly, ...]

    def lost_by(self, length: str) -> dict[str, tuple[int, int]]:
        """Bucket of `turns` or `tokens` -> (episodes that ended, how many of them are never trained on)."""
        found: dict[str, tuple[int, int]] = {}
        for end in self.ends:
            for name, n in getattr(end, length).items():
                ended, lost = found.get(name, (0, 0))
                found[name] = ended + n, lost + (0 if end.trainable else n)
        return dict(sorted(found.items(), key=lambda item: int(item[0].partition("-")[0])))


class _Tape:
    """A tape that has not ended."""

    __slots__ = ("actions", "attempt", "failed", "group", "id", "last", "repeats", "rewards", "sampled", "steps")

    def __init__(self, body: dict[str, Any], inherited: int) -> None:
        self.id: str = body["tape"]
        self.group: str | None = body.get("group")
        self.attempt: int = body.get("attempt") or 0
        self.steps: list[str] = [INHERITED] * inherited
        """The kind of every step."""
        self.actions = self.sampled = 0
        self.last: dict[str, tuple[str, Any, int]] = {}
        """Path -> kind and content of its last action, and how often in a row the path did it."""
        self.repeats: tuple[int, str] = 0, ""
        """Length of the longest row of equal actions, and their kind."""
        self.rewards: list[Scored] = []
        self.failed = False
        """True when a reward source failed: the tape is then unscored, and its other components are only reported."""

    def reward(self, body: dict[str, Any]) -> None:
        self.rewards.append(_scored(body, self.kind(body.get("step"))))
        self.failed |= unscores(self.rewards[-1].value, self.rewards[-1].weight, body.get("evidence"))

    def step(self, body: dict[str, Any]) -> None:
        kind, by = str(body.get("kind")), str(body.get("by"))
        self.steps.append(kind)
        if body.get("role") != "action":
            return
        self.actions += 1
        before = self.last.get(by)
        same = before is not None and before[:2] == (kind, body.get("content"))
        times = before[2] + 1 if before is not None and same else 1
        self.last[by] = kind, body.get("content"), times
        self.repeats = max(self.repeats, (times, kind))

    def kind(self, step: int | None) -> str | None:
        """The kind of the action at that index."""
        if step is None:
            return None
        return self.steps[step] if 0 <= step < len(self.steps) else "(no such step)"


class AuditFold:
    """Feed it every record of a run, in order; then call `audit()`."""

    def __init__(
        self, *, only: Container[str] | None = None, repeats: int = 3, inherited: Callable[[str], int] | None = None
    ) -> None:
        """only: ids of the tapes that count; None for all.

        repeats: from how many equal actions in a row a tape is reported. inherited: gives, for the id of a fork, how
        many steps it has from its parent; a run with forks needs it.
        """
        self._only, self._inherited = only, inherited
        self._open: dict[str, _Tape] = {}
        self._tapes = self._unscored = 0
        self._ends: dict[tuple[str, str | None], dict[str, Any]] = {}
        self._spent: dict[tuple[str, str, str | None], dict[str, Any]] = {}
        self._components: dict[tuple[str | None, str, bool], dict[str, Any]] = {}
        self._earned: dict[tuple[str, str | None], dict[str, Any]] = {}
        self._odd = Anomalies(EXAMPLES, repeats)

    def add(self, t: str, tape: str | None, body: bytes) -> None:
        """One record, by its `t` and `tape`. NotATape when it can't be read."""
        name = tape or ""
        if t == "use" or (t in IN_TAPE and (self._only is None or name in self._only)):
            try:
                self._add(t, name, read_body(body))
            except (ValueError, TypeError, AttributeError, LookupError) as error:
                raise NotATape(
                    f"a {t} of tape {tape} can't be audited: {error}; `tapereel verify` lists all that can't be read"
                ) from error

    def _add(self, t: str, name: str, body: dict[str, Any]) -> None:
        if t == "use":
            self._odd.update(body, self._only)
        elif t == "begin":
            self._tapes += 1
            parent = body.get("parent") is not None
            if parent and self._inherited is None:
                raise ValueError("the tape is a fork: construct AuditFold with `inherited`")
            steps = self._inherited(name) if parent and self._inherited is not None else 0
            self._open[name] = tape = _Tape(body, steps)
            self._odd.begun(tape.group, tape.attempt, name)
        elif t == "reward" and (body.get("layer") is not None or name not in self._open):
            self._component(_scored(body, None), body.get("layer") or "")
        elif (tape := self._open.get(name)) is None:
            return  # after its end, or of a tape that never began: the books report both
        elif t == "step":
            tape.step(body)
        elif t == "reward":
            tape.reward(body)
        elif t == "call":
            self._call(tape, body)
        else:
            self._end(self._open.pop(name), body)

    def _end(self, tape: _Tape, body: dict[str, Any]) -> None:
        cause = body["cause"]["type"] if body.get("cause") else None
        status = Status(body.get("status"))
        usable = trains(status, CauseType(cause) if cause else None)
        of = self._ends.setdefault(
            (status.value, cause),
            {
                "trainable": usable,
                "episodes": 0,
                "unscored": 0,
                "sampled": 0,
                "seconds": 0.0,
                "turns": {},
                "tokens": {},
                "tapes": [],
            },
        )
        scored = not tape.failed and any(one.weight for one in tape.rewards)
        rewards = [
            one._replace(weight=0.0) if tape.failed and math.isfinite(one.value) else one for one in tape.rewards
        ]
        self._unscored += not scored
        of["episodes"] += 1
        of["unscored"] += not scored
        of["sampled"] += tape.sampled
        of["seconds"] += body.get("seconds") or 0.0
        for length, n in (("turns", tape.actions), ("tokens", tape.sampled)):
            of[length][bucket(n)] = of[length].get(bucket(n), 0) + 1
        if len(of["tapes"]) < EXAMPLES:
            of["tapes"].append(tape.id)
        for one in rewards:
            self._component(one, None)
            self._earn(tape.id, one)
        self._odd.ended(tape.id, tape.group, tape.attempt, status, usable, tape.actions, tape.repeats, rewards)

    def _call(self, tape: _Tape, body: dict[str, Any]) -> None:
        usage = body.get("usage") or {}
        tries = body.get("attempts") or []
        ids = body.get("completion")
        n = column_length(ids) if ids is not None else usage.get("completion_tokens")
        ids_of_prompt = body.get("prompt")  # without the tokens that the call keeps of its base
        prompt = (
            body.get("keep", 0) + column_length(ids_of_prompt)
            if ids_of_prompt is not None
            else usage.get("prompt_tokens")
        )
        tape.sampled += column_length(ids)
        seconds = math.fsum(one["seconds"] for one in tries) if tries else None
        spans: list[Any] = body.get("spans") or [[None, 0, n]]
        whole = sum(end - start for _, start, end in spans) if body.get("spans") else 0
        for k, (version, start, end) in enumerate(spans):
            # An answer without tokens has no proportion to divide by: its spans share its cost equally.
            part = (end - start) / whole if whole else 1 / len(spans)
            self._spend(
                (str(body.get("by")), body.get("engine") or "", version),
                k == 0,
                prompt=0 if k and prompt is not None else prompt,
                completion=None if n is None else end - start,
                seconds=_part(seconds, part),
                cost=_part(usage.get("cost"), part),
            )
        self._odd.call(tape.id, body)

    def _spend(self, key: tuple[str, str, str | None], first: bool, **amounts: float | None) -> None:
        of = self._spent.setdefault(
            key,
            {
                "calls": 0,
                "prompt": None,
                "completion": None,
                "uncounted": 0,
                "seconds": None,
                "untimed": 0,
                "cost": None,
                "unpriced": 0,
            },
        )
        if first:
            of["calls"] += 1
            of["uncounted"] += amounts["prompt"] is None or amounts["completion"] is None
            of["untimed"] += amounts["seconds"] is None
            of["unpriced"] += amounts["cost"] is None
        for name, value in amounts.items():
            if value is not None:
                of[name] = (of[name] or 0) + value

    def _component(self, one: Scored, layer: str | None) -> None:
        of = self._components.setdefault(
            (layer, one.name, not one.weight),
            {"scores": 0, "unknown": 0, "evidence": 0, "low": None, "high": None, "sum": 0.0, "total": 0.0},
        )
        of["scores"] += 1
        of["evidence"] += one.evidence
        if not math.isfinite(one.value):
            of["unknown"] += 1
            return
        of["low"] = one.value if of["low"] is None else min(of["low"], one.value)
        of["high"] = one.value if of["high"] is None else max(of["high"], one.value)
        of["sum"] += one.value
        of["total"] += one.weight * one.value

    def _earn(self, tape: str, one: Scored) -> None:
        if not one.weight or not math.isfinite(one.value):
            return
        of = self._earned.setdefault((one.name, one.kind), {"scores": 0, "total": 0.0, "most": []})
        earned = one.weight * one.value
        of["scores"] += 1
        of["total"] += earned
        if len(of["most"]) < EXAMPLES or earned > of["most"][-1][0]:
            best = max([earned, *(old for old, at in of["most"] if at == tape)])
            others = [(old, at) for old, at in of["most"] if at != tape]
            of["most"] = sorted([*others, (best, tape)], key=lambda pair: -pair[0])[:EXAMPLES]

    # The account

    def audit(self) -> Audit:
        """The audit of the records so far."""
        return Audit(
            tapes=self._tapes,
            open=len(self._open),
            unscored=self._unscored,
            ends=tuple(
                Ended(status=status, cause=cause, **of)
                for (status, cause), of in sorted(self._ends.items(), key=lambda item: (item[0][0], item[0][1] or ""))
            ),
            spent=tuple(
                Spent(by=by, engine=engine, version=version, **of) for (by, engine, version), of in self._spent.items()
            ),
            components=self._all_components(),
            earned=self._all_earned(),
            anomalies=self._odd.found(self._components),
        )

    def _all_components(self) -> tuple[Component, ...]:
        whole = math.fsum(abs(of["total"]) for (layer, _, _), of in self._components.items() if layer is None)
        made = []
        for (layer, name, metric), of in sorted(
            self._components.items(), key=lambda item: (item[0][0] or "", *item[0][1:])
        ):
            n = of["scores"] - of["unknown"]
            made.append(
                Component(
                    name=name,
                    layer=layer,
                    metric=metric,
                    scores=of["scores"],
                    unknown=of["unknown"],
                    evidence=of["evidence"],
                    low=of["low"],
                    mean=of["sum"] / n if n else None,
                    high=of["high"],
                    total=of["total"],
                    share=abs(of["total"]) / whole if whole and layer is None and not metric else None,
                )
            )
        return tuple(made)

    def _all_earned(self) -> tuple[Earned, ...]:
        whole: dict[str, float] = {}
        for (name, _), of in self._earned.items():
            whole[name] = whole.get(name, 0.0) + abs(of["total"])
        return tuple(
            Earned(
                name=name,
                kind=kind,
                scores=of["scores"],
                mean=of["total"] / of["scores"],
                total=of["total"],
                share=abs(of["total"]) / whole[name] if whole[name] else None,
                tapes=tuple(tape for _, tape in of["most"]),
            )
            for (name, kind), of in sorted(self._earned.items(), key=lambda item: (item[0][0], item[0][1] or ""))
        )


def _scored(body: dict[str, Any], kind: str | None) -> Scored:
    return Scored(
        name=str(body.get("name", "reward")),
        kind=kind,
        value=float(body["value"]),
        weight=float(body.get("weight", 1.0)),
        evidence=body.get("evidence") is not None,
    )


def _part(value: float | None, part: float) -> float | None:
    return None if value is None else value * part


_EVERY = 2_000
"""Records between two reports of progress."""


def audit_run(
    store: Store,
    *,
    split: str | None = None,
    limit: int | None = None,
    repeats: int = 3,
    progress: Progress | None = None,
) -> tuple[Books, Audit]:
    """The books of the whole run, and the audit of its tapes. Reads every record once.

    `split`: audit the tapes of this split only. `limit`: audit the newest `limit` of these, and the other tapes of
    their groups, without which comparisons within a group would be wrong.
    """
    from ..store.books import BooksFold

    store.refresh()
    only = None if split is None and limit is None else _chosen(store, split, limit)
    books = BooksFold()
    fold = AuditFold(only=only, repeats=repeats, inherited=lambda tape: store.tape(tape, refresh=False).inherited)
    records = sum(segment.n for segment in store.index.segments())
    done = 0
    for done, stored in enumerate(store.records(), start=1):
        books.add(stored.body)
        fold.add(stored.t, stored.tape, stored.body)
        if progress is not None and done % _EVERY == 0:
            progress("audit", done, max(done, records), "records")
    if progress is not None and done >= _EVERY:
        progress("audit", done, done, "records")
    return books.books(), fold.audit()


def _chosen(store: Store, split: str | None, limit: int | None) -> frozenset[str]:
    fitting = store.summaries(split=split)
    newest = fitting if limit is None else fitting[-limit:]
    groups = {summary.group for summary in newest} - {None}
    return frozenset(summary.id for summary in [*newest, *(s for s in fitting if s.group in groups)])
