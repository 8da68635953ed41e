"""Servers that don't answer: how long requests wait for them, and when a run stops.

All requests of an engine share one `Absence`. While no request is answered, all of them wait and try again, for at most
`patience` seconds. After that, `EngineStopped` ends the run. If only one request fails for that long while others are
answered, only this request fails.
"""

from __future__ import annotations

import asyncio
import random
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager

from ....tapes.common.text import logger
from ....tapes.errors import StopReason
from ..engine import EngineError, EngineStopped

log = logger("engine")

NOTICE = 1.0
"""Seconds without an answer before the first message about it."""
REMINDER = 30.0
"""Seconds between two messages about one absence."""
_SPENT = re.compile(r"insufficient[_ ]quota|exceeded your current quota|billing|credit balance", re.IGNORECASE)
"""Matches errors about a spent budget, to which some providers give the status of a rate limit (429), or 400."""
_FLAGGED = re.compile(r"moderation|flagged|content.?(policy|filter)|safety", re.IGNORECASE)
"""Matches errors about the content of one request, to which some providers give the status of a rejected key (403)."""


def stop_reason(status: int | None, text: str) -> StopReason | None:
    """Return why no later request can succeed either, judging by the HTTP status and the text of an error. Return None
    if one may succeed."""
    if status == 402 or (status in (400, 403, 429) and _SPENT.search(text)):
        return "budget"
    if status == 401 or (status == 403 and not _FLAGGED.search(text)):
        return "key"
    return "model" if status == 404 else None


class Absence:
    """Measures how long an engine gets no answer. All its requests share this object, within one event loop."""

    def __init__(self, patience: float, *, backoff: float = 0.05, longest: float = 5.0) -> None:
        """`backoff` is the first wait between two tries in seconds, before jitter. The wait doubles up to `longest`."""
        self.patience, self.backoff, self.longest = patience, backoff, longest
        self.since: float | None = None
        """`time.monotonic()` of the first failure after the last answer, or None while requests are answered."""
        self._total = 0.0
        self._next_notice = 0.0
        self._noticed = False
        self._trying = 0
        """Number of requests that failed and will try again."""
        self._moved = asyncio.Event()

    @property
    def seconds(self) -> float:
        """Seconds up to now during which requests were sent and none was answered. It never decreases."""
        return self._total + (0.0 if self.since is None else time.monotonic() - self.since)

    async def over(self) -> None:
        """Wait while failed requests try again. If there are none, return at once, so that the caller's request is the
        next try."""
        while self.since is not None:
            self._moved.clear()
            await self._moved.wait()
            # If the wait ended the run, its error cancels the caller before a new episode begins.
            await asyncio.sleep(0.1)

    @contextmanager
    def request(self) -> Iterator[Tries]:
        """Yield the tries of one request. Call `failed` after each failure, and `answered` after an answer."""
        tries = Tries(self)
        try:
            yield tries
        finally:
            tries.end()

    def end(self) -> None:
        """End the absence, because a request was answered or because no request is trying any more."""
        if self.since is None:
            return
        gone = time.monotonic() - self.since
        if self._noticed and self._trying:
            log.warning("the model answers again, after %.0f s", gone)
        self._total += gone
        self.since = None
        self._moved.set()

    def begin(self, now: float) -> float:
        """Begin an absence at `now`, when a request failed, unless one has begun. Returns the seconds without an
        answer."""
        if self.since is None:
            self.since, self._noticed, self._next_notice = now, False, now + NOTICE
        return now - self.since

    def notice(self, error: EngineError, now: float, gone: float) -> None:
        """Tell the user, now and then, why the run waits."""
        if now < self._next_notice:
            return
        self._next_notice, self._noticed = now + REMINDER, True
        log.warning(
            "%s. No answer for %.0f s: the run holds its episodes and waits, at most %g s (engine.patience)",
            error,
            gone,
            self.patience,
        )


class Tries:
    """The tries of one request. Created by `Absence.request`."""

    def __init__(self, absence: Absence) -> None:
        self._absence = absence
        self._first: float | None = None
        """`time.monotonic()` of the first failure."""
        self._pause = absence.backoff

    @property
    def alone(self) -> bool:
        """Whether other requests are being answered, or were answered since this one first failed."""
        since = self._absence.since
        return since is None or (self._first is not None and since > self._first)

    async def failed(self, error: EngineError, *, after: float | None = None) -> None:
        """Wait before the next try, because the server gave no answer. The wait takes `after` seconds if the server
        asked for that.

        Raises EngineStopped if no request of the engine was answered for `patience` seconds, and `error` if only this
        one was not."""
        absence, now = self._absence, time.monotonic()
        if self._first is None:
            self._first, absence._trying = now, absence._trying + 1
        gone = absence.begin(now)
        if gone >= absence.patience:
            raise EngineStopped(
                f"{error}. The run waited {gone:.0f} s and no request was answered (engine.patience is "
                f"{absence.patience:g})",
                "away",
            ) from error
        left = self._first + absence.patience - now
        if left <= 0:
            raise error
        absence.notice(error, now, gone)
        # Jitter (0.5 to 1.5) spreads out requests that failed together, so that they don't return together.
        wait = after if after is not None else self._pause * random.uniform(0.5, 1.5)
        self._pause = min(self._pause * 2, absence.longest)
        await asyncio.sleep(min(wait, left, absence.patience - gone))

    def answered(self) -> None:
        """Note that the server answered this request, or refused it for a reason in the request itself."""
        self._absence.end()
        self.end()

    def end(self) -> None:
        """Note that this request won't try again."""
        if self._first is None:
            return
        self._first, self._absence._trying = None, self._absence._trying - 1
        if not self._absence._trying:
            # No request waits any more. Seconds from now on must not count as an absence, or a later failure would stop
            # the run.
            self._absence.end()
