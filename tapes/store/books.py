"""The books of a run account for every token and episode. Each sampled token is in exactly one of the ten `PLACES`,
such as `trained` or `stale`. Each episode is ended or open.

Each place is counted independently, and none is computed as a remainder. So if the sum of the places differs from the
number of sampled tokens, a token was counted twice (for example as trained *and* held out) or not at all. The places
follow these rules:

1. Tokens in calls without versions and log-probs were authored, not sampled. They are counted separately.
2. `in_flight` has the tokens of open tapes. The other rules apply to tapes that have ended.
3. `held_out` has the tokens of tapes from every split except `train`, `demo` and `corpus`.
4. `errored` has the tokens of tapes with an end that is never trained on: the system's time limit, an error in the
   environment, the model or Tapereel, or a crash. `cancelled` is a separate place.
5. A token that several updates name is in only one place: the first of `trained`, `stale`, `filtered` and `context`
   that an update gave it. `unscored` and `unused` have only tokens that no update named.

This module reads no files. Its callers pass it the records.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

from pydantic import Field

from ..errors import NotATape
from ..records import Begin, Call, End, Label, Reward, StepRecord, Tokens, Use, Void
from ..schema import AnyRecord
from ..status import CauseType, Status
from ..value import Value
from .ledger import FATES, Fate, Lineages, ranges
from .segment import peek
from .summary import (
    GROUP_LAYER,
    CallFacts,
    EndFacts,
    Facts,
    RewardFacts,
    StepFacts,
    Summary,
    TapeFold,
    column_length,
    read_facts,
)

PLACES = (
    "trained",
    "context",
    "stale",
    "filtered",
    "unscored",
    "errored",
    "cancelled",
    "held_out",
    "unused",
    "in_flight",
)


LEFT_OUT = {
    "undelivered": "answers that no client received",
    "abandoned": "branches that the program abandoned",
    "declared": "answers that the program itself left out",
    "auxiliary": "helper calls with other instructions or tools",
    "discarded": "answers with the label `discarded`",
    "ranges": "parts of answers that a label leaves out",
}
"""The reasons of labels, each in words. Labels of earlier versions have no reason but their `use`."""


class Lost(Value, frozen=False):
    """The episodes that ended with the same status and cause, counted by length. If such episodes are never trained on,
    their absence biases the training data."""

    status: str
    cause: str | None
    trainable: bool
    episodes: int = 0
    turns: dict[str, int] = Field(default={})
    """Number of episodes by their number of actions (`0`, `1`, `2-3`, `4-7`, ...)."""
    sampled: int = 0
    """Number of tokens that a policy sampled in these episodes."""


class Books(Value):
    """The accounting for a run. `closes` is true if every token is accounted for. `findings` describes the errors."""

    sampled: int
    """Number of completion tokens that a policy sampled."""
    tokens: dict[str, int]
    """Number of tokens in each of the ten `PLACES`."""
    authored: int
    """Number of completion tokens that no model sampled, as in scripted answers and demonstrations."""
    authored_trained: int
    """Number of authored tokens that an update trained on."""
    textual: int
    """Number of calls to engines that return text without token ids."""
    reported: dict[str, int] = Field(default={})
    """Token counts as the engines reported them, for answers without versions and log-probs: the numbers of `prompt`
    and `completion` tokens. `unknown` is the number of text answers without a count."""
    left_out: dict[str, int] = Field(default={})
    """Number of sampled tokens that a label leaves out of training, by the label's reason (`LEFT_OUT`)."""
    applied: int
    """Number of trained tokens. A token counts once for each update that trained on it."""
    begun: int
    ended: int
    open: int
    ends: tuple[Lost, ...]
    findings: tuple[str, ...]
    refused: tuple[str, ...] = ()
    """Sentences about `use` and `void` records that don't count, because another process had taken the run over when
    they were written."""

    @property
    def closes(self) -> bool:
        """Whether every token and episode is accounted for: there are no findings, and the numbers add up."""
        return not self.findings and sum(self.tokens.values()) == self.sampled and self.begun == self.ended + self.open

    @property
    def counts(self) -> dict[str, int]:
        """Every count of tokens by name, as printed by `--json`."""
        authored = {name: getattr(self, name) for name in ("authored", "authored_trained", "applied")}
        left_out = {f"left_out/{reason}": n for reason, n in self.left_out.items()}
        return {"sampled": self.sampled, **self.tokens, **authored, **self.reported, **left_out}


