"""Readers of a run that is written: what they have of it is a moment of it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tapereel.tapes.store import Disk, Store, verify

from .lab import Lab

lab = Lab()


class Waiting(Disk):
    """A reader's disk that waits, once, before it opens the new segment for the nth time."""

    def __init__(self, nth: int) -> None:
        self.left, self.new = nth, ""
        self.there, self.go = threading.Event(), threading.Event()

    def open(self, path: Path) -> Any:
        if path.name == self.new:
            self.left -= 1
            if self.left == 0:
                self.there.set()
                assert self.go.wait(20)
        return super().open(path)


class Rotating(Disk):
    """A writer's disk that lets others read when the second segment was made, and before the next line is written."""

    def __init__(self, read: Callable[[str], None]) -> None:
        self.read, self.made = read, list[str]()

    def create(self, path: Path) -> int:
        self.made += [path.name] if path.suffix == ".jsonl" else []
        return super().create(path)

    def write(self, handle: int, data: bytes) -> int:
        if len(self.made) == 2:
            new, self.made = self.made[-1], []
            self.read(new)
        return super().write(handle, data)


def closed(run: Path, store: Store) -> object:
    return sorted(tape.id for tape in store.summaries(closed=True))


def books(run: Path, store: Store) -> object:
    return store.books().findings


def verified(run: Path, store: Store) -> object:
    return verify(run, disk=store.index.disk).broken


@pytest.mark.parametrize(
    ("asked", "nth", "then", "at_last"),
    [(closed, 1, ["before"], ["before", "on"]), (books, 1, (), ()), (verified, 2, (), ())],
    ids=["index", "books", "verify"],
)
def test_a_tape_that_goes_on_in_a_new_segment_has_its_begin(
    asked: Callable[[Path, Store], object], nth: int, then: object, at_last: object, tmp_path: Path
) -> None:
    """The reader has read the old segment. Then the tape begins there, goes on in the new one, and is read there."""
    run, disk, said = tmp_path / "run", Waiting(nth), list[object]()

    def reading() -> None:
        said.append(asked(run, reader))
        disk.there.set()

    thread = threading.Thread(target=reading)

    def read(new: str) -> None:
        disk.new = new
        thread.start()
        assert disk.there.wait(20)

    with (
        Store.create(run, disk=Rotating(read), rotate_bytes=1000, thread=False) as store,
        Store.open(run, disk=disk) as reader,
    ):
        for body in lab.episode("before"):
            store.writer.append(body)
        store.writer.sync()
        asked(run, reader)
        first, *rest = lab.episode("on")
        store.writer.append(first)
        store.writer.sync()  # the first segment is full: the new one is made before this line is written
        for body in rest:
            store.writer.append(body)
        store.writer.sync()
        disk.go.set()
        thread.join(20)
        assert said == [then]
        assert asked(run, reader) == at_last
