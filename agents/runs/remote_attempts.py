"""Runs episodes in workers, and writes their tapes. This is the lead's side of `worker`.

Contract. `run` returns a closed, durable tape, as `rollout` does. A worker that dies, or is silent for `SILENT`
seconds, loses its episodes. Each is made again with the same seeds by another worker, unless an irreversible action may
have happened. What the lost worker had sampled is gone. If a silent worker answers after all, its tapes are stored, but
this process doesn't use them. A resumed run may take such a tape for its attempt, whose seeds are the same.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import NoReturn, Protocol

from ...envs.environment import EnvironmentFactory
from ...tapes import Cause, CauseType, Status, Tape
from ...tapes.common.text import counted, logger
from ...tapes.errors import RunStopped
from ...tapes.journal import Journal
from ...tapes.records import IN_TAPE, Begin, End, StepRecord
from ...tapes.schema import parse_record
from ...tapes.tape import new_tape_id
from ..engines.engine import Completion, Engine, EngineError, error_text
from ..episode.agent import Agent
from ..episode.rollout import rollout
from ..episode.spec import EpisodeSpec
from .worker import Answer, Asked, Batch, Hello, Place

log = logger("workers")

CAPACITY = 256
"""Maximum number of episodes that one worker runs at a time."""
TRIES = 3
"""An episode whose worker is lost this many times ends with an error. It probably ends the process itself."""
BEAT = 2.0
"""Seconds between two calls that find out whether a worker answers."""
SILENT = 60.0
"""A worker that answers nothing for this many seconds loses its episodes."""
KILLED = 300.0
"""A worker that answers nothing for this many seconds is started again."""
ABSENT = 600.0
"""The run stops if no worker answers for this many seconds."""
CLOSING = 15.0
"""A cancelled episode has this many seconds to return its records."""


class NoWorkers(RunStopped, RuntimeError):
    """No worker has answered for a long time."""

    reason = "away"


class WorkerLost(Exception):
    """The worker of an episode is gone or silent."""


class Method(Protocol):
    """A method of a worker, as Ray calls it."""

    def remote(self, *args: object) -> Awaitable[object]: ...


class Handle(Protocol):
    """A worker in another process."""

    @property
    def ready(self) -> Method: ...
    @property
    def attempt(self) -> Method: ...
    @property
    def go_on(self) -> Method: ...
    @property
    def cancel(self) -> Method: ...
    @property
    def requests(self) -> Method: ...
    @property
    def answers(self) -> Method: ...


@dataclass(slots=True)
class _Flight:
    """An episode that a worker runs."""

    engine: Engine
    journal: Journal
    call: asyncio.Future[object]
    bodies: list[bytes] = field(default_factory=list)
    files: dict[str, bytes] = field(default_factory=dict)
    keys: set[str] = field(default_factory=set)
    """The keys under which the engine may have cached something."""


class _Member:
    """One worker."""

    def __init__(self, name: str, handle: Handle) -> None:
        self.name, self.handle = name, handle
        self.well = True
        self.heard = time.monotonic()
        self.flights: dict[str, _Flight] = {}
        self.silence: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Done as soon as the worker has been silent for too long."""
        self.answering: dict[int, asyncio.Task[None]] = {}
        self.outbox: list[Answer] = []


