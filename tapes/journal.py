"""The journal: the protocol between a recorder, which makes records, and a store, which keeps them."""

from __future__ import annotations

from enum import StrEnum
from typing import Protocol


class Durability(StrEnum):
    """Which events wait until their records are on the disk."""

    STEP = "step"
    """Every turn waits until its action would survive a power cut."""
    TAPE = "tape"
    """The end of every episode waits; turns only where the environment's effect is not `pure`."""
    OS = "os"
    """Nothing waits for the disk: records survive the death of the process, not a power cut."""


class Journal(Protocol):
    """An ordered, append-only sink of record bodies."""

    @property
    def durability(self) -> Durability:
        """When an episode waits for the disk."""
        ...

    def append(self, body: bytes) -> None:
        """Queue one record body. Never waits for the disk. Raises StoreFailed once the writer is poisoned."""
        ...

    async def durable(self) -> None:
        """Return when everything appended before this call would survive a power cut. Raises StoreFailed."""
        ...
