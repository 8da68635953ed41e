"""Samples from servers. Token ids go in, ids and log-probs come out, and weights may change during a completion.

Contract. `complete` returns the tokens that a server sampled after exactly the request's prompt ids, each with its
log-prob and weight version. Otherwise it raises `EngineError`. No request outlives its timeout. While no server
answers, all requests wait and are repeated (`transport/absence.py`). All other retries are up to the agent's model
interface (`LLM`).

A conversation stays with one server, which has its tokens in the prefix cache. After a failed request, it moves to
another server. A new conversation goes to the server with the fewest requests in flight. If a request is cancelled, the
engine aborts it at the server and passes the tokens sampled so far to `request.on_partial`. After a failed weight sync,
the engine refuses all requests.
"""

from __future__ import annotations

import asyncio
import shutil
import tempfile
import time
import uuid
from array import array
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from ....tapes.common.text import logger
from ....tapes.records import Sampling
from ..engine import (
    Capability,
    Completion,
    EngineError,
    EngineStopped,
    Listener,
    PromptTooLong,
    PublishMode,
    Request,
    Sampler,
    one_temperature,
)
from ..transport.absence import Absence, Tries, stop_reason
from ..transport.http_channel import AGAIN, Server, ServerFailed
from ..transport.sse import ChunkStream, Events, StreamFailed
from ..transport.wire import BadAnswer, Dialect, Json, Sampled, checked_ids, same_prompt
from ..weights.sleeping import Sleeper
from ..weights.weight_sync import PublishFailed, WeightSync, check_weights, sync_servers, weight_version, write_weights
from ..weights.weight_transfer import SHARED_MEMORY
from .health import RemoteStats, Wellness
from .server_config import ServerSettings
from .vllm import SCORING_ROUTE, scored, scoring, scoring_shown

if TYPE_CHECKING:
    from torch import Tensor

    from ....tapes.places import Place
    from ...rendering.renderer import Renderer

STREAM = {"stream": True, "stream_options": {"include_usage": True}}
"""Fields in a request's body that ask for a streamed answer."""
HEALTH_SECONDS = 5.0
"""Time limit, in seconds, for finding out whether a server answers at all."""
KEPT = 2
"""Number of weights folders that are kept, one for each of the newest published versions."""
REMEMBERED = 100_000
"""Maximum number of conversations for which the server is remembered. The oldest conversation is forgotten first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Capabilities:
    """What a server can do, as measured by `server_probe.probe`."""

    server: str
    """Name and version of the server software."""
    model: str
    """Name under which the server serves the model."""
    context: int | None
    """Maximum number of tokens in prompt and completion together, or None if it is unknown."""
    logprobs: Literal["processed", "raw"]
    """`processed`: log-probs are computed after temperature is applied. `raw`: they are computed before, so they belong
    to the sampled distribution only if temperature is 1."""
    versions: bool
    """Whether answers name the weight version of each token."""
    takes_weights: bool
    """Whether the server has routes that receive new weights."""
    route: str
    """Route for completions. It takes the prompt as token ids. Only a chat route takes messages, and returns the
    prompt's ids."""
    sees: bool = False
    """Whether the server reads pictures, and turns them into the same tokens as the local renderer."""


log = logger("engine")


class ForeignWeights(EngineError):
    """A server sampled with the wrong weights. Either they are older than the weights that were current when the
    request was sent, or this engine never published them. A restarted server has wrong weights until it gets the run's
    weights again. Also raised if a request ends without a token for that reason."""


@dataclass(slots=True)
class Flight:
    """One request that was sent to a server and isn't answered yet."""

    server: Server
    id: str
    version: str
    """The weight version that was current when the request was sent."""
    pinned: bool = False
    """Whether only `server` may answer the request. Otherwise, a repeated request may go to another server."""
    moment: int = 0
    """The value of `RemoteEngine._moment` when the request was sent. It shows whether a weight sync overlapped the
    request."""
    stream: ChunkStream | None = None
    """The answer received so far, or None if it isn't streamed."""


