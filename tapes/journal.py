"""The journal: the protocol between a recorder, which makes records, and a store, which keeps them."""

from __future__ import annotations

from enum import StrEnum
from typing import Protocol

from .pictures import MediaReference

MAX_BODY = 64 * 1024 * 1024 - 1024
"""Maximum size of a record's body in bytes. Larger data is stored as media."""


class Durability(StrEnum):
    """Which events wait until their records are on the disk."""

    STEP = "step"
    """Every turn waits until its action would survive a power cut."""
    TAPE = "tape"
    """The end of every episode waits for the disk. Turns wait only if the environment's effect is not `pure`."""
    OS = "os"
    """Nothing waits for the disk. Records survive the death of the process, but not a power cut."""


class MediaFiles(Protocol):
    """The media files of a run."""

    def put(self, data: bytes, suffix: str = ..., /) -> MediaReference:
        """Store the bytes, which are durable when this call returns. The call blocks."""
        ...

    def get(self, reference: str, /) -> bytes:
        """Return the bytes of the file that `reference` names. This call blocks."""
        ...


class Journal(Protocol):
    """An ordered, append-only sink of record bodies."""

    @property
    def durability(self) -> Durability:
        """When an episode waits for the disk."""
        ...

    @property
    def media(self) -> MediaFiles:
        """The run's media files, which records refer to by name."""
        ...

    def append(self, body: bytes) -> None:
        """Queue one record body without waiting for the disk. Raises StoreFailed after a write or sync has failed."""
        ...

    async def durable(self) -> None:
        """Wait until all records so far would survive a power cut. Raises StoreFailed if a write or sync failed."""
        ...
