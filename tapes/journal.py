"""Where a recorder writes: the contract between tapes in memory and whatever keeps them."""

from __future__ import annotations

from typing import Protocol


class Journal(Protocol):
    """An ordered, append-only sink of record bodies."""

    def append(self, body: bytes) -> None:
        """Queue one record body. Never waits for the disk. Raises StoreFailed once the writer is poisoned."""
        ...

    async def durable(self) -> None:
        """Return when everything appended before this call would survive a power cut. Raises StoreFailed."""
        ...
