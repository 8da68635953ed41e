"""The engine of servers over HTTP: ids in, ids and log-probs out, versions of weights that change under way.

Contract. A completion is what a server sampled after exactly the prompt ids it was given, with the log-prob and the
version of each token, or an `EngineError`; nothing hangs past its timeout. A server that is paused or full is asked
again until `patience` is over. A conversation stays with one server, whose prefix cache knows it, while that server is
well; new ones go where the least is under way. A cancelled request is aborted at the server, and what was sampled by
then is recorded. After a publish that failed, nothing is sampled any more.

Knows nothing of tapes and of training.
"""

from __future__ import annotations

import asyncio
import random
import shutil
import tempfile
import time
import uuid
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import aclosing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from ..engine import Completion, EngineError, Listener, PromptTooLong, Request, one_temperature
from ..transport.http_channel import AGAIN, Channel, ServerFailed
from ..transport.sse import ChunkStream, Events, StreamFailed
from ..transport.wire import BadAnswer, Dialect, Sampled, checked_ids, same_prompt
from ..weights.sleeping import Rests, Sleeper
from ..weights.weight_sync import PublishMode, WeightSync, check_weights, sync_servers, write_weights
from .health import Health, RemoteStats, Wellness, check_all

if TYPE_CHECKING:
    from torch import Tensor

    from ...rendering.renderer import Renderer