class RemoteEngine:
    """Samples from one or several servers that serve the same model. Created by `servers.connect.connect`."""

    def __init__(
        self,
        servers: Sequence[Server],
        dialect: Dialect,
        renderer: Renderer,
        capabilities: Capabilities,
        config: ServerSettings,
        *,
        version: str,
        syncs: Sequence[WeightSync] = (),
        takes_weights: bool = False,
    ) -> None:
        """`version` names the weights that the servers have now. `syncs` holds one `WeightSync` for each server. If
        `takes_weights` is true, weights can be replaced. New weights are written to `config.weights_folder`, which is a
        temporary folder by default. The servers must be able to read it. The folders of the `KEPT` newest versions are
        kept."""
        self.name = f"{dialect.name}:{capabilities.model}"
        self.version = version
        self.stats = RemoteStats()
        self.capabilities = capabilities
        can: set[Capability] = {"stats", "copies", "absence", "sleep", "score"}
        can |= {"pictures"} if capabilities.sees else set()
        can |= {"weights"} if takes_weights else set()
        self.can = frozenset(can)
        self.absence = Absence(config.patience)
        self.sleeper = Sleeper(syncs)
        self._servers = tuple(servers)
        self._dialect = dialect
        self._renderer = renderer
        self._config = config
        self._syncs = tuple(syncs)
        self._takes_weights = takes_weights
        self._temporary: Path | None = None
        if config.weights_folder is None:
            within = SHARED_MEMORY if config.publish in ("transfer", "nccl") and SHARED_MEMORY.is_dir() else None
            self._temporary = Path(tempfile.mkdtemp(prefix="tapereel-weights-", dir=within))
        self._homes: OrderedDict[str, Server] = OrderedDict()
        """For each conversation's cache key, the server that holds the conversation's KV in its prefix cache."""
        self._wellness = Wellness()
        self._flights: dict[str, Flight] = {}
        """Requests in flight, by request id."""
        self._versions = {version: 0}
        """The number of each version, in order of publication. The version at connection has number 0."""
        self._written: list[Path] = []
        """Folders with published weights, the oldest first."""
        self._publishing = asyncio.Lock()
        self._moment = 0
        """Increases when a weight sync begins and when it ends, so it is odd while a sync is in progress."""
        self._mixed = 0
        """The value of `_moment` when the last weight sync in a mode other than `drain` began. Completions that were in
        flight at that time may have tokens from two versions."""
        self._restored: dict[str, int] = {}
        """For each restarted server's address, the value of `_moment` when the engine began to send it the run's
        weights again. The server is paused for this, which ends all requests that were sent with this or an earlier
        `_moment`. If one of them has no token yet, its answer names no weight version, and it is sent again."""
        self._broken: Exception | None = None
        """The error of a failed weight sync, or None. It is never cleared, because the weights stay unknown to this
        engine."""
        self._since = 0.0

    @property
    def renderer(self) -> Renderer:
        """The renderer for the servers' model."""
        return self._renderer

    @property
    def context(self) -> int | None:
        """Maximum number of tokens in prompt and completion together, or None if it is unknown."""
        return self.capabilities.context

    @property
    def changing(self) -> bool:
        """Whether a weight sync is in progress."""
        return self._publishing.locked()

    @property
    def samplers(self) -> dict[str, Sampler]:
        """For each server's address, a sampler that uses only that server."""
        return {server.url: partial(self.complete, server=server) for server in self._servers}

    async def complete(self, request: Request, *, server: Server | None = None) -> Completion:
        """Sample one completion on `server`, by default on the conversation's server.

        Raises `PromptTooLong` or `EngineError`. If the call is cancelled, the server has 10 seconds to return the
        tokens sampled so far, and `request.on_partial` gets them. After that, CancelledError is raised."""
        self._check(request)
        flight = Flight(server or self._home(request.cache_key), uuid.uuid4().hex, self.version, server is not None)
        with self._flying(flight):
            # The request runs in its own task behind a shield. If the caller is cancelled, the connection must stay
            # open, because the server will send the tokens sampled before the abort over it.
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

    async def score(
        self, ids: Sequence[int], places: Sequence[Place] = (), picture: Callable[[str], bytes] | None = None
    ) -> array[float]:
        """Return the log-prob of each of `ids[1:]` (see `CapableEngine.score`), as vLLM computes them for a prompt."""
        tokens, sampling = array("i", map(int, ids)), Sampling(max_tokens=1)
        request = Request(messages=(), prompt=tokens, places=tuple(places), picture=picture, sampling=sampling, seed=0)
        self._check(request)
        server, model = self._wellness.best(self._servers), self.capabilities.model
        if not places:  # this route takes no pictures
            return scored(await server.post(SCORING_ROUTE, scoring(model, tokens)), tokens)
        body = await asyncio.to_thread(self._dialect.body, request, model=model, request_id=uuid.uuid4().hex, stops=())
        answer = await server.post(self._dialect.route, scoring_shown(body))
        same_prompt(request, self._dialect.parse(answer))
        return scored(answer, tokens)

    def _note(self, error: EngineError, server: Server, request: Request) -> None:
        """Record a failed request. Raises PromptTooLong if the prompt is too long for the model."""
        # None if the server sent no status, and 0 if the error isn't a `ServerFailed`.
        status = error.status if isinstance(error, ServerFailed) else 0
        if status == 400 and _too_long(str(error)):
            raise PromptTooLong(str(error)) from error
        if status is None or status >= 429 or isinstance(error, ForeignWeights | BadAnswer):
            # Move this conversation to another server, and let new ones avoid this server. A server that fails at once
            # has the fewest requests in flight, so every new conversation would otherwise go there.
            self._homes.pop(request.cache_key, None)
            self._wellness.lost(server)

    def forget(self, cache_key: str) -> None:
        """Forget which server a conversation used, because it has ended."""
        self._homes.pop(cache_key, None)

    async def sync_weights(self, state: Mapping[str, Tensor], version: str, mode: PublishMode = "reprefill") -> None:
        """Replace the weights of all servers with `state`. Tokens sampled afterwards carry `version`.

        Raises ValueError, and changes nothing, if `state` doesn't fit the model or `version` was used before. Raises
        PublishFailed if a step fails. The servers may then have different weights, so later requests are refused.
        Raises EngineStopped if a server doesn't answer within `patience` seconds before the sync, or goes away during
        it. Sleeping servers take back the memory for their weights, but sample only after `wake`."""
        self._check_version(version)
        if not self._takes_weights:
            raise ValueError(f"{self.name} takes no weights: it was connected for sampling only")
        check_weights(state, Path(self._config.model))
        await self._there()
        async with self._publishing, self._stopping():
            folder = self._folder_of(version)
            await asyncio.to_thread(write_weights, state, folder, Path(self._config.model))
            # Before the first server changes, `_moment` must be odd and the version must be known. Completions may
            # return with the new version while the sync is still in progress, and would otherwise be rejected as
            # foreign.
            self._versions[version] = len(self._versions)
            steps: dict[str, float] = {}
            self._moment += 1
            if mode != "drain":
                self._mixed = self._moment
            try:
                with self.stats.timed("publish"):
                    await self.sleeper.weights()
                    await sync_servers(self._syncs, folder, version, mode, steps)
            except BaseException as error:
                # A cancelled sync has failed too, because only some servers may have the new weights. `_moment` stays
                # odd.
                self._broken = error if isinstance(error, Exception) else RuntimeError(repr(error))
                raise
            finally:
                for name, seconds in steps.items():
                    self.stats.add(f"publish/{name}", seconds)
            # All servers have resumed. Answers to requests sent from now on must have this version or a later one.
            self.version = version
            self._moment += 1
            self.stats.publishes += 1
            self._written.append(folder)
            while len(self._written) > KEPT:
                await asyncio.to_thread(shutil.rmtree, self._written.pop(0), True)

    def _check_version(self, version: str) -> None:
        if version in self._versions:
            raise ValueError(f"version {version!r} was published before; a version names one set of weights for good")

    def _folder_of(self, version: str) -> Path:
        folder = self._temporary or Path(self._config.weights_folder or "")
        return folder / version.replace("/", "_").replace(":", "_")

    async def sleep(self) -> None:
        """Free the servers' GPU memory. Requests in flight end as `abort`, and later ones raise EngineError until
        `wake` is called. Does nothing if the servers are asleep already."""
        async with self._stopping():
            with self.stats.timed("sleep"):
                await self.sleeper.sleep()

    async def wake(self) -> None:
        """Let the servers take their GPU memory back and sample again. Does nothing if the servers are awake."""
        async with self._stopping():
            with self.stats.timed("wake"):
                await self.sleeper.wake()

    async def close(self) -> None:
        """Close the connections and delete the temporary weights folder. Requests in flight fail."""
        for server in self._servers:
            await server.close()
        if self._temporary is not None:
            shutil.rmtree(self._temporary, ignore_errors=True)

    # -- one request ----------------------------------------------------------------------------------------------

    def _check(self, request: Request) -> None:
        """Raise EngineError or PromptTooLong if the servers can't answer the request with valid training data."""
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
        if request.places and "pictures" not in self.can:
            raise EngineError(f"{self.name} can't see {request.places[0].media[0]}: use vLLM with --enable-scale-out")
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
        """Send the request. While no server answers, it is repeated for up to `patience` seconds. If the server sampled
        with other weights than the run's, it gets the run's weights, and the request is sent once more. All other
        errors are raised at once, because the agent's model interface retries them and records each attempt."""
        restored = False
        with self.absence.request() as tries:
            while True:
                try:
                    # Moment and version are read right before each attempt, since `_versioned` compares them with the
                    # answer.
                    flight.moment = self._moment
                    with self._sampling_with() as (model, flight.version):
                        found = self._dialect.parse(await self._answer(flight, request, model))
                    # If a sync has failed by now, the answer is rejected although it looks complete.
                    self._stop_if_broken(None)
                    tries.answered()
                    same_prompt(request, found)
                    return self._versioned(found, flight)
                except ForeignWeights as error:
                    if restored:
                        raise
                    restored = True
                    await self._restore(flight.server, error)
                except ServerFailed as error:
                    self._stop_if_broken(error)
                    if error.status != 429 and not flight.pinned:  # stay at a full server, which has the prefix
                        self._homes.pop(request.cache_key, None)
                    await self._wait(flight.server, error, tries)
                    flight.server = flight.server if flight.pinned else self._home(request.cache_key)
                if request.listener is not None:
                    # The stream may have ended after some tokens, and the next attempt samples from the beginning.
                    request.listener.again()

    async def _there(self) -> None:
        """Wait until every server answers on `/health`. A weight sync needs this, since its steps aren't repeated."""
        for server in self._servers:
            async with self._stopping():
                with self.absence.request() as tries:
                    while not await server.healthy(HEALTH_SECONDS):
                        problem = f"{server} does not answer, and new weights are to be sent there"
                        error = ServerFailed(f"{problem}: restart it and resume the run", retry=True)
                        await self._wait(server, error, tries)

    @asynccontextmanager
    async def _stopping(self) -> AsyncIterator[None]:
        """Raise EngineStopped if a control step fails because a server is away. Other errors aren't changed."""
        try:
            yield
        except (PublishFailed, ServerFailed) as error:
            for server in self._servers:
                if server.ended() is not None or not await server.healthy(HEALTH_SECONDS):
                    raise EngineStopped(str(error), "away") from error
            raise

    async def _wait(self, server: Server, error: ServerFailed, tries: Tries) -> None:
        """Wait before the next attempt if a request failed because `server` is away. Raises `error` if the server isn't
        away, and EngineStopped like `Tries.failed`."""
        if not await is_away(server, error, min(HEALTH_SECONDS, self._config.seconds)):
            tries.answered()
            raise error
        self.stats.refused += error.busy
        if error.busy and self._moment % 2:
            tries.answered()  # this engine's weight sync paused it, and has its own time limits
        elif error.status != 429:
            self._wellness.lost(server)
        await tries.failed(error, after=None if error.after is None else min(error.after, 30.0))

    async def _restore(self, server: Server, error: ForeignWeights) -> None:
        """Send the newest weights to a restarted server, because it has lost all weights that were sent to it.

        Raises EngineStopped if this engine has published no weights, because the server then has a different model."""
        if not self._written:
            raise EngineStopped(str(error), "model") from error
        async with self._publishing, self._stopping():
            if await weight_version(server) == self.version:
                return  # restored by another request or a weight sync
            log.warning("%s has other weights than the run, and gets the weights of %s again", server, self.version)
            syncs = [self._syncs[self._servers.index(server)]]
            self._moment += 1
            self._restored[server.url] = self._moment
            try:
                await syncs[0].init()
                await sync_servers(syncs, self._written[-1], self.version, "abort")
            except BaseException as failed:
                self._broken = failed if isinstance(failed, Exception) else RuntimeError(repr(failed))
                raise
            self._moment += 1

    @contextmanager
    def _sampling_with(self) -> Iterator[tuple[str, str]]:
        """Yield the model's name on the servers and the weight version, for use in one request."""
        yield self.capabilities.model, self.version

    async def _answer(self, flight: Flight, request: Request, model: str) -> object:
        ends = () if request.sampling.ignore_eos else (*self._renderer.end_ids, *request.stop_ids)
        stops = dict.fromkeys(ends)
        body_of = partial(self._dialect.body, request, model=model, request_id=flight.id, stops=tuple(stops))
        body = await asyncio.to_thread(body_of) if request.places else body_of()  # pictures are read from files
        # A listener must get only tokens of the final completion. If tokens have no versions, an answer that overlaps a
        # weight sync is rejected and requested again, so the listener gets no tokens at all.
        heard = request.listener if self._dialect.tells and self.capabilities.versions else None
        flight.stream = ChunkStream() if self._dialect.streams or heard is not None else None
        return await answered(flight.server, self._dialect, body, flight.stream, heard, request.on_start)

    def _stop_if_broken(self, cause: Exception | None) -> None:
        """Raise EngineError if a weight sync has failed, because completions from that time have unknown weights."""
        if self._broken is not None:
            raise EngineError(f"a publish failed while this was sampled: {self._broken}") from cause

    def _versioned(self, found: Sampled, flight: Flight) -> Sampled:
        """Return the answer with version spans. Raises ForeignWeights if a version is unknown or older than
        `flight.version`, or if a restarted server ended the request without a token to get the run's weights. Raises
        EngineError if the answer names no versions, but may contain tokens from two versions.

        An answer without spans is accepted only if no sync overlapped the request. All its tokens then have
        `flight.version`. If `flight.moment` is odd, the request was sent during a sync. If `_mixed > flight.moment`, a
        sync in a mode other than `drain` began later. A `drain` sync doesn't count, because it waits until the request
        has ended."""
        if not found.ids and found.finish == "abort" and self._restored.get(flight.server.url, -1) >= flight.moment:
            problem = f"{flight.server} ended a request before its first token, to get the run's weights again"
            raise ForeignWeights(problem, retry=True)
        if found.spans is not None or not found.ids:
            oldest = self._versions[flight.version]
            foreign = {version for version, _, _ in found.spans or () if self._versions.get(version, -1) < oldest}
            if foreign:
                raise ForeignWeights(
                    f"{flight.server} sampled with weights {sorted(foreign)}, which were not "
                    f"published here since {flight.version!r}; was it restarted, or does someone "
                    "else publish to it?",
                    retry=True,
                )
            return found
        if flight.moment % 2 or self._mixed > flight.moment:
            raise EngineError(
                "the weights changed during the request and the server doesn't say which token came from which: "
                "let it serve /inference/v1/generate (vLLM 0.32 and later, --enable-scale-out), or "
                "publish with mode drain",
                retry=True,
            )
        return replace(found, spans=((flight.version, 0, len(found.ids)),))

    async def _abort(self, flight: Flight, asking: asyncio.Future[Sampled]) -> Sampled | None:
        """Abort a cancelled request at the server and return the tokens sampled so far. Returns None if the server
        doesn't send them within 10 seconds, or if the partial answer fails a check."""
        try:
            if flight.stream is not None and self._dialect.streams:
                # The chunks received so far are the partial answer. `asking.cancel()` below closes the connection,
                # which makes the server end the request.
                return self._versioned(self._dialect.parse(flight.stream.answer(cut=True)), flight)
            # The original request is still shielded. The server answers it with the tokens sampled before the abort.
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

    def _home(self, key: str) -> Server:
        """Return the server of the conversation with this cache key. For a new conversation, choose one. `key` is empty
        if the request belongs to no conversation."""
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
        """Register one request in `_flights`, count it and time it. Overlapping requests add to busy time only once."""
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
            if not self._flights:
                stats.busy_seconds += now - self._since


