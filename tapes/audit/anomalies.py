"""Anomalies: what looks unusual in a run, each with tapes to inspect. An anomaly is a hint, not a verdict.

| kind | reported when |
|---|---|
| constant reward | all scores of a component have the same value, and there are at least two |
| flat in groups | a component has equal values within each group, although it differs within the run |
| flat groups | all tapes in a group have equal rewards, so comparing rewards within the group teaches nothing |
| repeated actions | a path repeats the same action with the same content at least `repeats` times in a row |
| cut completions | the share of completions that reached their token limit is above `OFTEN` |
| cut episodes | the share of episodes that were truncated or ended at a limit is above `OFTEN` |
| impossible log-probs | a log-prob is above 0 by more than rounding can explain |
| unknown log-probs | a sampled token has no log-prob |
| unknown token ids | a tape was set aside, because it has an id that the model doesn't have |
| log-prob mismatch | trainer and sampler differ on a token by over `MISMATCH`, and no update or rounding explains it |
| reward without evidence | a score has no evidence, although other scores of its component have some |
| reward without action | a tape without actions earned a reward other than 0 |
| reward that isn't a number | a reward is NaN or infinite |
| group never closed | an attempt still runs, or an attempt number below the highest is missing |
| group closed short | an attempt ended, and none of its episodes may be trained on |
| retries | a call was tried again |
| failed calls | the last try of a call failed |
| failed tries | a try of a call failed (listed by error) |

`AuditFold` passes the records to this module.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import cast

from ..arrays import decode
from ..common.stats import DOWN, total
from ..records import Status, Use
from ..store.summary import CallFacts, RewardFacts, Summary, TapeFold, column_length
from ..value import Value

OFTEN = 0.1
"""Cut completions and cut episodes are reported if their share is above this value."""
MISMATCH = 0.1
"""If trainer and sampler differ on a token by more than this number of nats, it is a mismatch. Rounding in float32
causes far smaller differences."""
ROUNDING = 1e-6
"""Rounding may lift a log-softmax in float32 above 0 by this number of nats."""


class Component(Value, frozen=False):
    """One reward component."""

    name: str
    layer: str | None
    """The name of the layer, or None for rewards that were recorded with the tapes."""
    metric: bool
    """True if the weight is 0. A metric is reported, but it is never part of a reward."""
    scores: int = 0
    unknown: int = 0
    """Number of scores that are NaN or infinite. The sums don't include these scores."""
    evidence: int = 0
    """Number of scores with evidence."""
    low: float | None = None
    mean: float | None = None
    """Mean of the values, without their weights."""
    high: float | None = None
    total: float = 0.0
    """Sum of weight * value. Until all scores are counted, it is scaled by `DOWN`, so that it can't overflow. `sealed`
    removes the scale."""
    share: float | None = None
    """|total| divided by the sum of |total| over all components. It is None for metrics and layers, or if that sum is
    0."""
    _sum: float = 0.0

    def add(self, one: RewardFacts) -> None:
        """Count a score. `mean` and `share` need all scores, so `sealed` computes them."""
        self.scores += 1
        self.evidence += one.evidence
        if not math.isfinite(one.value):
            self.unknown += 1
            return
        self.low = one.value if self.low is None else min(self.low, one.value)
        self.high = one.value if self.high is None else max(self.high, one.value)
        self._sum += DOWN * one.value
        self.total += DOWN * one.weight * one.value

    def sealed(self, whole: float) -> Component:
        """Return a copy with the mean and the total of the scores so far, and the component's share of `whole`."""
        n = self.scores - self.unknown
        counts = whole and self.layer is None and not self.metric
        mean, share = self._sum / n / DOWN if n else None, abs(self.total) / whole if counts else None
        return self.model_copy(update={"mean": mean, "total": self.total / DOWN, "share": share})


class Anomaly(Value):
    """One anomaly of a run."""

    kind: str
    """The kind, as in the first column of the table at the top of this file."""
    what: str
    """The component, action or error. It is empty if the anomaly has none."""
    count: int
    """Number of times that the anomaly occurred."""
    of: int | None
    """Number of cases that could have shown the anomaly, or None if this number has no meaning."""
    detail: str
    """A description in words."""
    tapes: tuple[str, ...]
    """Some of the tapes that show the anomaly."""