STREAM = {"stream": True, "stream_options": {"include_usage": True}}
"""What asks for an answer as a stream."""
REMEMBERED = 100_000
"""Conversations whose server is remembered."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Capabilities:
    """What a server was found to do. Made by a probe of its dialect."""

    server: str
    """Kind and version."""
    model: str
    """The name under which it serves the model."""
    context: int | None
    """Tokens of prompt and completion together."""
    logprobs: Literal["processed", "raw"]
    """After temperature, or before: then only temperature 1 gives the log-probs of what was sampled."""
    versions: bool
    """Whether answers say which weights sampled which token."""
    takes_weights: bool
    """Whether new weights can be published to it."""
    route: str
    """Where it is asked: a route that takes token ids, or one of chat, which takes messages and gives ids."""


class ForeignWeights(EngineError):
    """A server sampled with other weights than those that were published last. One that was started anew has them until
    the next publish."""


@dataclass(slots=True)
class Flight:
    """One request under way."""

    server: Channel
    id: str
    version: str
    """That was current when it was sent."""
    moment: int = 0
    """Of `RemoteEngine._moment`, when it was sent."""
    stream: ChunkStream | None = None
    """What came of its answer by now, where it comes as a stream."""


class RemoteEngine:
    """Samples from one or several servers of the same model. Made by `connect` of a dialect's module."""

    def __init__(
        self,
        servers: Sequence[Channel],
        dialect: Dialect,
        renderer: Renderer,
        capabilities: Capabilities,
        *,
        model_folder: Path,
        version: str,
        syncs: Sequence[WeightSync] = (),
        rests: Sequence[Rests] = (),
        weights_folder: Path | None = None,
        temporary_in: Path | None = None,
        patience: float = 300.0,
        keep: int = 2,
    ) -> None:
        """`version` names the weights that the servers have now. `syncs` and `rests`: how each takes weights, and gives
        its memory away for a while. `weights_folder` is where published weights are written, readable by the servers
        (default: a temporary folder in `temporary_in`); the `keep` newest stay."""
        self.name = f"{dialect.name}:{capabilities.model}"
        self.version = version
        self.stats = RemoteStats()
        self.capabilities = capabilities
        self._servers = tuple(servers)
        self._dialect = dialect
        self._renderer = renderer
        self._model_folder = model_folder
        self._syncs = tuple(syncs)
        self.sleeper = Sleeper(rests)
        self._own_folder = weights_folder is None
        self._folder = weights_folder or Path(tempfile.mkdtemp(prefix="tapereel-weights-", dir=temporary_in))
        self._patience = patience
        self._keep = keep
        self._homes: OrderedDict[str, Channel] = OrderedDict()
        self._wellness = Wellness()
        self._flights: dict[str, Flight] = {}
        """What is under way, by request id."""
        self._versions = {version: 0}
        """What was published, and its place in the order of that."""
        self._written: list[Path] = []
        self._publishing = asyncio.Lock()
        self._moment = 0
        """Counts the beginnings and ends of weight syncs: odd while one is in progress."""
        self._mixed = 0
        """The moment at which the last sync began that lets completions continue, so that they mix two versions."""
        self._broken: Exception | None = None
        self._since = 0.0

    @property
    def renderer(self) -> Renderer:
        """The renderer that the engine was made with."""
        return self._renderer

    @property
    def context(self) -> int | None:
        """Most tokens that prompt and completion may have together."""
        return self.capabilities.context

    @property
    def changing(self) -> bool:
        """Whether new weights are on their way to the servers."""
        return self._publishing.locked()

    async def complete(self, request: Request) -> Completion:
        """Sample. Raises `PromptTooLong` or `EngineError`; a cancelled call gives what was sampled to
        `request.on_partial` if the server still tells within a few seconds."""
        self._check(request)
        flight = Flight(self._home(request.cache_key), uuid.uuid4().hex, self.version)
        with self._flying(flight):
            asking = asyncio.ensure_future(self._ask(flight, request))
            try:
                found = await asyncio.shield(asking)
                self._wellness.reached(flight.server)
                return self._completion(found)
            except asyncio.CancelledError:
                self.stats.cancelled += 1
                partial = await self._abort(flight, asking)
                if partial is not None and request.on_partial is not None:
                    request.on_partial(self._completion(partial, cancelled=True))
                raise
            except EngineError as error:
                self.stats.failed += 1
                self._note(error, flight.server, request)
                raise

    def _note(self, error: EngineError, server: Channel, request: Request) -> None:
        status = error.status if isinstance(error, ServerFailed) else 0
        if status == 400 and _too_long(str(error)):
            raise PromptTooLong(str(error)) from error
        if status is None or status >= 429 or isinstance(error, ForeignWeights | BadAnswer):
            # Another server takes the conversation, and new ones: a server that fails at once has the fewest requests
            # in flight, and the balance would send every new conversation to it.
            self._homes.pop(request.cache_key, None)
            self._wellness.lost(server)

    def forget(self, cache_key: str) -> None:
        """The conversation is over."""
        self._homes.pop(cache_key, None)

    async def sync_weights(self, state: Mapping[str, Tensor], version: str, mode: PublishMode = "reprefill") -> None:
        """Make `state` the weights of all servers; tokens from then on carry `version`. ValueError, before anything has
        changed, when it isn't the model's; PublishFailed, after which the engine samples no more. Servers that are
        asleep get their weights back for it, and sample when they are woken."""
        self._check_version(version)
        if not self._syncs:
            raise ValueError(f"{self.name} takes no weights: it was connected for sampling only")
        check_weights(state, self._model_folder)
        async with self._publishing:
            folder = self._folder_of(version)
            await asyncio.to_thread(write_weights, state, folder, self._model_folder)
            self._note_version(version)
            steps: dict[str, float] = {}
            self._moment += 1
            if mode != "drain":
                self._mixed = self._moment
            try:
                with self.stats.timed("publish"):
                    await self.sleeper.weights()
                    await sync_servers(self._syncs, folder, version, mode, steps)
            except BaseException as error:
                self._broken = error if isinstance(error, Exception) else RuntimeError(repr(error))
                raise
            finally:
                for name, seconds in steps.items():
                    self.stats.add(f"publish/{name}", seconds)
            self.version = version
            self._moment += 1
            self.stats.publishes += 1
            self._written.append(folder)
            while len(self._written) > self._keep:
                await asyncio.to_thread(shutil.rmtree, self._written.pop(0), True)

    def _check_version(self, version: str) -> None:
        if version in self._versions:
            raise ValueError(f"version {version!r} was published before; a version names one set of weights for good")

    def _note_version(self, version: str) -> None:
        self._versions[version] = len(self._versions)

    def _folder_of(self, version: str) -> Path:
        return self._folder / version.replace("/", "_").replace(":", "_")

    async def sleep(self) -> None:
        """Have the servers give their GPUs' memory away; what is under way ends as aborted. Nothing is sampled until
        `wake`; asleep already, nothing is done."""
        with self.stats.timed("sleep"):
            await self.sleeper.sleep()

    async def wake(self) -> None:
        """Have the servers sample again; awake already, nothing is done."""
        with self.stats.timed("wake"):
            await self.sleeper.wake()

    async def health(self, *, seconds: float = 10.0) -> dict[str, Health]:
        """How each server is, by address; asked now and kept in `stats.health`."""
        self.stats.health = found = await check_all(self._servers, seconds=seconds)
        return found

    async def close(self) -> None:
        """Close the connections; requests under way fail."""
        for server in self._servers:
            await server.close()
        if self._own_folder:
            shutil.rmtree(self._folder, ignore_errors=True)

    # -- one request ----------------------------------------------------------------------------------------------

    def _check(self, request: Request) -> None:
        if self._broken is not None:
            raise EngineError(f"the servers' weights are unknown since a publish failed: {self._broken}")
        if self.sleeper.state != "awake":
            raise EngineError(
                f"the servers of {self.name} are {self.sleeper.state}: nothing can be sampled until they "
                "are woken (`await engine.wake()`)"
            )
        one_temperature(request)
        if not request.prompt:
            raise EngineError(
                f"a request without prompt ids: {self.name} samples tokens after tokens, render the "
                "messages with its renderer first"
            )
        if self.context is not None and len(request.prompt) >= self.context:
            raise PromptTooLong(
                f"the prompt has {len(request.prompt)} tokens, the server holds {self.context} for "
                "prompt and completion together"
            )
        if self.capabilities.logprobs == "raw" and request.sampling.temperature != 1.0:
            raise EngineError(
                f"{self.name} gives log-probs from before temperature, so temperature "
                f"{request.sampling.temperature} would be trained with the wrong ones; start the server "
                "with --logprobs-mode processed_logprobs, or sample at temperature 1"
            )

    async def _ask(self, flight: Flight, request: Request) -> Sampled:
        deadline = time.monotonic() + self._patience
        pause = 0.05
        while True:
            try:
                flight.moment = self._moment
                with self._sampling_with() as (model, flight.version):
                    found = self._dialect.parse(await self._answer(flight, request, model))
            except BadAnswer:
                self.stats.bad_answers += 1
                raise
            except ServerFailed as error:
                self._stop_if_broken(error)
                if not error.busy or time.monotonic() > deadline:
                    raise
                self.stats.refused += 1
                wait = error.after if error.after is not None else pause * random.uniform(0.5, 1.5)
                pause = min(pause * 2, 5.0)
                await asyncio.sleep(min(wait, 30.0))
                if request.listener is not None:
                    request.listener.again()
                continue
            self._stop_if_broken(None)
            assert request.prompt is not None
            same_prompt(request.prompt, found.prompt)
            return self._versioned(found, flight)

    @contextmanager
    def _sampling_with(self) -> Iterator[tuple[str, str]]:
        """(name under which the servers know what is sampled from, its version), for the time of one request."""
        yield self.capabilities.model, self.version

    async def _answer(self, flight: Flight, request: Request, model: str) -> Any:
        stops = dict.fromkeys((*self._renderer.end_ids, *request.stop_ids))
        body = self._dialect.body(request, model=model, request_id=flight.id, stops=tuple(stops))
        # Where tokens name no versions, an answer that the weights changed under is asked for again: none is shown.
        heard = request.listener if self._dialect.tells and self.capabilities.versions else None
        flight.stream = ChunkStream() if self._dialect.streams or heard is not None else None
        return await answered(flight.server, self._dialect, body, flight.stream, heard)

    def _stop_if_broken(self, cause: Exception | None) -> None:
        """Reject completions that were in flight during a failed weight sync: their weights are unknown."""
        if self._broken is not None:
            raise EngineError(f"a publish failed while this was sampled: {self._broken}") from cause

    def _versioned(self, found: Sampled, flight: Flight) -> Sampled:
        if found.spans is not None or not found.ids:
            oldest = self._versions[flight.version]
            foreign = {version for version, _, _ in found.spans or () if self._versions.get(version, -1) < oldest}
            if foreign:
                raise ForeignWeights(
                    f"{flight.server} sampled with weights {sorted(foreign)}, which were not "
                    f"published here since {flight.version!r}; was it started anew, or does someone "
                    "else publish to it?",
                    retry=True,
                )
            return found
        if flight.moment % 2 or self._mixed > flight.moment:
            raise EngineError(
                "the weights changed under way and the server doesn't say which token came from which: "
                "let it serve /inference/v1/generate (vLLM 0.32 and later, --enable-scale-out), or "
                "publish with mode drain",
                retry=True,
            )
        return replace(found, spans=((flight.version, 0, len(found.ids)),))

    async def _abort(self, flight: Flight, asking: asyncio.Future[Sampled]) -> Sampled | None:
        """What was sampled of a cancelled request; None when the server doesn't tell any more."""
        try:
            if flight.stream is not None and self._dialect.streams:
                # What came is what was sampled; hanging up ends the rest.
                return self._versioned(self._dialect.parse(flight.stream.answer(cut=True)), flight)
            route, body = self._dialect.abort(flight.id)
            async with asyncio.timeout(10.0):
                await flight.server.post(route, body)
                return await asyncio.shield(asking)
        except (EngineError, TimeoutError):
            return None
        finally:
            asking.cancel()

    def _completion(self, found: Sampled, *, cancelled: bool = False) -> Completion:
        self.stats.tokens += len(found.ids)
        return Completion(
            text=self._renderer.decode(found.ids),
            ids=found.ids,
            logprobs=found.logprobs,
            spans=found.spans or (),
            finish="cancelled" if cancelled else found.finish,
            usage=found.usage,
        )

    def _home(self, key: str) -> Channel:
        home = self._homes.get(key)
        if home is None:
            home = self._wellness.best(self._servers)
            if key:
                self._homes[key] = home
                if len(self._homes) > REMEMBERED:
                    self._homes.popitem(last=False)
        return home

    @contextmanager
    def _flying(self, flight: Flight) -> Iterator[None]:
        """Counts and times one request."""
        stats, began = self.stats, time.perf_counter()
        stats.requests += 1
        if not self._flights:
            self._since = began
        self._flights[flight.id] = flight
        try:
            yield
        finally:
            del self._flights[flight.id]
            now = time.perf_counter()
            stats.add("request", now - began)
            stats.longest_seconds = max(stats.longest_seconds, now - began)
            if not self._flights:
                stats.busy_seconds += now - self._since


