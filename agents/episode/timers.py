"""The two timers of an episode measure agent time and system time. At any moment, one of them runs.

Agent time is the time that the policy causes: the agent's own code, its tools, and its model calls while the model
computes. An episode that reaches the limit of agent time is scored, like one that reaches the limit of turns. System
time is everything else: the engine's queue, retries, the environment and Tapereel. It doesn't include the wait for
servers that don't answer. If an episode reaches the limit of system time, the policy is not at fault, and the episode
is repeated.

An engine calls `Request.on_start` when the model begins to compute. If an engine doesn't call it, the whole call is
system time. A policy must not be punished for an unmeasured wait in a queue.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable

from ...tapes import CauseType
from ...tapes.records import Attempt
from ..engines.engine import Engine, absence_of
from .limits import LimitReached, Limits


class Timers:
    """Measures time from `start` to `stop`. When a limit is reached, `reached` is set and `on_limit` is called once."""

    def __init__(self, limits: Limits, engine: Engine | None = None) -> None:
        self._absence = absence_of(engine)
        self.on_limit: Callable[[LimitReached], None] = lambda _: None
        self.reached: LimitReached | None = None
        self._limits = {True: limits.agent_seconds or math.inf, False: limits.system_seconds or math.inf}
        self._spent = {True: 0.0, False: 0.0}
        """Seconds spent by the agent (True) and by the system (False)."""
        self._agents = False
        """Whether the agent's timer runs."""
        self._acting = False
        self._calls = self._working = 0
        """The number of model calls in flight, and the number of these calls that a model is computing."""
        self._since = 0.0
        self._alarm: asyncio.TimerHandle | None = None
        self._due = math.inf
        """When the alarm rings, on `time.monotonic`."""
        self._running = False

    @property
    def agent_seconds(self) -> float:
        """The agent's time so far."""
        return self._spent[True]

    def start(self) -> None:
        """Start the system's timer. This needs a running event loop."""
        self._running, self._since = True, self._now()
        self._arm(min(self._limits.values()))

    def stop(self) -> None:
        """Stop both timers."""
        self._count()
        self._running = False
        self._cancel()

    def acting(self, acts: bool) -> None:
        """Called when the agent's code or one of its tools begins (True) or ceases (False) to run."""
        self._acting = acts
        self._change()

    def called(self) -> None:
        """Called when a model call begins."""
        self._calls += 1
        self._change()

    def worked(self, more: int) -> None:
        """Called when a model begins (1) or ceases (-1) to work on a call."""
        self._working += more
        self._change()

    def answered(self) -> None:
        """Called when a model call ends. The model must have ceased to work on it."""
        self._calls -= 1
        self._change()

    def _change(self) -> None:
        """Start the timer that applies now, unless it runs already."""
        agents = self._acting and (self._working > 0 or not self._calls)
        if agents == self._agents or not self._running:
            return
        now = self._count()
        self._agents = agents
        if self._absence is not None:
            self._since = self._now()
            now = time.monotonic()
        left = self._limits[agents] - self._spent[agents]
        if now + left < self._due and self.reached is None:
            self._arm(left)

    def _count(self) -> float:
        """Add the time since the last count to the timer that runs, check its limit, and return its clock."""
        now, agents = time.monotonic() if self._absence is None else self._now(), self._agents
        if now > self._since:  # earlier if several engines of a team are absent
            self._spent[agents] += now - self._since
        self._since = now
        if self._spent[agents] >= self._limits[agents] and self.reached is None:
            self._reach()
        return now

    def _now(self) -> float:
        """Return the running timer's clock in seconds. The system's clock stops while no server answers the engine."""
        return time.monotonic() - (self._absence.seconds if self._absence is not None and not self._agents else 0.0)

    def _arm(self, left: float) -> None:
        """Set the alarm to ring in `left` seconds. An alarm that rings too early is set again, so it is moved only if
        it would ring too late."""
        self._cancel()
        if left == math.inf:
            return
        # If servers go away just before the limit, the system's clock stops, and without this minimum, the alarm would
        # ring continuously.
        left = max(left, 0.01)
        self._alarm, self._due = asyncio.get_running_loop().call_later(left, self._ring), time.monotonic() + left

    def _cancel(self) -> None:
        if self._alarm is not None:
            self._alarm.cancel()
        self._alarm, self._due = None, math.inf

    def _ring(self) -> None:
        self._cancel()
        self._count()
        if self.reached is None:
            self._arm(self._limits[self._agents] - self._spent[self._agents])

    def _reach(self) -> None:
        limit = self._limits[self._agents]
        if self._agents:
            message = f"the agent, its model calls and its tools took {limit:g} s (limits.agent_seconds)"
            self.reached = LimitReached(CauseType.AGENT_SECONDS, message)
        else:
            message = f"the engine's queue, the environment and Tapereel took {limit:g} s (limits.system_seconds)"
            self.reached = LimitReached(CauseType.SECONDS, message)
        self.on_limit(self.reached)


class CallTimer:
    """Reports a call and its attempts to the episode's timers. A late start, after a cancellation, is ignored."""

    def __init__(self, timers: Timers) -> None:
        self._timers = timers
        self._over = False

    def call(self) -> None:
        """Called when the call and its first attempt begin."""
        self._timers.called()
        self.begin()

    def begin(self) -> None:
        """Called when an attempt begins."""
        self._begun, self._queued = time.perf_counter(), None

    def start(self) -> None:
        """Called when the model begins to work on the attempt. Engines call it as `Request.on_start`."""
        if self._queued is None and not self._over:
            self._queued = time.perf_counter() - self._begun
            self._timers.worked(1)

    def attempt(self, error: str | None = None) -> Attempt:
        """End the attempt and return its record."""
        found = Attempt(seconds=time.perf_counter() - self._begun, error=error, queued=self._queued)
        self._wait()
        return found

    def end(self) -> None:
        """Called when the call has ended."""
        self._wait()
        self._over = True
        self._timers.answered()

    def _wait(self) -> None:
        if self._queued is not None:
            self._queued = None
            self._timers.worked(-1)
