"""Anomalies: what looks unusual in a run, each with tapes to inspect. An anomaly is a hint, not a verdict.

| kind | reported when |
|---|---|
| constant reward | every score of a component has the same value (two scores at least) |
| flat in groups | a component differs within no group, though it differs within the run |
| flat groups | groups whose tapes have equal rewards: they teach nothing where rewards are compared within a group |
| repeated actions | a path does an equal action, content included, `repeats` times in a row |
| cut completions | more than `OFTEN` of the completions reached their limit of tokens |
| cut episodes | more than `OFTEN` of the episodes ended as truncated or at a limit |
| impossible log-probs | above 0 by more than rounding |
| unknown log-probs | sampled tokens without a log-prob |
| log-prob mismatch | an update whose trainer and sampler differ on a token (`MISMATCH`), which no update explains |
| reward without evidence | a component that has evidence elsewhere |
| reward without action | a tape without actions earned a reward other than 0 |
| reward that is no number | NaN or an infinity |
| group never closed | an attempt still runs, or a number below the highest is missing |
| group closed short | an attempt ended, and none of its episodes may be trained on |
| retries, failed calls | calls that were tried again, calls whose last try failed |
| failed tries | tries that failed, by error |

`AuditFold` feeds it with records.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from ..arrays import decode
from ..common.stats import DOWN
from ..records import Status, Use
from ..store.summary import CallFacts, RewardFacts, Summary, TapeFold, column_length
from ..value import Value

OFTEN = 0.1
"""Share of all above which cut completions and episodes are reported."""
MISMATCH = 0.1
"""Nats. Differences by rounding stay far below, in bfloat16 almost always."""
ROUNDING = 1e-6
"""Nats. A log-softmax in float32 may exceed 0 by this much."""


class Component(Value, frozen=False):
    """One reward component."""

    name: str
    layer: str | None
    """None for rewards that were recorded with the tapes."""
    metric: bool
    """Has weight 0: reported, never part of a reward."""
    scores: int = 0
    unknown: int = 0
    """Scores that are NaN or infinite; they are in no sum."""
    evidence: int = 0
    """Scores with evidence."""
    low: float | None = None
    mean: float | None = None
    """Mean of the values without their weights."""
    high: float | None = None
    total: float = 0.0
    """Sum of weight * value; scaled by `DOWN`, like `_sum`, until `sealed`."""
    share: float | None = None
    """|total| divided by the sum of |total| over all components; None for metrics and layers, or if that sum is 0."""
    _sum: float = 0.0

    def add(self, one: RewardFacts) -> None:
        """Count a score. `mean` and `share` need all scores: `sealed`."""
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
        """A copy with the mean and the total of the scores so far, and the share of `whole`."""
        n = self.scores - self.unknown
        counts = whole and self.layer is None and not self.metric
        mean, share = self._sum / n / DOWN if n else None, abs(self.total) / whole if counts else None
        return self.model_copy(update={"mean": mean, "total": self.total / DOWN, "share": share})


class Anomaly(Value):
    """One anomaly of a run."""

    kind: str
    """The first column of the table above."""
    what: str
    """The component, action or error; empty if the kind has only one."""
    count: int
    """How many times."""
    of: int | None
    """How many could have shown it; None if that number has no meaning."""
    detail: str
    """A sentence."""
    tapes: tuple[str, ...]
    """Some tapes that show it."""


@dataclass(slots=True)
class _Odd:
    count: int = 0
    most: float = 0.0
    tapes: list[str] = field(default_factory=list)


@dataclass(slots=True)
class _Group:
    """The attempts of one group so far."""

    running: dict[int, int] = field(default_factory=dict)
    """attempt -> its tapes without an end."""
    tapes: dict[int, bool] = field(default_factory=dict)
    """attempt -> whether one of its ended tapes may be trained on."""
    first: list[str] = field(default_factory=list)
    values: dict[str, tuple[float, int, bool]] = field(default_factory=dict)
    """Component -> (first value, number of tapes, whether all have that value), of tapes that may be trained on."""
    equal: tuple[float, int, bool] | None = None
    """The same for the sum of all components."""


_NOTED: dict[str, tuple[str | None, str]] = {
    "cut completions": ("completions", "completions that reached their limit of tokens"),
    "cut episodes": ("ended", "episodes that ended as truncated or at a limit"),
    "unknown log-probs": ("tokens", "sampled tokens without a log-prob"),
    "impossible log-probs": ("tokens", "log-probs above 0, up to {most:.3g}"),
    "log-prob mismatch": (
        "updates",
        "updates in which trainer and sampler differ on a token, by up to {most:.3g} nats: "
        "which the weights that sampled it don't explain",
    ),
    "retries": ("calls", "calls that were tried again, up to {most:.0f} tries"),
    "failed calls": ("calls", "calls whose last try failed"),
    "failed tries": (None, "tries of calls that failed so"),
    "repeated actions": ("ended", "episodes that do the same action up to {most:.0f} times in a row"),
    "reward that is no number": (None, "NaN or an infinity; in none of the sums"),
    "reward without action": (None, "scores other than 0 on tapes that did nothing"),
}
"""Kind -> (the count that it is a part of, its sentence)."""


class Anomalies:
    """Counts anomalies while `AuditFold` feeds it one run."""

    def __init__(self, examples: int, repeats: int, diverged: Container[str] = ()) -> None:
        """examples: how many tapes each anomaly names. repeats, diverged: as for `AuditFold`."""
        self._examples, self._repeats, self._diverged = examples, repeats, diverged
        self._odd: dict[tuple[str, str], _Odd] = {}
        self._groups: dict[str, _Group] = {}
        self._tapes_of: dict[str, list[str]] = {}
        self._bare: dict[str, list[str]] = {}
        self._oldest: dict[str, list[str]] = {}
        """call -> the versions that sampled it."""
        self._uses: list[tuple[Use, float, list[str]]] = []
        """(update, largest difference of any of its tokens in nats, its tapes)."""
        self._seen: Counter[str] = Counter()
        """Calls, sampled completions and their tokens, ended tapes and updates so far. Anomalies are parts of them."""

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

    # Feeding

    def begun(self, tape: Summary) -> None:
        """A tape began."""
        if tape.group is not None:
            of = self._groups.setdefault(tape.group, _Group())
            of.running[tape.attempt] = of.running.get(tape.attempt, 0) + 1
            self._name(of.first, [tape.id])

    def call(self, tape: str, call: CallFacts) -> None:
        """A call of a tape."""
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
        # NaN is an unknown log-prob. A sum is NaN iff one of its values is, so the slow count runs only then.
        unknown = n if values is None else sum(x != x for x in values) if math.isnan(sum(values)) else 0
        if unknown:
            self._note("unknown log-probs", "", [tape], n=unknown)
        high = [x for x in values if x > ROUNDING] if values and (unknown or max(values) > ROUNDING) else []
        if high:
            self._note("impossible log-probs", "", [tape], n=len(high), most=max(high))

    def update(self, use: Use, only: Container[str] | None) -> None:
        """Count an update, if it trained on a tape in `only` (None means any tape)."""
        tapes = [tape for tape in dict.fromkeys(item[0] for item in use.items) if only is None or tape in only]
        moved = use.info.get("moved", use.info.get("mismatch"))
        if not isinstance(moved, int | float) or not tapes:
            return
        self._seen["updates"] += 1
        if moved > MISMATCH:
            self._uses.append((use, moved, tapes))

    def _mismatches(self) -> None:
        """Report updates with a mismatch. Runs last: segments may hold a `use` before the calls it trained on.

        The trainer compares with its present weights, so a mismatch on tokens that these weights sampled has no
        explanation. Older tokens may differ by as much as the updates since then moved the policy, and that has no
        bound. They count only if `replay model`, which uses the weights that sampled them, found their tape diverged.
        A record without `moved` doesn't tell the two apart.
        """
        for use, moved, tapes in self._uses:
            own = use.info.get("mismatch") if "moved" in use.info else None
            versions = (version for item in use.items for version in self._oldest.get(item[1], ()))
            older = any(_age(version, use.lineage, use.update) for version in versions)
            if not older or any(tape in self._diverged for tape in tapes):
                self._note("log-prob mismatch", use.lineage, tapes, most=moved)
            elif isinstance(own, int | float) and own > MISMATCH:
                self._note("log-prob mismatch", use.lineage, tapes, most=own)
        self._uses.clear()

    def ended(self, tape: TapeFold, repeats: tuple[int, str], rewards: Sequence[RewardFacts]) -> None:
        """A tape ended; `repeats` is the length of its longest row of equal actions, and their kind."""
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
            whole = sum(one.weight * one.value for one in rewards if one.weight)
            self._group(self._groups[tape.begun.group], tape.begun.attempt, tape.trainable, sums, whole)

    def _reward(self, tape: str, one: RewardFacts, actions: int) -> None:
        self._name(self._tapes_of.setdefault(one.name, []), [tape])
        if not one.evidence:
            self._name(self._bare.setdefault(one.name, []), [tape])
        if not math.isfinite(one.value):
            self._note("reward that is no number", one.name, [tape])
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
        """All anomalies. components: the components of the run's rewards."""
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
        """For each group with that component on two tapes or more: whether it is the same on all."""
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
    """The staleness of a version: updates between it and the weights that update `update` (from 0) changes.

    0 for a version of another lineage: its staleness is unknown, so it can't explain a mismatch.
    """
    name, _, n = version.rpartition(":")
    return max(0, update - int(n)) if name == lineage and n.isdigit() else 0


def _same(known: tuple[float, int, bool] | None, value: float) -> tuple[float, int, bool]:
    return (value, 1, True) if known is None else (known[0], known[1] + 1, known[2] and value == known[0])


def _anomaly(kind: str, what: str, count: int, of: int | None, detail: str, tapes: Sequence[str]) -> Anomaly:
    return Anomaly(kind=kind, what=what, count=count, of=of, detail=detail, tapes=tuple(tapes))