async def is_away(server: Server, error: ServerFailed, seconds: float) -> bool:
    """Return whether the server that failed with `error` can't answer any request at the moment. `seconds` is the time
    limit for the health check. Raises EngineStopped if all later requests would fail too, for example because the API
    key is wrong."""
    reason = stop_reason(error.status, str(error))
    if reason is not None:
        raise EngineStopped(str(error), reason) from error
    ended = server.ended()
    if ended is not None:
        raise EngineStopped(ended, "away") from error
    return error.away if error.away is not None else not await server.healthy(seconds)


async def answered(
    server: Server,
    dialect: Dialect,
    body: Json,
    stream: ChunkStream | None = None,
    listener: Listener | None = None,
    on_start: Callable[[], None] | None = None,
) -> object:
    """Send `body` and return the whole answer. With a `listener`, the answer is streamed. `stream` collects a streamed
    answer, so that the caller has the partial answer after a cancellation. `on_start` is called for each piece of a
    streamed answer that has tokens, because no server reports when it begins to work on a request."""
    if listener is not None:
        body = {**body, **STREAM}
    elif not dialect.streams:
        return await server.post(dialect.route, body)
    events, stream = Events(), stream or ChunkStream()
    try:
        async with aclosing(server.stream(dialect.route, body)) as pieces:
            async for piece in pieces:
                ids = [id for event in events.feed(piece) for id in stream.feed(event)]
                if ids and on_start is not None:
                    on_start()
                if ids and listener is not None:
                    listener.tokens(checked_ids(ids, "stream"))
    except StreamFailed as error:
        if error.status is None:
            raise
        # The HTTP status was 200 when the stream began. The event's own status shows whether the server is busy (503).
        raise ServerFailed(
            f"{server}{dialect.route}: {error.status}: {error}", retry=error.status in AGAIN, status=error.status
        ) from error
    return stream.answer()


def _too_long(message: str) -> bool:
    """Return whether a server's message (status 400) is vLLM's error for a prompt that is too long."""
    return any(sign in message for sign in ("max_model_len", "maximum context length", "maximum model length"))
