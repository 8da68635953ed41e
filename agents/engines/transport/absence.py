"""Decides how long requests wait for servers that don't answer, and when the run stops.

All requests to an engine share one `Absence`. While no request is answered, all requests wait and are tried again.
After `patience` seconds, `EngineStopped` ends the run. If a single request keeps failing for `patience` seconds while
others are answered, only that request fails.
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
"""Seconds without an answer before the first message to the user."""
REMINDER = 30.0
"""Seconds between two messages during one absence."""
_SPENT = re.compile(r"insufficient[_ ]quota|exceeded your current quota|billing|credit balance", re.IGNORECASE)
"""Matches errors about a spent budget. Some providers send them with status 400, or with 429 as for a rate limit."""
_FLAGGED = re.compile(r"moderation|flagged|content.?(policy|filter)|safety", re.IGNORECASE)
"""Matches errors about one request's content. Some providers send them with status 403, as for a rejected key."""


def stop_reason(status: int | None, text: str) -> StopReason | None:
    """Return why every later request would fail too, according to an error's HTTP status and text. Returns None if
    later requests may succeed."""
    if status == 402 or (status in (400, 403, 429) and _SPENT.search(text)):
        return "budget"
    if status == 401 or (status == 403 and not _FLAGGED.search(text)):
        return "key"
    return "model" if status == 404 else None


class Absence:
    """Measures how long an engine gets no answer. All requests to the engine share this object, in one event loop."""

    def __init__(self, patience: float, *, backoff: float = 0.05, longest: float = 5.0) -> None:
        """`backoff` is the first wait between two tries in seconds, before jitter. Each wait doubles, up to
        `longest`."""
        self.patience, self.backoff, self.longest = patience, backoff, longest
        self.since: float | None = None
        """`time.monotonic()` of the first failure after the last answer, or None while requests are answered."""
        self._total = 0.0
        self._next_notice = 0.0
        self._noticed = False
        self._trying = 0
        """Number of requests that have failed and will be tried again."""
        self._moved = asyncio.Event()

    @property
    def seconds(self) -> float:
        """Total seconds up to now during which requests were sent but none was answered. It never decreases."""
        return self._total + (0.0 if self.since is None else time.monotonic() - self.since)

    async def over(self) -> None:
        """Wait until requests are answered again. Returns at once if no failed request is being tried again, because
        the caller's next request then shows whether the server answers."""
        while self.since is not None:
            self._moved.clear()
            await self._moved.wait()
            # If the absence ended with an error that stops the run, the caller is cancelled here, before it begins an
            # episode.
            await asyncio.sleep(0.1)

    @contextmanager
    def request(self) -> Iterator[Tries]:
        """Yield the `Tries` for one request. Call `failed` on it after each failure, and `answered` after an answer."""
        tries = Tries(self)
        try:
            yield tries
        finally:
            tries.end()

    def end(self) -> None:
        """End the absence, because a request was answered or because no failed request is being tried any more."""
        if self.since is None:
            return
        gone = time.monotonic() - self.since
        if self._noticed and self._trying:
            log.warning("the model answers again, after %.0f s", gone)
        self._total += gone
        self.since = None
        self._moved.set()

    def begin(self, now: float) -> float:
        """After a failure, begin an absence at `now`, or continue the current one. Returns its length so far in
        seconds."""
        if self.since is None:
            self.since, self._noticed, self._next_notice = now, False, now + NOTICE
        return now - self.since

    def notice(self, error: EngineError, now: float, gone: float) -> None:
        """Log why the run waits. The first message comes after `NOTICE` seconds, and the next ones every `REMINDER`
        seconds. `gone` is the number of seconds without an answer so far."""
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
    """The tries of one request, with a wait after each failure. Created by `Absence.request`."""

    def __init__(self, absence: Absence) -> None:
        self._absence = absence
        self._first: float | None = None
        """`time.monotonic()` of this request's first failure, or None if it hasn't failed."""
        self._pause = absence.backoff

    @property
    def alone(self) -> bool:
        """Whether only this request fails, while other requests are answered now or were answered after its first
        failure."""
        since = self._absence.since
        return since is None or (self._first is not None and since > self._first)

    async def failed(self, error: EngineError, *, after: float | None = None) -> None:
        """Wait before the next try, because the server gave no answer. `after` is the wait in seconds that the server
        asked for.

        Raises EngineStopped if no request to the engine was answered for `patience` seconds. Raises `error` if this
        request has failed for `patience` seconds, but others were answered in that time."""
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
        # The wait is multiplied by a random number, because requests that failed together shouldn't be repeated
        # together.
        wait = after if after is not None else self._pause * random.uniform(0.5, 1.5)
        self._pause = min(self._pause * 2, absence.longest)
        await asyncio.sleep(min(wait, left, absence.patience - gone))

    def answered(self) -> None:
        """Record that the server answered this request, or refused it because of what it contains."""
        self._absence.end()
        self.end()

    def end(self) -> None:
        """Record that this request won't be tried again."""
        if self._first is None:
            return
        self._first, self._absence._trying = None, self._absence._trying - 1
        if not self._absence._trying:
            # No request waits any more. If the time from now on counted as absence, a later failure could stop the run
            # at once.
            self._absence.end()