async def answered(
    server: Channel, dialect: Dialect, body: Any, stream: ChunkStream | None = None, listener: Listener | None = None
) -> Any:
    """The answer to `body`, whole, whether it comes at once or as a stream, which `listener` has asked for; `stream`
    holds what came of it by now."""
    if listener is not None:
        body = {**body, **STREAM}
    elif not dialect.streams:
        return await server.post(dialect.route, body)
    events, stream = Events(), stream or ChunkStream()
    try:
        async with aclosing(server.stream(dialect.route, body)) as pieces:
            async for piece in pieces:
                ids = [id for event in events.feed(piece) for id in stream.feed(event)]
                if ids and listener is not None:
                    listener.tokens(checked_ids(ids, "stream"))
    except StreamFailed as error:
        if error.status is None:
            raise
        raise ServerFailed(
            f"{server}{dialect.route}: {error.status}: {error}", retry=error.status in AGAIN, status=error.status
        ) from error
    return stream.answer()


def _too_long(message: str) -> bool:
    return any(sign in message for sign in ("max_model_len", "maximum context length", "maximum model length"))


async def weight_version(server: Channel) -> str | None:
    """The version that a server names for its weights; None where it has no route that says it."""
    for route in ("/weight_info", "/model_info"):
        try:
            found: Any = await server.get(route, seconds=30.0)
        except ServerFailed as error:
            if error.status in (403, 404, 405):
                continue
            raise
        if isinstance(found, dict) and found.get("weight_version") is not None:
            return str(found["weight_version"])
    return None
