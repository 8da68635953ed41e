"""A worker runs episodes for the process that leads the run, perhaps on another machine.

    lead                                             worker

    attempt(place)  ------------------------------>  rollout(...)
                    <------------------------------  Batch: records and pictures, at the end or before an action
    go_on(tape)     ------------------------------>  (the lead has made them durable)
    requests()      <------------------------------  requests to an engine that the lead owns
    answers(...)    ------------------------------>
    cancel(tape)    ------------------------------>  the episode ends as cancelled

A `Place` has everything that the episode needs. The worker keeps nothing on its disk. The lead appends the records
unchanged, so the tape has the worker's digest.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import pickle
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple

from ...tapes import Tape
from ...tapes.journal import Durability
from ...tapes.pictures import MediaReference, Received, pictures_of
from ..engines.engine import Capability, Completion, Engine, EngineError, EngineStopped, Request
from ..engines.team_engine import TeamEngine
from ..episode.rollout import rollout
from ..episode.spec import EpisodeSpec
from ..setup.engine_config import AnyEngineConfig
from ..setup.setup import LoadedScene, Setup
from ..setup.team_config import make_team, renderer_of

if TYPE_CHECKING:
    from ..rendering.renderer import Renderer
    from ..setup.team_config import PartnerConfig

PARTIAL_SECONDS = 10.0
"""A cancelled request has this many seconds to return the tokens sampled so far."""
_RANKS = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "GROUP_RANK")
"""Variables of a trainer's process. A worker that inherits them must not take itself for a rank."""


class Engines(NamedTuple):
    """The settings of the run's engines."""

    engine: AnyEngineConfig
    players: Mapping[str, PartnerConfig]


class LentEngine(NamedTuple):
    """An engine of the lead that answers requests from workers."""

    name: str
    can: frozenset[Capability]
    context: int | None
    renders: bool
    """Whether it has a renderer. The worker then loads one with the same settings."""

    @classmethod
    def of(cls, engine: Engine) -> LentEngine:
        can = engine.can & {"pictures", "grammar"}
        return cls(engine.name, frozenset(can), engine.context, engine.renderer is not None)


@dataclass(slots=True)
class Place:
    """One episode to run."""

    tape: str
    spec: str
    """The `EpisodeSpec` as JSON, without its fork."""
    durability: Durability
    lent: dict[str, LentEngine] | None
    """The lead's engines, by the agents' path. None means that the worker has engines of its own."""
    fork: list[list[bytes]]
    """The records of the tape that is continued, and of the tapes that it continues, with the oldest first."""
    files: dict[str, bytes]
    """The pictures in the task and in the fork, by file name."""

    @classmethod
    def of(cls, spec: EpisodeSpec, durability: Durability, engine: Engine | None) -> Place:
        """Blocks if there are pictures. `engine` is None if the worker has engines of its own."""
        assert spec.tape_id is not None
        line = ancestry(spec.fork)
        shown = [*pictures_of(spec.task.pictures), *(one for tape in line for s in tape for one in pictures_of(s))]
        files = {one.name: data for one in shown if (data := one.data) is not None}
        engines = engine.engines if isinstance(engine, TeamEngine) else None if engine is None else {"": engine}
        return cls(
            tape=spec.tape_id,
            spec=spec.model_dump_json(exclude={"fork"}),
            durability=durability,
            lent=None if engines is None else {path: LentEngine.of(one) for path, one in engines.items()},
            fork=[tape.bodies for tape in line],
            files=files,
        )

    def read(self) -> EpisodeSpec:
        """Return the spec. Blocks if there are pictures."""
        fork: Tape | None = None
        for bodies in self.fork:
            fork = Tape.of(bodies, parent=fork, file=self.files.__getitem__)
        spec = EpisodeSpec.model_validate_json(self.spec, context=Received(self.files) if self.files else None)
        return spec if fork is None else spec.model_copy(update={"fork": fork})


def ancestry(tape: Tape | None) -> list[Tape]:
    """Return the tape and those that it continues, with the oldest first."""
    line: list[Tape] = []
    while tape is not None:
        line.insert(0, tape)
        tape = tape.log.parent
    return line


@dataclass(slots=True)
class Batch:
    """The records of an episode since its last batch."""

    records: list[bytes]
    files: dict[str, bytes]
    """The pictures that these records name, by file name."""
    ended: bool
    error: EngineStopped | None = None
    """An error that stops the run. The tape is closed nevertheless."""


Said = Literal["done", "failed", "cancelled", "started", "tokens", "again"]


class Answer(NamedTuple):
    """What an engine of the lead says about a request."""

    id: int
    what: Said
    value: object = None


class Asked(NamedTuple):
    """A request to an engine of the lead, or the wish to cancel it."""

    id: int
    tape: str
    request: Request | None
    """None cancels the request `id`."""
    files: Mapping[str, bytes] = {}
    streamed: bool = False