@dataclass(slots=True)
class _Odd:
    count: int = 0
    most: float = 0.0
    tapes: list[str] = field(default_factory=list)


@dataclass(slots=True)
class _Group:
    """The attempts of one group so far."""

    running: dict[int, int] = field(default_factory=dict)
    """For each attempt, the number of its tapes that are still open."""
    tapes: dict[int, bool] = field(default_factory=dict)
    """For each attempt, whether any of its ended tapes may be trained on."""
    first: list[str] = field(default_factory=list)
    values: dict[str, tuple[float, int, bool]] = field(default_factory=dict)
    """For each component: (value on the first tape, number of tapes, whether all tapes have this value). Only tapes
    that may be trained on are counted."""
    equal: tuple[float, int, bool] | None = None
    """The same tuple as in `values`, for the sum of all components."""


_NOTED: dict[str, tuple[str | None, str]] = {
    "cut completions": ("completions", "completions that reached their limit of tokens"),
    "cut episodes": ("ended", "episodes that ended as truncated or at a limit"),
    "unknown log-probs": ("tokens", "sampled tokens without a log-prob"),
    "impossible log-probs": ("tokens", "log-probs above 0, up to {most:.3g}"),
    "unknown token ids": (None, "tapes set aside, with a token id beyond the model's vocabulary: another model's"),
    "log-prob mismatch": (
        "updates",
        "updates in which trainer and sampler differ on a token, by up to {most:.3g} nats: "
        "which the weights that sampled it don't explain",
    ),
    "retries": ("calls", "calls that were tried again, up to {most:.0f} tries"),
    "failed calls": ("calls", "calls whose last try failed"),
    "failed tries": (None, "tries of calls that failed so"),
    "repeated actions": ("ended", "episodes that do the same action up to {most:.0f} times in a row"),
    "reward that isn't a number": (None, "NaN or an infinity; in none of the sums"),
    "reward without action": (None, "scores other than 0 on tapes that did nothing"),
}
"""For each kind of anomaly: (name of its total in `_seen` or None, description in words)."""