class RemoteAttempts:
    """Runs episodes in workers. Implements `Attempts`."""

    def __init__(
        self,
        agent: Agent,
        env: EnvironmentFactory,
        handles: Mapping[str, Handle],
        *,
        gone: tuple[type[Exception], ...],
        kill: Callable[[Handle], object],
        lends: bool,
    ) -> None:
        """`gone` are the errors of a call whose worker is gone. `kill` ends the process of a worker, which then starts
        again. With `lends`, the run's engine answers the workers' requests. Otherwise, they have engines of their
        own."""
        self._agent, self._env, self._handles = agent, env, handles
        self._gone, self._kill, self._lends = gone, kill, lends
        self._members: list[_Member] = []
        self._tasks: list[asyncio.Task[None]] = []
        self._free = asyncio.Event()
        """Set when a worker may have become free."""
        self.lost = 0
        """Number of episodes that were lost with a worker and made again."""
        self.late = 0
        """Number of tapes that came after their episodes were made again."""

    @property
    def notes(self) -> tuple[str, ...]:
        were = "was" if self.lost == 1 else "were"
        lost = f"{counted(self.lost, 'attempt')} {were} lost with a worker and made again with the same seeds"
        late = f"{counted(self.late, 'tape')} of a lost worker came after all: stored, and not used"
        return (lost,) * bool(self.lost) + (late,) * bool(self.late)

    async def run(self, spec: EpisodeSpec, engine: Engine, journal: Journal) -> Tape:
        if not self._tasks:
            self._members = [_Member(name, handle) for name, handle in self._handles.items()]
            watching = (work(one) for one in self._members for work in (self._watch, self._serve))
            self._tasks = [asyncio.create_task(work) for work in watching]
        for _ in range(TRIES):
            member, tape = await self._choose(), new_tape_id()
            own = spec.model_copy(update={"tape_id": tape, "worker": member.name})
            place = partial(Place.of, own, journal.durability, engine if self._lends else None)
            made = await asyncio.to_thread(place) if own.task.pictures or own.fork is not None else place()
            flight = _Flight(engine, journal, self._call(member, "attempt", made), files=dict(made.files))
            member.flights[tape] = flight
            try:
                return await self._fly(member, flight, own)
            except WorkerLost as lost:
                ended = await self._crashed(flight)
                if ended is not None:
                    return ended
                self.lost += 1
                log.info("%s: its episode is made again with the same seeds", lost)
            finally:
                del member.flights[tape]
                self._free.set()
                for key in flight.keys:
                    engine.forget(key)

        def exits() -> NoReturn:
            raise WorkerLost(f"{TRIES} workers were lost while they ran this episode: does it end its process?")

        return await rollout(self._agent, exits, spec, engine=engine, journal=journal)

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._tasks = []

    def _call(self, member: _Member, method: str, *args: object) -> asyncio.Future[object]:
        return asyncio.ensure_future(_awaited(getattr(member.handle, method).remote(*args)))

    async def _choose(self) -> _Member:
        """Wait for a worker that answers and has room."""
        since = time.monotonic()
        while True:
            well = [one for one in self._members if one.well]
            best = min(well, key=lambda one: len(one.flights), default=None)
            if best is not None and len(best.flights) < CAPACITY:
                return best
            if best is None and time.monotonic() - max(since, *(one.heard for one in self._members)) > ABSENT:
                raise NoWorkers(f"no worker has answered for {ABSENT:g} s")
            self._free.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout(BEAT):
                    await self._free.wait()

    # One episode

    async def _fly(self, member: _Member, flight: _Flight, spec: EpisodeSpec) -> Tape:
        assert spec.tape_id is not None
        try:
            while True:
                batch = await self._batch(member, flight)
                await self._keep(flight, batch)
                await flight.journal.durable()
                if batch.ended:
                    break
                flight.call = self._call(member, "go_on", spec.tape_id)
        except asyncio.CancelledError:
            await self._cancelled(member, flight, spec.tape_id)
            raise
        if batch.error is not None:
            raise batch.error
        return _tape_of(flight, spec.fork)

    async def _batch(self, member: _Member, flight: _Flight) -> Batch:
        """Return the worker's next batch. Raises WorkerLost if there is none."""
        await asyncio.wait([flight.call, member.silence], return_when=asyncio.FIRST_COMPLETED)
        if not flight.call.done():
            flight.call.add_done_callback(partial(self._came_late, flight))
            raise WorkerLost(f"the worker {member.name} has not answered for {SILENT:g} s")
        return self._result(member, flight.call)

    def _result(self, member: _Member, call: asyncio.Future[object]) -> Batch:
        try:
            found = call.result()
        except self._gone as error:
            member.well = False  # until it answers again
            raise WorkerLost(f"the worker {member.name} is gone") from error
        except Exception as error:
            cause = getattr(error, "cause", None)  # Ray's error about an error of the called method
            raise (cause if isinstance(cause, Exception) else error) from error
        assert isinstance(found, Batch)
        return found

    async def _keep(self, flight: _Flight, batch: Batch) -> None:
        """Append the records, after the pictures that they name are durable."""
        for data in batch.files.values():
            await asyncio.to_thread(flight.journal.media.put, data, ".png")
        flight.files |= batch.files
        for body in batch.records:
            flight.journal.append(body)
        flight.bodies += batch.records

    async def _cancelled(self, member: _Member, flight: _Flight, tape: str) -> None:
        """Let the worker end the episode as cancelled, and append its last records."""
        self._call(member, "cancel", tape).add_done_callback(_seen)
        try:
            async with asyncio.timeout(CLOSING):
                while True:
                    batch = await self._batch(member, flight)
                    await self._keep(flight, batch)
                    if batch.ended:
                        return
                    flight.call = self._call(member, "go_on", tape)
        except (TimeoutError, WorkerLost) as error:
            log.warning("a cancelled episode of %s has no tape: %s", member.name, error or f"none in {CLOSING:g} s")

    def _came_late(self, flight: _Flight, call: asyncio.Future[object]) -> None:
        """Store the whole tape of an episode that was made again. A tape of which a part is stored has ended there."""
        if call.cancelled() or call.exception() is not None or flight.bodies:
            return
        batch = call.result()
        if isinstance(batch, Batch) and batch.ended:
            self.late += 1
            self._tasks.append(asyncio.ensure_future(self._keep(flight, batch)))

    async def _crashed(self, flight: _Flight) -> Tape | None:
        """End the tape of a lost episode if a part of it is stored. Return it if the episode must not be made again."""
        if not flight.bodies:
            return None
        begin, last = parse_record(flight.bodies[0]), parse_record(flight.bodies[-1])
        assert isinstance(begin, Begin)
        acted = isinstance(last, StepRecord) and last.role == "action"
        irreversible = begin.env.effect == "irreversible" and acted
        cause = Cause(
            type=CauseType.OURS,
            message=f"the worker was lost when the irreversible action {getattr(last, 'kind', '')!r} may have been "
            "running: a person must check whether it happened",
        )
        now = time.time()
        end = End(
            tape=begin.tape,
            status=Status.CRASHED,
            cause=cause if irreversible else None,
            seconds=max(now - begin.at, 0.0),
            at=now,
        )
        await self._keep(flight, Batch([end.body()], {}, ended=True))
        await flight.journal.durable()
        return _tape_of(flight, None) if irreversible and begin.parent is None else None

    # Engines

    async def _serve(self, member: _Member) -> None:
        """Let the run's engines answer the requests of a worker."""
        while self._lends:
            try:
                asked = await _awaited(member.handle.requests.remote())
            except self._gone:
                for task in member.answering.values():
                    task.cancel()
                await asyncio.sleep(BEAT / 4)
                continue
            assert isinstance(asked, list)
            for one in asked:
                flight = member.flights.get(one.tape)
                if one.request is None and one.id in member.answering:
                    member.answering[one.id].cancel()
                elif one.request is not None and flight is not None:
                    task = asyncio.create_task(self._complete(member, flight, one))
                    member.answering[one.id] = task
                    task.add_done_callback(lambda _, id=one.id: member.answering.pop(id, None))

    async def _complete(self, member: _Member, flight: _Flight, asked: Asked) -> None:
        assert asked.request is not None
        partials: list[Completion] = []
        for data in asked.files.values():
            await asyncio.to_thread(flight.journal.media.put, data, ".png")
        flight.files |= asked.files
        flight.keys.add(asked.request.cache_key)
        request = replace(
            asked.request,
            on_partial=partials.append,
            on_start=lambda: self._say(member, Answer(asked.id, "started")),
            picture=flight.files.__getitem__,
            listener=_Listener(partial(self._say, member), asked.id) if asked.streamed else None,
        )
        try:
            said = Answer(asked.id, "done", await flight.engine.complete(request))
        except asyncio.CancelledError:
            self._say(member, Answer(asked.id, "cancelled", next(iter(partials), EngineError("nothing was sampled"))))
            raise
        except Exception as error:
            known = error if isinstance(error, EngineError) else EngineError(error_text(error))
            said = Answer(asked.id, "failed", known)
        self._say(member, said)

    def _say(self, member: _Member, answer: Answer) -> None:
        """Send an answer, together with all others of this moment."""
        if not member.outbox:
            asyncio.get_running_loop().call_soon(self._send, member)
        member.outbox.append(answer)

    def _send(self, member: _Member) -> None:
        answers, member.outbox = member.outbox, []
        self._call(member, "answers", answers).add_done_callback(_seen)

    # Workers that are gone

    async def _watch(self, member: _Member) -> None:
        """Find out again and again whether the worker answers."""
        loop = asyncio.get_running_loop()
        asking: asyncio.Future[object] | None = None
        while True:
            asking = asking or self._call(member, "ready")
            await asyncio.wait([asking], timeout=BEAT)
            if asking.done():
                well = asking.exception() is None and isinstance(asking.result(), Hello)
                asking = None
                if well:
                    member.heard = time.monotonic()
                    if member.silence.done():
                        member.silence = loop.create_future()
                elif member.well:
                    log.warning("the worker %s is gone, and is started again", member.name)
                member.well = well
                self._free.set()
                await asyncio.sleep(BEAT)
                continue
            quiet = time.monotonic() - member.heard
            if quiet > SILENT and not member.silence.done():
                log.warning("the worker %s has not answered for %.0f s, and loses its episodes", member.name, quiet)
                member.well = False
                member.silence.set_result(None)
            if quiet > KILLED:
                self._kill(member.handle)
                member.heard = time.monotonic()


@dataclass(frozen=True, slots=True)
class _Listener:
    """Passes on the tokens of one request."""

    say: Callable[[Answer], None]
    id: int

    def tokens(self, ids: object, /) -> None:
        self.say(Answer(self.id, "tokens", ids))

    def again(self) -> None:
        self.say(Answer(self.id, "again"))


async def _awaited(called: Awaitable[object]) -> object:
    return await called


def _seen(call: asyncio.Future[object]) -> None:
    """Take note of the result of a call that has no caller waiting."""
    if not call.cancelled():
        call.exception()


def _tape_of(flight: _Flight, fork: Tape | None) -> Tape:
    inside = tuple(f'{{"t":"{kind}"'.encode() for kind in IN_TAPE)
    return Tape.of(
        [body for body in flight.bodies if body.startswith(inside)],
        layers=[parse_record(body) for body in flight.bodies if not body.startswith(inside)],
        parent=fork,
        file=lambda name: flight.journal.media.get(f"media:{name}"),
    )
