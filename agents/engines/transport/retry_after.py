"""Reads the `Retry-After` header, with which a server says how long to wait before a retry."""

from __future__ import annotations

from datetime import UTC, datetime
from email.utils import parsedate_to_datetime

LATEST = 3600.0
"""Maximum wait in seconds that the header can ask for. The engine's `patience` limits how long it really waits."""


def retry_after(value: str | None) -> float | None:
    """Return the seconds that a `Retry-After` header asks for, at most `LATEST`; None when the header has neither
    seconds nor a date (RFC 9110)."""
    if not value:
        return None
    if value.isascii() and value.replace(".", "", 1).isdecimal():
        return min(float(value), LATEST)
    try:
        at = parsedate_to_datetime(value)
    except ValueError:
        return None
    if at.tzinfo is None:
        at = at.replace(tzinfo=UTC)
    return min(max((at - datetime.now(UTC)).total_seconds(), 0.0), LATEST)
