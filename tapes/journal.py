"""The journal: the protocol between a recorder, which makes records, and a store, which keeps them."""

from __future__ import annotations

from enum import StrEnum
from typing import Protocol

from .pictures import MediaReference

MAX_BODY = 64 * 1024 * 1024 - 1024
"""Bytes of the largest record body; larger things are media."""


class Durability(StrEnum):
    """Which events wait until their records are on the disk."""

    STEP = "step"
    """Every turn waits until its action would survive a power cut."""
    TAPE = "tape"
    """The end of every episode waits; turns only if the environment's effect is not `pure`."""
    OS = "os"
    """Nothing waits for the disk: records survive the death of the process, not a power cut."""


class MediaFiles(Protocol):
    """The media files of a run."""

    def put(self, data: bytes, suffix: str = ..., /) -> MediaReference:
        """Store the bytes; they are durable when it returns. Blocks."""
        ...

    def get(self, reference: str, /) -> bytes:
        """The bytes of a reference. Blocks."""
        ...


class Journal(Protocol):
    """An ordered, append-only sink of record bodies."""

    @property
    def durability(self) -> Durability:
        """When an episode waits for the disk."""
        ...

    @property
    def media(self) -> MediaFiles:
        """The place for files that records name."""
        ...

    def append(self, body: bytes) -> None:
        """Queue one record body. Never waits for the disk. Raises StoreFailed once the writer is poisoned."""
        ...

    async def durable(self) -> None:
        """Return when everything appended before this call would survive a power cut. Raises StoreFailed."""
        ...
