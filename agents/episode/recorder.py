"""The recorder writes every record of an episode to the log in memory, and to the journal if there is one."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from ...tapes import BadPicture, Message, NotATape, Picture, Step, StoreFailed, Tape, Task
from ...tapes.journal import Durability, Journal
from ...tapes.messages import image_parts
from ...tapes.pictures import pictures_of
from ...tapes.records import Begin, Record, StepRecord
from ...tapes.tape import TapeLog


class Recorder:
    """Writes the records of one episode. Single use."""

    __slots__ = ("_calls", "asked", "journal", "log", "shown", "tape")

    def __init__(self, begin: Begin, journal: Journal | None, parent: Tape | None = None) -> None:
        body = begin.body()
        self.log = TapeLog(begin, parent=parent, body=body)
        self.journal = journal
        self.tape = begin.tape
        self._calls = 0
        self.shown = self.log.shown
        """The pictures in the tape's steps and requests, by file name."""
        self.asked: set[str] = set()
        """Names of the pictures that came with a program's request."""
        for entry in self.log.entries:  # entries of a fork's parent, whose files are in this run
            self.shown.update({picture.name: picture for picture in pictures_of(entry.step)})
        keep_pictures(begin.task, journal)
        if journal is not None:
            self.log.file = lambda name: journal.media.get(f"media:{name}")
            journal.append(body)

    def write(self, record: Record) -> None:
        """Append the record to the log, then to the journal. A record that the log rejects is therefore never written
        to disk."""
        if type(record) is StepRecord and record.media:
            self._show(record.content)
        body = self.log.append(record)
        if self.journal is not None:
            self.journal.append(body)

    async def keep(self, step: Step) -> None:
        """Store the files of the step's pictures without blocking the event loop.

        A file must be durable before a record names it. Without this method, `write` would block until then.
        """
        await asyncio.to_thread(self._show, step)

    async def keep_asked(self, picture: Picture) -> None:
        """Store the file of a picture from a program's request, before the call that names it is recorded."""
        await asyncio.to_thread(self._show, picture)
        self.asked.add(picture.name)

    def asked_in(self, messages: Sequence[Message]) -> tuple[str, ...]:
        """Return the names of the pictures in `messages` that came with a program's request."""
        if not self.asked:
            return ()
        names = (str(part.get("media")) for part in image_parts(messages))
        return tuple(dict.fromkeys(name for name in names if name in self.asked))

    def _show(self, shown: Step | Picture) -> None:
        for picture in pictures_of(shown):
            known = self.shown.get(picture.name)
            if known is None or (known.data is None and picture.data is not None):
                keep_pictures(picture, self.journal)
                self.shown[picture.name] = picture

    def picture(self, name: str) -> bytes:
        """Return the PNG of a picture on the tape. Blocks.

        Raises BadPicture for a name that isn't on the tape, so that no text can name an arbitrary file.
        """
        return Tape(self.log).picture(name)

    def add_layer(self, record: Record) -> None:
        """Write a layer, which is a record about the tape, such as a label. It isn't part of the tape, so the tape's
        digest doesn't cover it."""
        self.log.layers.append(record)
        if self.journal is not None:
            self.journal.append(record.body())

    def new_call_id(self) -> str:
        self._calls += 1
        return f"{self.tape}.{self._calls}"

    @property
    def every_turn(self) -> bool:
        """Whether each action must be safe on disk before it is carried out, even if the environment is pure (an action
        changes nothing outside it)."""
        return self.journal is not None and self.journal.durability is Durability.STEP

    async def durable(self) -> None:
        """Wait until everything written so far would survive a power failure."""
        if self.journal is not None:
            await self.journal.durable()


def keep_pictures(shown: Task | Picture, journal: Journal | None) -> None:
    """Store the file of a picture, or the files of all pictures in a task, if there is a journal. Blocks."""
    if journal is None:
        return
    for picture in pictures_of(shown.pictures if isinstance(shown, Task) else shown):
        try:
            if picture.data is not None:
                journal.media.put(picture.data, ".png")
            else:
                journal.media.get(picture.media)
        except NotATape as error:
            raise BadPicture(
                f"{picture} was read from another run, and its file isn't in this one: make it again with Picture.of"
            ) from error
        except OSError as error:
            raise StoreFailed(f"the file of {picture} can't be written: {error}. Repair the disk") from error