class Hello(NamedTuple):
    """What a worker says of itself."""

    machine: str
    pid: int
    clock: float
    package: str
    """A digest of Tapereel's own code."""
    code: Mapping[str, str]
    tokenizer: str | None


class WorkerSetup(NamedTuple):
    """What a worker loads."""

    sources: bytes
    """The pickled agent and environment. Each is a name or an object."""
    settings: Setup
    engines: Engines
    folder: str
    path: tuple[str, ...]

    def load(self) -> tuple[LoadedScene, Renderer | None]:
        for name in _RANKS:
            os.environ.pop(name, None)
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
        if Path(self.folder).is_dir():  # relative names of files mean the same as in the lead
            os.chdir(self.folder)
        sys.path += [part for part in self.path if part not in sys.path]
        agent, env = pickle.loads(self.sources)
        return self.settings.scene(agent=agent, env=env), renderer_of(self.engines.engine)


class Worker:
    """Runs episodes for one lead. All methods run in one event loop."""

    def __init__(self, setup: WorkerSetup) -> None:
        """Nothing is loaded before `ready`."""
        self._setup = setup
        self._loading: asyncio.Future[tuple[LoadedScene, Renderer | None]] | None = None
        self._own: asyncio.Future[Engine] | None = None
        self._episodes: dict[str, _Episode] = {}
        self._outbox: list[Asked] = []
        self._news = asyncio.Event()
        self._polls = 0
        self._waiting: dict[int, _Waiting] = {}
        self._numbers = count()

    async def ready(self) -> Hello:
        """Load everything if it isn't loaded yet."""
        scene, renderer = await self._loaded()
        tokenizer = renderer.tokenizer_hash + renderer.template_hash if renderer is not None else None
        return Hello(socket.gethostname(), os.getpid(), time.time(), package_digest(), scene.code, tokenizer)

    async def _loaded(self) -> tuple[LoadedScene, Renderer | None]:
        if self._loading is None:
            self._loading = asyncio.ensure_future(asyncio.to_thread(self._setup.load))
        return await asyncio.shield(self._loading)

    async def attempt(self, place: Place) -> Batch:
        """Run the episode until it ends or needs its records to be durable."""
        scene, renderer = await self._loaded()
        spec = await asyncio.to_thread(place.read) if place.files else place.read()
        journal = MemoryJournal(place.durability, place.files)
        engine = await self._own_engine() if place.lent is None else self._lent(place, journal, renderer)
        running = rollout(scene.agent, scene.env, spec, engine=engine, journal=journal)
        self._episodes[place.tape] = _Episode(journal, asyncio.ensure_future(running))
        return await self.go_on(place.tape)

    async def go_on(self, tape: str) -> Batch:
        """Continue the episode, because everything before is durable. Return as `attempt` does."""
        episode = self._episodes[tape]
        journal, task = episode
        journal.go_on.set()
        stopped = asyncio.ensure_future(journal.stopped.wait())
        await asyncio.wait([stopped, task], return_when=asyncio.FIRST_COMPLETED)
        journal.stopped.clear()
        stopped.cancel()
        if not task.done():
            return journal.batch(ended=False)
        del self._episodes[tape]
        error = None if task.cancelled() else task.exception()
        if error is not None and not isinstance(error, EngineStopped):
            raise error
        return replace(journal.batch(ended=True), error=error)

    async def cancel(self, tape: str) -> None:
        """End the episode as cancelled. The call that waits for its records returns them."""
        if tape in self._episodes:
            self._episodes[tape].task.cancel()

    # Engines

    async def _own_engine(self) -> Engine:
        if self._own is None:
            self._own = asyncio.ensure_future(self._make_engine())
        return await asyncio.shield(self._own)

    async def _make_engine(self) -> Engine:
        return (await make_team(*self._setup.engines))[0]

    def _lent(self, place: Place, journal: MemoryJournal, renderer: Renderer | None) -> Engine:
        assert place.lent is not None
        engines = {
            path: _Borrowed(self, one, place.tape, journal, renderer if one.renders else None)
            for path, one in place.lent.items()
        }
        return TeamEngine(engines) if len(engines) > 1 else engines[""]

    async def requests(self) -> list[Asked]:
        """Wait for requests to the lead's engines, and return all that there are. An earlier call returns nothing,
        because its caller is gone."""
        self._polls += 1
        mine = self._polls
        self._news.set()
        while mine == self._polls and not self._outbox:
            self._news.clear()
            await self._news.wait()
        if mine != self._polls:
            return []
        found, self._outbox = self._outbox, []
        return found

    def _send(self, asked: Asked) -> None:
        self._outbox.append(asked)
        self._news.set()

    async def answers(self, answers: Sequence[Answer]) -> None:
        """Pass on what the lead's engines say."""
        for answer in answers:
            if answer.id in self._waiting:
                self._waiting[answer.id].hear(answer)

    async def ask(self, tape: str, request: Request, files: Mapping[str, bytes]) -> Completion:
        """Let the lead's engine answer a request. If this is cancelled, `request.on_partial` gets what was sampled."""
        number, waiting = next(self._numbers), _Waiting(request, asyncio.get_running_loop().create_future())
        sent = replace(request, on_partial=None, on_start=None, picture=None, listener=None)
        if sent.prompt is not None:
            sent = replace(sent, messages=())  # the tokens say the same
        self._waiting[number] = waiting
        self._send(Asked(number, tape, sent, files, request.listener is not None))
        try:
            return await asyncio.shield(waiting.answer)
        except asyncio.CancelledError:
            self._send(Asked(number, tape, None))
            with suppress(TimeoutError, EngineError):
                async with asyncio.timeout(PARTIAL_SECONDS):
                    partial = await asyncio.shield(waiting.answer)
                    if request.on_partial is not None:
                        request.on_partial(partial)
            raise
        finally:
            del self._waiting[number]


