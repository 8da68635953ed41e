"""The books: every sampled token in one place, every episode begun ended or open.

Each place has a fold of its own over the records, none is what is left of another; the sum is then compared with what
was sampled, so a token counted twice (trained *and* held out, say) or nowhere shows. What the places mean, exactly:

1. Tokens of calls without versions and log-probs were written, not sampled (`authored`): counted beside the books.
2. `held_out` are the tapes of every split but `train` and `demo`.
3. `errored` is every end that is never trained on (limit of seconds; error of the environment, the model or ours;
   crashed) but `cancelled`, which has a line of its own.
4. A token named by several updates is `trained` if any trained on it, else `stale`, `filtered` or `context`, in this
   order; `unscored` and `unused` are only tokens that no update named.

It knows nothing of files; feed it records.
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
    """Episodes that ended the same way, by how long they were: attrition biases what is left to train on."""

    status: str
    cause: str | None
    trainable: bool
    episodes: int
    turns: dict[str, int]
    """Episodes by length in actions: `0`, `1`, `2-3`, `4-7`, ... -> how many."""
    sampled: int
    """Tokens."""


class Books(Value):
    """The account of a run. `closes` is the promise; `findings` say where it is broken."""

    sampled: int
    """Completion tokens that some policy drew."""
    tokens: dict[str, int]
    """Place -> tokens (the ten of `PLACES`)."""
    authored: int
    """Completion tokens that nobody sampled: scripted answers, demonstrations."""
    authored_trained: int
    """Those of them that some update trained on."""
    textual: int
    """Calls of engines that give text without ids: their tokens are nobody's to count."""
    applied: int
    """Token-updates: each trained token as often as it was trained on."""
    begun: int
    ended: int
    open: int
    ends: tuple[Lost, ...]
    findings: tuple[str, ...]

    @property
    def closes(self) -> bool:
        """Nothing found, and both sums agree."""
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
        """True once what scored it, or compared it with its group, failed: then it is unscored, whatever it earned."""
        self.actions = 0
        self.calls: dict[str, int] = {}
        """Sampled calls -> completion tokens."""
        self.authored: dict[str, int] = {}
        self.sampled = 0

    @property
    def held_out(self) -> bool:
        return self.split not in ("train", "demo")

    @property
    def trainable(self) -> bool:
        return trains(self.status, self.cause)


class BooksFold:
    """Feed it every record of a run, in order; `books()` at any time. Costs O(tapes) to ask, O(1) to feed."""

    def __init__(self) -> None:
        self._tapes: dict[str, _Tape] = {}
        self._lineages = Lineages()
        self._textual = 0
        self._sampled = 0
        self._begun = self._ended = 0
        self._odd: list[str] = []

    def add(self, body: bytes) -> None:
        """One record body. NotATape when it is none."""
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
        """For each call that an update named: its tokens, a bit for each fate. Says what was named that isn't there."""
        marks: dict[tuple[str, str], bytearray] = {}
        applied = 0
        for use in self._effective(odd):
            fresh: dict[tuple[str, str], bytearray] = {}
            for bit, fate in enumerate(FATES):
                applied += self._mark(use, bit, fate, marks, fresh, odd)
        self._report_forbidden(marks, odd)
        return marks, applied

    def _effective(self, odd: list[str]) -> list[Use]:
        """The updates of every living lineage's history, each once."""
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
        """Sampled tokens whose first fate is this one."""
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
        """Tokens that no update named, of tapes that could be trained on."""
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
    """The bucket that a length falls into: `0`, `1`, `2-3`, `4-7`, ..."""
    if length < 2:
        return str(length)
    low = 1 << (length.bit_length() - 1)
    return f"{low}-{2 * low - 1}"