def spent(counts: Mapping[str, int]) -> str:
    """Describe in words how many tokens the models read and wrote. `counts` is `Books.counts`."""
    parts = {
        "prompt": "{completion:,} completion and {prompt:,} prompt tokens by the engine's own count",
        "unknown": "{unknown:,} text answers without a token count",
    }
    said = [text.format(**counts) for name, text in parts.items() if name in counts]
    reasons = {name: counts[f"left_out/{name}"] for name in LEFT_OUT if f"left_out/{name}" in counts}
    if reasons:
        said.append(f"{sum(reasons.values()):,} of these are left out of training ({left_out_by(reasons)})")
    return ", ".join([f"{counts['sampled']:,} tokens sampled", *said] if counts["sampled"] or not said else said)


def left_out_by(reasons: Mapping[str, int]) -> str:
    """Describe in words why labels leave tokens out of training. `reasons` is `Books.left_out`."""
    return "; ".join(f"{n:,} in {LEFT_OUT[reason]}" for reason, n in reasons.items())


Entry = tuple[Any, ...]
"""What the books need from one record: plain values, which are cheap to send to another process."""


def entry_of(source: Facts | AnyRecord | None) -> Entry | None:
    """Return the entry for a record, given the facts from it or the record itself. The result is None if the books
    don't count records of this type."""
    make = _ENTRIES.get(type(source))
    return make(source) if make is not None else None


def _call_entry(call: CallFacts | Call, n: int | None, *usage: int | None) -> Entry:
    sampled = bool(call.spans) or call.logprobs is not None
    return call.call, n, sampled, None if sampled or call.finish == "error" else usage


_ENTRIES: dict[type, Callable[[Any], Entry]] = {
    **dict.fromkeys((StepFacts, StepRecord), lambda step: (step.role,)),
    **dict.fromkeys((RewardFacts, Reward), lambda one: (one.value, one.weight, one.layer, one.failed)),
    **dict.fromkeys((Use, Void), lambda one: (one,)),
    Summary: lambda begun: (begun.id, begun.split),
    Begin: lambda begun: (begun.tape, begun.split),
    CallFacts: lambda call: _call_entry(
        call,
        None if call.completion is None else column_length(call.completion),
        call.usage.get("prompt_tokens"),
        call.usage.get("completion_tokens"),
    ),
    Call: lambda call: _call_entry(
        call,
        None if call.completion is None else len(call.completion),
        call.usage.prompt_tokens,
        call.usage.completion_tokens,
    ),
    EndFacts: lambda end: (end.status, end.cause),
    End: lambda end: (end.status, end.cause.type if end.cause is not None else None),
    Tokens: lambda tokens: (tokens.call, len(tokens.completion)),
    Label: lambda label: (label,),
}


class _Tape(TapeFold):
    """One tape, with its calls and the rewards that were added after its end."""

    __slots__ = ("authored", "completions", "group_failed", "labels", "layered", "policy")

    def __init__(self, begun: Summary) -> None:
        super().__init__(begun)
        self.layered = False
        """Whether a reward with a weight other than 0 was added after the tape's end."""
        self.group_failed = False
        """Whether a comparison of the tape with its group failed, which leaves the whole tape unscored."""
        self.completions: dict[str, int] = {}
        """Number of completion tokens of each sampled call."""
        self.authored: dict[str, int] = {}
        self.labels: dict[str, Label] = {}
        """The last label of each call."""
        self.policy = 0
        """Number of tokens that a policy sampled."""

    @property
    def usable(self) -> bool:
        """Whether the tape's tokens may be trained on once it is scored."""
        return self.trainable and not self.held_out

    @property
    def scored(self) -> bool:
        """Whether the tape or one of its layers has a reward, and no failure makes the tape unscored."""
        return not (self.failed or self.group_failed) and (self.layered or self.reward is not None)


