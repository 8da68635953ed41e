"""The recorder writes every record of an episode to the log in memory and, where there is one, to the journal."""

from __future__ import annotations

from ...tapes import Tape
from ...tapes.journal import Durability, Journal
from ...tapes.records import Begin, Record
from ...tapes.tape import TapeLog


class Recorder:
    """Writes the records of one episode. Single use."""

    __slots__ = ("_calls", "journal", "log")

    def __init__(self, begin: Begin, journal: Journal | None, parent: Tape | None = None) -> None:
        body = begin.body()
        self.log = TapeLog(begin, parent=parent, body=body)
        self.journal = journal
        self._calls = 0
        if journal is not None:
            journal.append(body)

    @property
    def tape(self) -> str:
        return self.log.begin.tape

    def write(self, record: Record) -> None:
        """Append to the log, then to the journal. In this order a record that the log rejects never reaches the
        disk."""
        body = self.log.append(record)
        if self.journal is not None:
            self.journal.append(body)

    def add_layer(self, record: Record) -> None:
        """Write a record about the tape that is not part of it: the tape's digest doesn't cover it."""
        self.log.layers.append(record)
        if self.journal is not None:
            self.journal.append(record.body())

    def new_call_id(self) -> str:
        self._calls += 1
        return f"{self.tape}.{self._calls}"

    @property
    def every_turn(self) -> bool:
        """Whether each action waits until it is durable, also where the environment is pure."""
        return self.journal is not None and self.journal.durability is Durability.STEP

    async def durable(self) -> None:
        """Return when everything written so far would survive a power cut."""
        if self.journal is not None:
            await self.journal.durable()