class Anomalies:
    """Counts anomalies while `AuditFold` passes it the records of one run."""

    def __init__(self, examples: int, repeats: int, replayed: Mapping[str, str] | None = None) -> None:
        """`examples` is the number of tapes that each anomaly names. A tape is reported if it has at least `repeats`
        equal actions in a row. `replayed` has what `replay model` found: by tape, `diverged`, or `rounded` if its
        log-probs differ only by rounding in bfloat16."""
        self._examples, self._repeats, self._replayed = examples, repeats, replayed or {}
        self._odd: dict[tuple[str, str], _Odd] = {}
        self._groups: dict[str, _Group] = {}
        self._tapes_of: dict[str, list[str]] = {}
        self._bare: dict[str, list[str]] = {}
        self._oldest: dict[str, list[str]] = {}
        """The versions that sampled each call."""
        self._uses: list[tuple[Use, float, list[str]]] = []
        """For each update with a mismatch: (the update, its largest difference on a token in nats, its tapes)."""
        self._seen: Counter[str] = Counter()
        """Counts of calls, sampled completions, tokens in these completions, ended tapes and updates. `_NOTED` names
        these counts."""

    def _note(self, kind: str, what: str, tapes: Sequence[str], n: int = 1, most: float = 0.0) -> None:
        odd = self._odd.setdefault((kind, what), _Odd())
        odd.count += n
        odd.most = max(odd.most, most)
        self._name(odd.tapes, tapes)

    def _name(self, known: list[str], tapes: Sequence[str]) -> None:
        for tape in tapes:
            if len(known) >= self._examples:
                return
            if tape not in known:
                known.append(tape)

    # Adding records

    def begun(self, tape: Summary) -> None:
        """Count a tape that began."""
        if tape.group is not None:
            of = self._groups.setdefault(tape.group, _Group())
            of.running[tape.attempt] = of.running.get(tape.attempt, 0) + 1
            self._name(of.first, [tape.id])

    def call(self, tape: str, call: CallFacts) -> None:
        """Count a call of a tape."""
        self._seen["calls"] += 1
        errors = [one.get("error") for one in call.attempts]
        for error in filter(None, errors):
            self._note("failed tries", str(error).partition(":")[0], [tape])
        if len(errors) > 1:
            self._note("retries", "", [tape], n=1, most=len(errors))
        if errors and errors[-1]:
            self._note("failed calls", "", [tape])
        if call.sampled:
            self._seen["completions"] += 1
            if call.finish == "length":
                self._note("cut completions", "", [tape])
            self._logprobs(tape, call)
            self._oldest[call.call] = [str(version) for version, _, _ in call.spans]

    def _logprobs(self, tape: str, call: CallFacts) -> None:
        n = column_length(call.completion)
        self._seen["tokens"] += n
        values = decode("f", call.logprobs) if call.logprobs is not None else None
        # NaN stands for an unknown log-prob. Such values are counted only if the sum is NaN, because counting is slow.
        unknown = n if values is None else sum(x != x for x in values) if math.isnan(sum(values)) else 0
        if unknown:
            self._note("unknown log-probs", "", [tape], n=unknown)
        high = [x for x in values if x > ROUNDING] if values and (unknown or max(values) > ROUNDING) else []
        if high:
            self._note("impossible log-probs", "", [tape], n=len(high), most=max(high))

    def update(self, use: Use, only: Container[str] | None) -> None:
        """Count an update if it trained on a tape in `only`. None means any tape."""
        aside = [str(tape) for tape in cast("list[str]", use.info.get("beyond") or []) if only is None or tape in only]
        if aside and not use.epoch:
            self._note("unknown token ids", use.lineage, aside, n=len(aside))
        tapes = [tape for tape in dict.fromkeys(item[0] for item in use.items) if only is None or tape in only]
        moved = use.info.get("moved", use.info.get("mismatch"))
        if not isinstance(moved, int | float) or not tapes:
            return
        self._seen["updates"] += 1
        if moved > MISMATCH:
            self._uses.append((use, moved, tapes))

    def _mismatches(self) -> None:
        """Report updates with a mismatch. This runs last, because a `use` may precede the calls that it trained on.

        The trainer computes log-probs with its current weights. If these weights also sampled the tokens, nothing
        explains a mismatch. If older weights sampled them, the updates since then may explain a difference of any size.
        A mismatch on older tokens is therefore reported only if their tape diverged in `replay model`, which uses the
        older weights. A record without `moved` doesn't distinguish older tokens from the others.

        In bfloat16, rounding explains a mismatch if the update measured so (`rounding`), or `replay model` for all its
        tapes.
        """
        for use, moved, tapes in self._uses:
            own = use.info.get("mismatch") if "moved" in use.info else None
            outcomes = {self._replayed.get(tape) for tape in tapes}
            rounding = cast("dict[str, float]", use.info.get("rounding") or {"error": math.inf, "limit": 0.0})
            explained = rounding["error"] <= rounding["limit"] or outcomes == {"rounded"}
            versions = (version for item in use.items for version in self._oldest.get(item[1], ()))
            older = any(_age(version, use.lineage, use.update) for version in versions)
            if "diverged" in outcomes or not (older or explained):
                self._note("log-prob mismatch", use.lineage, tapes, most=moved)
            elif isinstance(own, int | float) and own > MISMATCH and not explained:
                self._note("log-prob mismatch", use.lineage, tapes, most=own)
        self._uses.clear()

    def ended(self, tape: TapeFold, repeats: tuple[int, str], rewards: Sequence[RewardFacts]) -> None:
        """Count a tape that ended. `repeats` describes its longest run of equal actions as (length, kind of action)."""
        name = tape.begun.id
        self._seen["ended"] += 1
        if tape.status in (Status.TRUNCATED, Status.LIMIT):
            self._note("cut episodes", "", [name])
        if repeats[0] >= self._repeats:
            self._note("repeated actions", repeats[1], [name], most=repeats[0])
        sums: dict[str, float] = {}
        for one in rewards:
            if one.weight:
                self._reward(name, one, tape.actions)
                sums[one.name] = sums.get(one.name, 0.0) + one.weight * one.value
        if tape.begun.group is not None:
            whole = total(one.weight * one.value for one in rewards if one.weight)
            self._group(self._groups[tape.begun.group], tape.begun.attempt, tape.trainable, sums, whole)

    def _reward(self, tape: str, one: RewardFacts, actions: int) -> None:
        self._name(self._tapes_of.setdefault(one.name, []), [tape])
        if not one.evidence:
            self._name(self._bare.setdefault(one.name, []), [tape])
        if not math.isfinite(one.value):
            self._note("reward that isn't a number", one.name, [tape])
        elif not actions and one.value:
            self._note("reward without action", one.name, [tape])

    def _group(self, group: _Group, attempt: int, usable: bool, sums: Mapping[str, float], whole: float) -> None:
        group.running[attempt] -= 1
        group.tapes[attempt] = group.tapes.get(attempt, False) or usable
        if usable and sums:
            for name, value in sums.items():
                group.values[name] = _same(group.values.get(name), value)
            group.equal = _same(group.equal, whole)

    # The result

    def found(self, components: Iterable[Component]) -> tuple[Anomaly, ...]:
        """Return all anomalies. `components` are the components of the run's rewards."""
        self._mismatches()
        recorded = [one for one in components if one.layer is None and not one.metric]
        made = [*self._rewards(recorded), *self._noted(), *self._unclosed_groups()]
        return tuple(sorted(made, key=lambda one: (one.kind, one.what)))

    def _rewards(self, components: Iterable[Component]) -> list[Anomaly]:
        made = []
        for one in components:
            tapes = self._tapes_of.get(one.name, [])
            n = one.scores - one.unknown
            compared = self._compared(one.name)
            if n > 1 and one.low == one.high:
                made.append(_anomaly("constant reward", one.name, n, one.scores, f"always {one.low:g}", tapes))
            elif compared and all(compared):
                detail = "the same on all tapes of each group, other in other groups"
                made.append(_anomaly("flat in groups", one.name, len(compared), len(compared), detail, tapes))
            if 0 < one.evidence < one.scores:
                detail, bare = "other scores of this component have evidence", self._bare.get(one.name, [])
                missing = one.scores - one.evidence
                made.append(_anomaly("reward without evidence", one.name, missing, one.scores, detail, bare))
        compared = [group for group in self._groups.values() if group.equal is not None and group.equal[1] > 1]
        flat = [group for group in compared if group.equal is not None and group.equal[2]]
        if flat:
            detail = "all their tapes have the same reward"
            made.append(_anomaly("flat groups", "", len(flat), len(compared), detail, self._first(flat)))
        return made

    def _compared(self, name: str) -> list[bool]:
        """Return whether all values of the component are equal, for each group with at least two values."""
        found = [group.values[name] for group in self._groups.values() if name in group.values]
        return [same for _, n, same in found if n > 1]

    def _first(self, groups: Sequence[_Group]) -> list[str]:
        return [tape for group in groups[: self._examples] for tape in group.first[:1]]

    def _noted(self) -> list[Anomaly]:
        found = []
        for (kind, what), odd in self._odd.items():
            part_of, detail = _NOTED[kind]
            of = self._seen[part_of] if part_of is not None else None
            if of is None or kind not in ("cut completions", "cut episodes") or odd.count > OFTEN * of:
                found.append(_anomaly(kind, what, odd.count, of, detail.format(most=odd.most), odd.tapes))
        return found

    def _unclosed_groups(self) -> list[Anomaly]:
        never, short = [], []
        for group in self._groups.values():
            if any(group.running.values()) or len(group.running) <= max(group.running):
                never.append(group)
            elif not all(group.tapes.values()):
                short.append(group)
        kinds = (
            ("group never closed", never, "an attempt still runs, or one before the last is missing"),
            ("group closed short", short, "an attempt never ended in a way that can be trained on"),
        )
        return [
            _anomaly(kind, "", len(groups), len(self._groups), why, self._first(groups))
            for kind, groups, why in kinds
            if groups
        ]


def _age(version: str, lineage: str, update: int) -> int:
    """Return the staleness of a version: the number of updates from this version to the start of update `update`.
    Updates are counted from 0.

    Return 0 for a version from another lineage. Its staleness is unknown, so it can't explain a mismatch.
    """
    name, _, n = version.rpartition(":")
    return max(0, update - int(n)) if name == lineage and n.isdigit() else 0


def _same(known: tuple[float, int, bool] | None, value: float) -> tuple[float, int, bool]:
    return (value, 1, True) if known is None else (known[0], known[1] + 1, known[2] and value == known[0])


def _anomaly(kind: str, what: str, count: int, of: int | None, detail: str, tapes: Sequence[str]) -> Anomaly:
    return Anomaly(kind=kind, what=what, count=count, of=of, detail=detail, tapes=tuple(tapes))