class BooksFold:
    """Folds the records of a run into its books. Add every record in order, and call `books()` at any time.

    Adding a record takes O(1) time, and a call to `books()` takes time proportional to the number of tapes.
    """

    def __init__(self) -> None:
        self._tapes: dict[str, _Tape] = {}
        self._lineages = Lineages()
        self._textual = 0
        self._reported = Counter[str]()
        self._sampled = 0
        self._begun = self._ended = 0
        self._odd: list[str] = []

    def add(self, body: bytes) -> None:
        """Add one record body. Raises NotATape if it can't be read."""
        t, name = peek(body)
        try:
            self.take(t, name, read_facts(t, body))
        except (TypeError, AttributeError) as error:
            raise NotATape(f"a {t} can't be read: {error}: {body[:80]!r}…") from error

    def take(self, t: str, name: str | None, facts: Facts | None) -> None:
        """Add one record. `t` is its type, `name` the id of its tape, and `facts` the result of `read_facts`."""
        entry = entry_of(facts)
        if entry is not None:
            self.post(t, name, entry)

    def post(self, t: str, name: str | None, entry: Entry) -> None:
        """Add one record, as `take` does. `entry` is the result of `entry_of`."""
        if t == "begin":
            self._begin(name, *entry)
        elif t in ("use", "void"):
            self._lineages.add(*entry)
        else:
            tape = self._tapes.get(name or "")
            if tape is None:
                self._odd.append(f"a {t} of tape {name}, which never began")
                return
            if tape.status is not None and t in ("step", "call", "end"):
                self._odd.append(f"a {t} of tape {tape.begun.id} after its end")
            getattr(self, f"_{t}")(tape, *entry)

    def _begin(self, name: str | None, tape: str, split: str) -> None:
        self._begun += 1
        if name in self._tapes:
            self._odd.append(f"tape {name} begins twice")
        self._tapes[tape] = _Tape(Summary(tape, "", 0, split))

    def _step(self, tape: _Tape, role: str) -> None:
        tape.actions += role == "action"

    def _call(self, tape: _Tape, call: str, n: int | None, sampled: bool, usage: tuple[int | None, ...] | None) -> None:
        if call in tape.completions or call in tape.authored:
            self._odd.append(f"call {call} is twice on tape {tape.begun.id}")
        if usage is not None:
            if None not in usage:
                self._reported.update(dict(zip(("prompt", "completion"), usage, strict=True)))
            elif n is None:
                self._reported["unknown"] += 1
        if n is None:
            self._textual += 1
        elif sampled:
            tape.completions[call] = n
            tape.policy += n
            self._sampled += n
        else:
            tape.authored[call] = n

    def _tokens(self, tape: _Tape, call: str, n: int) -> None:
        tape.authored[call] = n

    def _label(self, tape: _Tape, label: Label) -> None:
        tape.labels[label.call] = label

    def _reward(self, tape: _Tape, value: float, weight: float, layer: str | None, failed: bool) -> None:
        if tape.status is None:
            tape.score(value, weight, failed)
        else:
            tape.layered |= bool(weight)
            tape.group_failed |= failed and layer in (None, GROUP_LAYER)

    def _end(self, tape: _Tape, status: Status, cause: CauseType | None) -> None:
        self._ended += 1
        tape.status, tape.cause = status, cause

    # The account

    def books(self) -> Books:
        """Return the accounting for all records added so far."""
        odd = list(self._odd)
        marks, applied = self._marks(odd)
        tokens = {
            **{fate: self._by_fate(marks, bit) for bit, fate in enumerate(FATES)},
            "unscored": self._unnamed(marks, scored=False),
            "errored": self._sampled_on(lambda tape: _lost(tape) and tape.status != Status.CANCELLED),
            "cancelled": self._sampled_on(lambda tape: _lost(tape) and tape.status == Status.CANCELLED),
            "held_out": self._sampled_on(lambda tape: tape.status is not None and tape.held_out),
            "unused": self._unnamed(marks, scored=True),
            "in_flight": self._sampled_on(lambda tape: tape.status is None),
        }
        if sum(tokens.values()) != self._sampled:
            odd.append(f"{self._sampled} tokens were sampled, {sum(tokens.values())} are accounted for")
        still = sum(tape.status is None for tape in self._tapes.values())
        if self._begun != self._ended + still:
            odd.append(f"{self._begun} episodes began, {self._ended} ended, {still} still open")
        return Books(
            sampled=self._sampled,
            tokens={place: tokens[place] for place in PLACES},
            authored=sum(sum(tape.authored.values()) for tape in self._tapes.values()),
            authored_trained=self._authored_trained(marks),
            textual=self._textual,
            reported=dict(self._reported),
            left_out=self._left_out(),
            applied=applied,
            begun=self._begun,
            ended=self._ended,
            open=still,
            ends=self._ends(),
            findings=tuple(odd),
            refused=tuple(
                f"{late.t} {late.update} of lineage {late.lineage}, by lead {late.lead}, which a later lead replaced"
                for late in self._lineages.refused
            ),
        )

    def _marks(self, odd: list[str]) -> tuple[dict[tuple[str, str], bytearray], int]:
        """Return the fates of all tokens that updates name, and the number `Books.applied`.

        For each (tape, call), the fates are one byte per completion token. Bit k of a byte is set if an update gave the
        token the fate `FATES[k]`, such as `trained`. If an update names tokens that don't exist, a finding is added to
        `odd`.
        """
        marks: dict[tuple[str, str], bytearray] = {}
        applied = 0
        for use in self._effective(odd):
            fresh: dict[tuple[str, str], bytearray] = {}
            for bit, fate in enumerate(FATES):
                applied += self._mark(use, bit, fate, marks, fresh, odd)
        self._report_forbidden(marks, odd)
        return marks, applied

    def _effective(self, odd: list[str]) -> list[Use]:
        """Return the updates in the histories of all living lineages, each update once.

        Lineages share the updates before the `void` that split them, so a plain sum would count these updates twice.
        """
        found: dict[tuple[str, int, int], Use] = {}
        for lineage in self._lineages.living:
            try:
                uses = self._lineages.ledger(lineage).uses
            except NotATape as error:
                odd.append(str(error))
                uses = ()
            for use in uses:
                found[use.lineage, use.update, use.epoch] = use
        return list(found.values())

    def _mark(
        self,
        use: Use,
        bit: int,
        fate: Fate,
        marks: dict[tuple[str, str], bytearray],
        fresh: dict[tuple[str, str], bytearray],
        odd: list[str],
    ) -> int:
        count = 0
        for name, call, start, end in ranges(use, fate):
            tape = self._tapes.get(name)
            n = None if tape is None else tape.completions.get(call, tape.authored.get(call))
            if n is None or not 0 <= start <= end <= n:
                odd.append(
                    f"update {use.update} of {use.lineage} names tokens [{start}, {end}) of call {call} of tape "
                    f"{name}, which {'lacks that call' if n is None else f'has {n} tokens'}"
                )
                continue
            mark = marks.setdefault((name, call), bytearray(n))
            mine = fresh.setdefault((name, call), bytearray(n))
            if any(mine[start:end]):
                odd.append(f"update {use.update} of {use.lineage} names tokens of call {call} of tape {name} twice")
            for k in range(start, end):
                mark[k] |= 1 << bit
                mine[k] = 1
            count += end - start if fate == "trained" else 0
        return count

    def _report_forbidden(self, marks: dict[tuple[str, str], bytearray], odd: list[str]) -> None:
        for (name, call), mark in marks.items():
            tape = self._tapes[name]
            trained = sum(m & 1 for m in mark)
            if trained and not tape.usable:
                why = f"held out ({tape.begun.split})" if tape.held_out else tape.status or "open"
                odd.append(f"{trained} tokens of call {call} were trained on, but tape {name} is {why}")

    def _by_fate(self, marks: dict[tuple[str, str], bytearray], bit: int) -> int:
        """Return the number of sampled tokens that have this fate and no fate that comes earlier in `FATES`."""
        below = (1 << bit) - 1
        return sum(
            sum(1 for m in mark if m & (1 << bit) and not m & below)
            for (name, call), mark in marks.items()
            if call in self._tapes[name].completions
        )

    def _authored_trained(self, marks: dict[tuple[str, str], bytearray]) -> int:
        return sum(
            sum(m & 1 for m in mark) for (name, call), mark in marks.items() if call in self._tapes[name].authored
        )

    def _unnamed(self, marks: dict[tuple[str, str], bytearray], *, scored: bool) -> int:
        """Return the number of tokens that no update named, in tapes that may be trained on. `scored` selects the tapes
        with or without a reward."""
        total = 0
        for name, tape in self._tapes.items():
            if tape.usable and tape.scored == scored:
                for call, n in tape.completions.items():
                    mark = marks.get((name, call))
                    total += n if mark is None else mark.count(0)
        return total

    def _left_out(self) -> dict[str, int]:
        found = Counter[str]()
        for tape in self._tapes.values():
            for call, label in tape.labels.items():
                whole = label.use != "agent"
                kept = 0 if whole or label.ranges is None else sum(end - start for start, end in label.ranges)
                if whole or label.ranges is not None:
                    found[label.reason or (label.use if whole else "ranges")] += tape.completions.get(call, 0) - kept
        return {reason: found[reason] for reason in LEFT_OUT if found[reason]}

    def _sampled_on(self, belongs: Callable[[_Tape], bool]) -> int:
        return sum(tape.policy for tape in self._tapes.values() if belongs(tape))

    def _ends(self) -> tuple[Lost, ...]:
        groups: dict[tuple[str, str | None], list[_Tape]] = {}
        for tape in self._tapes.values():
            if tape.status is not None:
                groups.setdefault((tape.status, tape.cause), []).append(tape)
        return tuple(
            Lost(
                status=status,
                cause=cause,
                trainable=tapes[0].trainable,
                episodes=len(tapes),
                turns=dict(Counter(bucket(n) for n in sorted(tape.actions for tape in tapes))),
                sampled=sum(tape.policy for tape in tapes),
            )
            for (status, cause), tapes in sorted(groups.items(), key=lambda item: (item[0][0], item[0][1] or ""))
        )


def _lost(tape: _Tape) -> bool:
    """Return whether the tape is from a training split but ended in a way that rules out training."""
    return tape.status is not None and not tape.held_out and not tape.trainable


def bucket(length: int) -> str:
    """Return the bucket for a length, in powers of two: `0`, `1`, `2-3`, `4-7`, ..."""
    if length < 2:
        return str(length)
    low = 1 << (length.bit_length() - 1)
    return f"{low}-{2 * low - 1}"
