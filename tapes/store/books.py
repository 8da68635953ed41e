"""The books: the accounting of tokens. Every sampled token is in exactly one place, every episode is ended or open.

Each place is counted on its own; none is computed as the rest of the others. The sum of the places is then compared
with the number of sampled tokens, which shows a token counted twice (trained *and* held out, say) or not at all.
The places, exactly:

1. Tokens of calls without versions and log-probs were authored, not sampled: they are counted beside the places.
2. `held_out` has the tapes of every split except `train` and `demo`.
3. `errored` has every end that is never trained on (limit of seconds; error of the environment, the model or ours;
   crashed), except `cancelled`, which is a place of its own.
4. A token named by several updates is `trained` if any update trained on it, else `stale`, `filtered` or `context`, in
   this order. `unscored` and `unused` have only tokens that no update named.

This module reads no files: feed it records.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

from ..errors import NotATape
from ..records import CauseType, Status, Use, Void, trains, unscores
from ..value import Value
from .attempts import GROUP_LAYER
from .index import column_length
from .ledger import FATES, Fate, Lineages, ranges
from .segment import peek, read_body

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


class Lost(Value):
    """Episodes that ended the same way, by their length: attrition biases the episodes that are left to train on."""

    status: str
    cause: str | None
    trainable: bool
    episodes: int
    turns: dict[str, int]
    """Episodes by length in actions: `0`, `1`, `2-3`, `4-7`, ... -> how many."""
    sampled: int
    """Tokens."""


class Books(Value):
    """The accounting of a run. `closes` is true when every token is accounted for; `findings` say what is wrong."""

    sampled: int
    """Completion tokens that a policy sampled."""
    tokens: dict[str, int]
    """Place -> tokens (the ten of `PLACES`)."""
    authored: int
    """Completion tokens that no model sampled: scripted answers, demonstrations."""
    authored_trained: int
    """The authored tokens that an update trained on."""
    textual: int
    """Calls of engines that return text without token ids: their tokens can't be counted."""
    applied: int
    """Token-updates: each trained token counts once for each update that trained on it."""
    begun: int
    ended: int
    open: int
    ends: tuple[Lost, ...]
    findings: tuple[str, ...]

    @property
    def closes(self) -> bool:
        """Whether every token and every episode is accounted for: no findings, and both sums agree."""
        return not self.findings and sum(self.tokens.values()) == self.sampled and self.begun == self.ended + self.open


class _Tape:
    __slots__ = ("actions", "authored", "calls", "cause", "ended", "failed", "sampled", "scored", "split", "status")

    def __init__(self, split: str) -> None:
        self.split = split
        self.status: Status | None = None
        self.cause: CauseType | None = None
        self.ended = False
        self.scored = False
        self.failed = False
        """True once a reward source failed, of the tape or of its group: the tape is then unscored as a whole."""
        self.actions = 0
        self.calls: dict[str, int] = {}
        """Sampled call -> its completion tokens."""
        self.authored: dict[str, int] = {}
        self.sampled = 0

    @property
    def held_out(self) -> bool:
        return self.split not in ("train", "demo")

    @property
    def trainable(self) -> bool:
        return trains(self.status, self.cause)


