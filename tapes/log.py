"""The growing log of one episode: a fold over its records, whose order is checked as they come.

`TapeLog.append` is the only way in. It knows nothing of files, engines or environments; `Tape` gives views of it.
"""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING, Any, NamedTuple

from .errors import NotATape
from .messages import ENV, Conversation
from .records import DIGEST_START, Begin, Call, End, Message, Record, Reward, StepRecord, fold
from .steps import Step, role_of

if TYPE_CHECKING:
    from .tape import Tape


class Entry(NamedTuple):
    """A step with its bookkeeping."""

    step: Step
    by: str
    calls: tuple[tuple[str, int, int], ...]
    at: float
    turn: int
    """Counted from 0; the environment's reaction belongs to the turn of the action."""
    turns: int
    """Actions taken up to and including this step."""


class Cut(NamedTuple):
    """A place between turns."""

    steps: int
    records: int


def new_tape_id() -> str:
    """22 hex digits: 12 of milliseconds since 1970, so that names sort by time, and 10 random ones."""
    return f"{time.time_ns() // 1_000_000:012x}{os.urandom(5).hex()}"


class TapeLog:
    """The growing record of one episode. `append` is the only way in; the order of records is checked."""

    __slots__ = (
        "_calls",
        "_conversations",
        "_in_turn",
        "begin",
        "bodies",
        "call_order",
        "cuts",
        "digests",
        "end",
        "entries",
        "inherited",
        "layers",
        "parent",
        "rewards",
        "turn",
    )

    def __init__(self, begin: Begin, *, parent: Tape | None = None, body: bytes | None = None) -> None:
        self.begin = begin
        self.parent = parent = _checked_parent(begin, parent)
        self.entries: list[Entry] = list(parent._log.entries[: parent._n]) if parent is not None else []
        self.inherited = len(self.entries)
        """Steps at the front that belong to the parent."""
        self.bodies: list[bytes] = []
        self.digests: list[bytes] = []
        self.rewards: list[tuple[int, Reward]] = []
        """Each with the number of records before it."""
        self.layers: list[Record] = []
        self.end: End | None = None
        self.call_order: list[tuple[int, Call]] = []
        self._calls: dict[str, Call] = {}
        self._conversations: dict[str, Conversation] = {}
        self.turn = begin.parent.turn if begin.parent is not None else 0
        self.cuts: list[Cut] = list(parent._log.cuts[: self.turn]) if parent is not None else []
        """Where each turn starts; of inherited turns, in the parent's records."""
        self._in_turn = False
        self._fold(body if body is not None else begin.body())

    def append(self, record: Any, body: bytes | None = None) -> bytes:
        """Add one record; gives its body. NotATape where the record can't stand here."""
        if self.end is not None:
            raise NotATape(f"tape {self.begin.tape} has ended; a {type(record).__name__} can't follow its end")
        if record.tape != self.begin.tape:
            raise NotATape(f"a record of tape {record.tape!r} can't stand on tape {self.begin.tape!r}")
        written: bytes = record.body() if body is None else body
        # By class, not isinstance: pydantic's metaclass makes that check cost more than the rest of this method.
        kind = type(record)
        if kind is StepRecord:
            self._add_step(record)
        elif kind is Call:
            self._add_call(record)
        elif kind is Reward:
            if record.step is not None and not 0 <= record.step < len(self.entries):
                raise NotATape(
                    f"a reward on step {record.step} of tape {self.begin.tape}, which has {len(self.entries)}"
                )
            self.rewards.append((len(self.bodies), record))
        elif kind is End:
            self.end = record
        else:
            raise NotATape(f"a {type(record).__name__} is no part of a tape")
        self._fold(written)
        return written

    def _fold(self, body: bytes) -> None:
        self.bodies.append(body)
        self.digests.append(fold(self.digests[-1] if self.digests else DIGEST_START, body))

    def _speak(self) -> None:
        if not self._in_turn:
            self._in_turn = True
            self.cuts.append(Cut(len(self.entries), len(self.bodies)))

    def _add_step(self, record: StepRecord) -> None:
        for call, start, end in record.calls:
            n = len(self.call(call).completion or ())
            if not 0 <= start <= end <= max(n, 0):
                raise NotATape(
                    f"a step of tape {self.begin.tape} names tokens [{start}, {end}) of call {call}, which has {n}"
                )
        if record.by != ENV:
            self._speak()
        acted = record.by != ENV and record.role == "action"
        turn = max(self.turn - 1, 0) if record.by == ENV else self.turn
        if acted:
            self._in_turn = False
            self.turn += 1
        self.entries.append(Entry(record.content, record.by, record.calls, record.at, turn, self.turn))

    def _add_call(self, call: Call) -> None:
        if call.call in self._calls:
            raise NotATape(f"call {call.call} stands twice on tape {self.begin.tape}")
        if call.base is not None:
            base = self.call(call.base)
            have = len(base.completion or ()) + self.prompt_length(base)
            if call.keep > have:
                raise NotATape(f"call {call.call} keeps {call.keep} tokens of {call.base}, which has {have}")
        elif call.keep or call.keep_messages:
            raise NotATape(f"call {call.call} keeps {call.keep} tokens and {call.keep_messages} messages of no call")
        self._speak()
        self._calls[call.call] = call
        self.call_order.append((len(self.bodies), call))

    def call(self, call: str) -> Call:
        """The call of this tape or, in the prefix of a fork, of its ancestors."""
        log: TapeLog | None = self
        while log is not None:
            found = log._calls.get(call)
            if found is not None:
                return found
            log = log.parent._log if log.parent is not None else None
        raise NotATape(f"tape {self.begin.tape} has no call {call!r}")

    def prompt_length(self, call: Call) -> int:
        """Prompt tokens of `call`, kept ones included."""
        return call.keep + len(call.prompt or ())

    def conversation(self, path: str, n: int) -> tuple[list[Message], int]:
        """The append-only messages that `path` is shown, and how many of them stand for the first `n` steps."""
        conversation = self._conversations.get(path)
        if conversation is None:
            conversation = self._conversations[path] = Conversation(path)
        for k in range(len(conversation.counts) - 1, n):
            entry = self.entries[k]
            conversation.add(entry.step, entry.by, entry.calls, self.call)
        return conversation.items, conversation.counts[n]


def _checked_parent(begin: Begin, parent: Tape | None) -> Tape | None:
    if begin.parent is None:
        if parent is not None:
            raise NotATape(f"tape {begin.tape} is no fork, but a parent was given")
        return None
    if parent is None:
        raise NotATape(f"tape {begin.tape} is a fork of {begin.parent.tape}; give that tape as its parent")
    cut = parent if parent._k == begin.parent.records else parent.at_turn(begin.parent.turn)
    if (cut.id, cut.digest, cut._k) != (begin.parent.tape, begin.parent.digest, begin.parent.records):
        raise NotATape(
            f"tape {begin.tape} was forked from tape {begin.parent.tape} with digest {begin.parent.digest} "
            f"after {begin.parent.records} records; the given parent is tape {cut.id} with {cut.digest} "
            f"after {cut._k}"
        )
    return cut


def step_record(tape: str, step: Step, *, by: str, calls: tuple[tuple[str, int, int], ...] = ()) -> StepRecord:
    """The record around a step, stamped now."""
    return StepRecord(tape=tape, by=by, role=role_of(step), kind=step.kind, calls=calls, content=step, at=time.time())
