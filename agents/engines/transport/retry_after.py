"""How long a server wants to be left alone, as its `Retry-After` header says it. Knows nothing of requests."""

from __future__ import annotations

from datetime import UTC, datetime
from email.utils import parsedate_to_datetime

LATEST = 3600.0
"""Seconds that a server may ask to be left alone; how long that is waited for is the engine's patience."""


def retry_after(value: str | None) -> float | None:
    """Seconds of a `Retry-After` header, which has seconds or a date (RFC 9110), at most `LATEST`; None where it has
    neither."""
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