class BooksFold:
    """Feed it every record of a run, in order; call `books()` at any time. O(1) per record, O(tapes) per account."""

    def __init__(self) -> None:
        self._tapes: dict[str, _Tape] = {}
        self._lineages = Lineages()
        self._textual = 0
        self._sampled = 0
        self._begun = self._ended = 0
        self._odd: list[str] = []

    def add(self, body: bytes) -> None:
        """One record body. NotATape when it can't be read."""
        try:
            self._add(body)
        except (ValueError, TypeError, AttributeError) as error:
            raise NotATape(f"a record can't be read: {error}: {body[:80]!r}…") from error

    def _add(self, body: bytes) -> None:
        t, name = peek(body)
        if t in ("open", "commit", "seal", "publish"):
            return
        record = read_body(body)
        if t == "use":
            self._lineages.add(Use.model_validate_json(body))
        elif t == "void":
            self._lineages.add(Void.model_validate_json(body))
        elif t == "begin":
            self._begun += 1
            if name in self._tapes:
                self._odd.append(f"tape {name} begins twice")
            self._tapes[name or ""] = _Tape(record.get("split", "train"))
        elif (tape := self._tapes.get(name or "")) is None:
            self._odd.append(f"a {t} of tape {name}, which never began")
        else:
            self._add_to(tape, t, record, name or "")

    def _add_to(self, tape: _Tape, t: str, record: dict[str, Any], name: str) -> None:
        if tape.ended and t in ("step", "call", "end"):
            self._odd.append(f"a {t} of tape {name} after its end")
        if t == "step":
            tape.actions += record.get("role") == "action"
        elif t == "call":
            self._call(tape, record, name)
        elif t == "tokens":
            tape.authored[str(record.get("call"))] = column_length(record.get("completion"))
        elif t == "reward":
            tape.scored = tape.scored or bool(record.get("weight", 1.0))
            failed = unscores(record.get("value"), record.get("weight", 1.0), record.get("evidence"))
            tape.failed |= failed and record.get("layer") in (None, GROUP_LAYER)
        elif t == "end":
            cause = record.get("cause")
            tape.status = Status(record.get("status"))
            tape.cause = CauseType(cause.get("type")) if cause is not None else None
            tape.ended = True
            self._ended += 1

    def _call(self, tape: _Tape, record: dict[str, Any], name: str) -> None:
        call, n = str(record.get("call")), column_length(record.get("completion"))
        if call in tape.calls or call in tape.authored:
            self._odd.append(f"call {call} stands twice on tape {name}")
        if record.get("completion") is None:
            self._textual += 1
        elif record.get("spans") or record.get("logprobs") is not None:
            tape.calls[call] = n
            tape.sampled += n
            self._sampled += n
        else:
            tape.authored[call] = n

    # The account

    def books(self) -> Books:
        """The account of everything fed so far."""
        odd = list(self._odd)
        marks, applied = self._marks(odd)
        tokens = {
            "trained": self._by_fate(marks, 0),
            "stale": self._by_fate(marks, 1),
            "filtered": self._by_fate(marks, 2),
            "context": self._by_fate(marks, 3),
            "unscored": self._unscored(marks),
            "errored": self._errored(),
            "cancelled": self._cancelled(),
            "held_out": self._held_out(),
            "unused": self._unused(marks),
            "in_flight": self._in_flight(),
        }
        if sum(tokens.values()) != self._sampled:
            odd.append(f"{self._sampled} tokens were sampled, {sum(tokens.values())} are accounted for")
        still = sum(not tape.ended for tape in self._tapes.values())
        if self._begun != self._ended + still:
            odd.append(f"{self._begun} episodes began, {self._ended} ended and {still} are open")
        return Books(
            sampled=self._sampled,
            tokens={place: tokens[place] for place in PLACES},
            authored=sum(sum(tape.authored.values()) for tape in self._tapes.values()),
            authored_trained=self._authored_trained(marks),
            textual=self._textual,
            applied=applied,
            begun=self._begun,
            ended=self._ended,
            open=still,
            ends=self._ends(),
            findings=tuple(odd),
        )

    def _marks(self, odd: list[str]) -> tuple[dict[tuple[str, str], bytearray], int]:
        """(marks, applied): for each call that an update named, one byte a token with a bit for each fate.

        Bit k stands for `FATES[k]`. Names of tokens that don't exist are added to `odd`.
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
        """The updates in the history of every living lineage, each once.

        Lineages share the updates before the `void` that parted them, so a plain sum would count those twice.
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
            n = None if tape is None else tape.calls.get(call, tape.authored.get(call))
            if n is None or not 0 <= start <= end <= n:
                odd.append(
                    f"update {use.update} of {use.lineage} names tokens [{start}, {end}) of call {call} of tape "
                    f"{name}, which has {'no such call' if n is None else f'{n} tokens'}"
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
            if trained and (tape.held_out or not tape.ended or not tape.trainable):
                why = f"held out ({tape.split})" if tape.held_out else tape.status or "open"
                odd.append(f"{trained} tokens of call {call} were trained on, but tape {name} is {why}")

    def _by_fate(self, marks: dict[tuple[str, str], bytearray], bit: int) -> int:
        """Sampled tokens whose first fate, in the order of `FATES`, is this one."""
        below = (1 << bit) - 1
        return sum(
            sum(1 for m in mark if m & (1 << bit) and not m & below)
            for (name, call), mark in marks.items()
            if call in self._tapes[name].calls
        )

    def _authored_trained(self, marks: dict[tuple[str, str], bytearray]) -> int:
        return sum(
            sum(m & 1 for m in mark) for (name, call), mark in marks.items() if call in self._tapes[name].authored
        )

    def _unnamed(self, marks: dict[tuple[str, str], bytearray], *, scored: bool) -> int:
        """Tokens that no update named, of tapes that may be trained on."""
        total = 0
        for name, tape in self._tapes.items():
            if tape.ended and (tape.scored and not tape.failed) == scored and not tape.held_out and tape.trainable:
                for call, n in tape.calls.items():
                    mark = marks.get((name, call))
                    total += n if mark is None else mark.count(0)
        return total

    def _unused(self, marks: dict[tuple[str, str], bytearray]) -> int:
        return self._unnamed(marks, scored=True)

    def _unscored(self, marks: dict[tuple[str, str], bytearray]) -> int:
        return self._unnamed(marks, scored=False)

    def _held_out(self) -> int:
        return sum(tape.sampled for tape in self._tapes.values() if tape.held_out and tape.ended)

    def _cancelled(self) -> int:
        return sum(
            tape.sampled for tape in self._tapes.values() if not tape.held_out and tape.status == Status.CANCELLED
        )

    def _errored(self) -> int:
        return sum(
            tape.sampled
            for tape in self._tapes.values()
            if tape.ended and not tape.held_out and tape.status != Status.CANCELLED and not tape.trainable
        )

    def _in_flight(self) -> int:
        return sum(tape.sampled for tape in self._tapes.values() if not tape.ended)

    def _ends(self) -> tuple[Lost, ...]:
        groups: dict[tuple[Status | None, CauseType | None], list[_Tape]] = {}
        for tape in self._tapes.values():
            if tape.ended:
                groups.setdefault((tape.status, tape.cause), []).append(tape)
        return tuple(
            Lost(
                status=status or "",
                cause=cause,
                trainable=tapes[0].trainable,
                episodes=len(tapes),
                turns=dict(Counter(bucket(tape.actions) for tape in sorted(tapes, key=lambda tape: tape.actions))),
                sampled=sum(tape.sampled for tape in tapes),
            )
            for (status, cause), tapes in sorted(groups.items(), key=lambda item: (item[0][0] or "", item[0][1] or ""))
        )


def bucket(length: int) -> str:
    """The bucket of a length, by powers of two: `0`, `1`, `2-3`, `4-7`, ..."""
    if length < 2:
        return str(length)
    low = 1 << (length.bit_length() - 1)
    return f"{low}-{2 * low - 1}"