class _Episode(NamedTuple):
    journal: MemoryJournal
    task: asyncio.Task[Tape]


@dataclass(slots=True)
class _Waiting:
    """A request that the lead hasn't answered yet."""

    request: Request
    answer: asyncio.Future[Completion]

    def hear(self, said: Answer) -> None:
        match said.what, said.value:
            case (("done" | "cancelled"), Completion() as completion):
                self.answer.set_result(completion)
            case (("failed" | "cancelled"), Exception() as error):
                self.answer.set_exception(error)
            case "started", _ if self.request.on_start is not None:
                self.request.on_start()
            case "tokens", ids if self.request.listener is not None:
                self.request.listener.tokens(ids)  # pyright: ignore[reportArgumentType]
            case "again", _ if self.request.listener is not None:
                self.request.listener.again()
            case _:
                pass


class _Borrowed:
    """An `Engine` that lets an engine of the lead answer the requests of one episode."""

    def __init__(
        self, worker: Worker, lent: LentEngine, tape: str, journal: MemoryJournal, renderer: Renderer | None
    ) -> None:
        self.name, self.can, self.context, self.renderer = lent.name, lent.can, lent.context, renderer
        self._ask = worker.ask
        self._tape, self._journal = tape, journal

    async def complete(self, request: Request) -> Completion:
        names = dict.fromkeys(name for place in request.places for name in place.media)
        files: dict[str, bytes] = {}
        if request.picture is not None:
            for name in [name for name in names if name not in self._journal.sent]:
                files[name] = await asyncio.to_thread(request.picture, name)
                self._journal.sent.add(name)
        return await self._ask(self._tape, request, files)

    def forget(self, cache_key: str) -> None:
        """The lead forgets all keys of an episode at its end."""

    async def close(self) -> None:
        """The lead closes its engine."""


class MemoryJournal:
    """The journal of one episode, whose records the lead writes. It is its own media folder."""

    def __init__(self, durability: Durability, files: Mapping[str, bytes]) -> None:
        self.durability = durability
        self.media = self
        self.sent: set[str] = set(files)
        """Names of the pictures that the lead has."""
        self.stopped, self.go_on = asyncio.Event(), asyncio.Event()
        self._files = dict(files)
        self._records: list[bytes] = []
        self._ended = False

    def put(self, data: bytes, suffix: str = "") -> MediaReference:
        name = f"{hashlib.sha256(data).hexdigest()}{suffix}"
        self._files[name] = data
        return MediaReference(f"media:{name}")

    def get(self, reference: str) -> bytes:
        return self._files[reference.removeprefix("media:")]

    def append(self, body: bytes) -> None:
        self._records.append(body)
        self._ended = self._ended or body.startswith(b'{"t":"end"')

    async def durable(self) -> None:
        """Wait until the lead has made all records durable. The last ones go with the episode's end."""
        if self._records and not self._ended:
            self.go_on.clear()
            self.stopped.set()
            await self.go_on.wait()

    def batch(self, *, ended: bool) -> Batch:
        """Return what the lead hasn't got yet."""
        records, self._records = self._records, []
        files = {name: data for name, data in self._files.items() if name not in self.sent}
        self.sent.update(files)
        return Batch(records, files, ended)


@cache
def package_digest() -> str:
    """Return a digest of Tapereel's own code."""
    root = Path(__file__).parents[2]
    found = hashlib.sha256()
    for folder in ("agents", "envs", "tapes"):
        for path in sorted((root / folder).rglob("*.py")):
            found.update(path.read_bytes())
    return found.hexdigest()[:16]
