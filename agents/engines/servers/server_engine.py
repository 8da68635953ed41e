"""Samples from servers. Token ids go in, ids and log-probs come out, and weights may change during a completion.

Contract. `complete` returns the tokens that a server sampled after exactly the request's prompt ids, each with its
log-prob and weight version. Otherwise it raises `EngineError`. No request outlives its timeout. While no server
answers, all requests wait and are repeated (`transport/absence.py`). All other retries are up to the agent's model
interface (`LLM`).

A conversation stays with one server, which has its tokens in the prefix cache. After a failed request, it moves to
another server. A new conversation goes to the server with the fewest requests in flight. If a request is cancelled, the
engine aborts it at the server and passes the tokens sampled so far to `request.on_partial`. Which servers sample, and
with which weights, is up to the `Fleet`.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import aclosing, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Literal

from ....tapes.records import Sampling
from ..embedded.pretrained import vocabulary_of
from ..engine import (
    Capability,
    Completion,
    EngineError,
    GrammarRefused,
    Listener,
    PromptTooLong,
    PublishMode,
    Request,
    Sampler,
    one_temperature,
)
from ..transport.absence import Absence
from ..transport.http_channel import AGAIN, Server, ServerFailed
from ..transport.sse import ChunkStream, Events, StreamFailed
from ..transport.wire import BadAnswer, Dialect, Json, Sampled, check_size, checked_ids, same_prompt
from ..weights.sleeping import Sleeper
from .fleet import Fleet, ForeignWeights, Member
from .health import RemoteStats
from .server_config import ServerSettings
from .vllm import SCORING_ROUTE, scored, scoring, scoring_shown

if TYPE_CHECKING:
    from torch import Tensor

    from ....tapes.places import Place
    from ...rendering.renderer import Renderer

STREAM = {"stream": True, "stream_options": {"include_usage": True}}
"""Fields in a request's body that ask for a streamed answer."""
REMEMBERED = 100_000
"""Maximum number of conversations for which the server is remembered. The oldest conversation is forgotten first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Capabilities:
    """What a server can do, as measured by `server_probe.probe`."""

    server: str
    """Name and version of the server software."""
    model: str
    """Name under which the server serves the model. For SGLang, `engine.model`."""
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
    enforces: bool = False
    """Whether the server keeps answers within a grammar."""
    seeds: bool = True
    """Whether the server draws tokens by the request's seed."""


@dataclass(slots=True)
class Flight:
    """One request that was sent to a server and isn't answered yet."""

    server: Server
    id: str
    version: str
    """The weight version that was current when the request was sent."""
    pinned: bool = False
    """Whether only `server` may answer the request. Otherwise, a repeated request may go to another server."""
    sent: float = 0.0
    """`time.monotonic()` when the request was sent."""
    moment: int = 0
    """The value of `Fleet.moment` when the request was sent. It shows whether a weight sync overlapped the
    request."""
    stream: ChunkStream | None = None
    """The answer received so far, or None if it isn't streamed."""


class RemoteEngine:
    """Samples from one or several servers that serve the same model. Created by `servers.connect.connect`."""

    def __init__(
        self,
        members: Sequence[Member],
        dialect: Dialect,
        renderer: Renderer,
        capabilities: Capabilities,
        config: ServerSettings,
        *,
        version: str,
        takes_weights: bool = False,
    ) -> None:
        """`version` names the weights that the servers have now. If `takes_weights` is true, weights can be replaced.
        New weights are written to `config.weights_folder`, which is a temporary folder by default. The servers must be
        able to read it. The folders of the newest versions are kept."""
        self.name = f"{dialect.name}:{capabilities.model}"
        self.stats = RemoteStats()
        self.capabilities = capabilities
        can: set[Capability] = {"stats", "copies", "absence", "sleep"}
        can |= {"score"} if dialect.name != "sglang" else set()
        can |= {"pictures"} if capabilities.sees else set()
        can |= {"grammar"} if capabilities.enforces else set()
        can |= {"weights"} if takes_weights else set()
        self.can = frozenset(can)
        send = self._send_newest if takes_weights else None
        self.fleet = Fleet(members, config, version=version, stats=self.stats, send=send)
        self._dialect = dialect
        self._renderer = renderer
        self._config = config
        self._vocabulary = vocabulary_of(config.model)
        self._homes: OrderedDict[str, Server] = OrderedDict()
        """For each conversation's cache key, the server that holds the conversation's KV in its prefix cache."""
        self._flights: dict[str, Flight] = {}
        """Requests in flight, by request id."""
        self._since = 0.0

    @property
    def version(self) -> str:
        """The version of the newest weights."""
        return self.fleet.version

    @property
    def absence(self) -> Absence:
        """How long the engine has waited for servers that don't answer."""
        return self.fleet.absence

    @property
    def sleeper(self) -> Sleeper:
        """Puts the servers to sleep and wakes them."""
        return self.fleet.sleeper

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
        return self.fleet.publishing.locked()

    @property
    def samplers(self) -> dict[str, Sampler]:
        """For the address of each server that has the newest weights, a sampler that uses only that server."""
        return {one.server.url: partial(self.complete, server=one.server) for one in self.fleet.ready}

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
                self.fleet.reached(flight.server)
                return self._completion(request, found)
            except asyncio.CancelledError:
                self.stats.cancelled += 1
                partial = await self._abort(flight, asking, request)
                if partial is not None and request.on_partial is not None:
                    request.on_partial(self._completion(request, partial, cancelled=True))
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
        server, model = self.fleet.best(), self.capabilities.model
        if not places:  # this route takes no pictures
            return scored(await server.post(SCORING_ROUTE, scoring(model, tokens)), tokens)
        body = await asyncio.to_thread(self._dialect.body, request, model=model, request_id=uuid.uuid4().hex, stops=())
        answer = await server.post(self._dialect.route, scoring_shown(body))
        same_prompt(request, self._dialect.parse(answer))
        return scored(answer, tokens)

    def _note(self, error: EngineError, server: Server, request: Request) -> None:
        """Record a failed request. Raises PromptTooLong if the prompt is too long for the model, and GrammarRefused if
        the server refuses a request with a grammar."""
        # None if the server sent no status, and 0 if the error isn't a `ServerFailed`.
        status = error.status if isinstance(error, ServerFailed) else 0
        if status == 400 and _too_long(str(error)):
            raise PromptTooLong(str(error)) from error
        if status == 400 and request.grammar:
            raise GrammarRefused(str(error)) from error
        if status is None or status >= 429 or isinstance(error, ForeignWeights | BadAnswer):
            # Move this conversation to another server, and let new ones avoid this server. A server that fails at once
            # has the fewest requests in flight, so every new conversation would otherwise go there.
            self._homes.pop(request.cache_key, None)
            self.fleet.lost(server)

    def forget(self, cache_key: str) -> None:
        """Forget which server a conversation used, because it has ended."""
        self._homes.pop(cache_key, None)

    async def sync_weights(self, state: Mapping[str, Tensor], version: str, mode: PublishMode = "reprefill") -> None:
        """Replace the weights of all servers with `state`. Tokens sampled afterwards carry `version`.

        A server that fails is left out until it has the newest weights. `samplers` then has the others.

        Raises ValueError, and changes nothing, if `state` doesn't fit the model or `version` was used before. Raises
        PublishFailed if a step has failed on all servers. Their weights are unknown then, so later requests are
        refused. Raises EngineStopped if no server answers within `patience` seconds before the sync, or the last one
        goes away during it. Sleeping servers take back the memory for their weights, but sample only after `wake`."""
        self.fleet.check_version(version)
        if "weights" not in self.can:
            raise ValueError(f"{self.name} takes no weights: it was connected for sampling only")
        await self.fleet.publish(state, version, mode)

    async def _send_newest(self, member: Member) -> bool:
        return await self.fleet.send_again(member)

    async def sleep(self) -> None:
        """Free the servers' GPU memory. Requests in flight end as `abort`, and later ones raise EngineError until
        `wake` is called. Does nothing if the servers are asleep already."""
        async with self.fleet.stopping():
            with self.stats.timed("sleep"):
                await self.sleeper.sleep()

    async def wake(self) -> None:
        """Let the servers take their GPU memory back and sample again. Does nothing if the servers are awake."""
        async with self.fleet.stopping():
            with self.stats.timed("wake"):
                await self.sleeper.wake()

    async def close(self) -> None:
        """Close the connections and delete the temporary weights folder. Requests in flight fail."""
        await self.fleet.close()

    # -- one request ----------------------------------------------------------------------------------------------

    def _check(self, request: Request) -> None:
        """Raise EngineError or PromptTooLong if the servers can't answer the request with valid training data."""
        if self.fleet.broken is not None:
            raise EngineError(f"the servers' weights are unknown since a publish failed: {self.fleet.broken}")
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
        """Send the request. While no server answers, it is repeated for up to `patience` seconds. If the server was
        left out meanwhile, the request goes to another one. If it sampled with other weights than the run's, it gets
        the run's weights, and the request is sent once more. All other errors are raised at once, because the agent's
        model interface retries them and records each attempt."""
        restored = False
        with self.absence.request() as tries:
            while True:
                try:
                    # These three are read right before each attempt, since the answer is compared with them.
                    flight.sent, flight.moment = time.monotonic(), self.fleet.moment
                    with self._sampling_with() as (model, flight.version):
                        found = self._dialect.parse(await self._answer(flight, request, model))
                    # If a sync has failed by now, the answer is rejected although it looks complete.
                    self.fleet.stop_if_broken(None)
                    tries.answered()
                    same_prompt(request, found)
                    return self._accepted(found, flight, request)
                except ForeignWeights as error:
                    if self.fleet.samples(flight.server):
                        if restored:
                            raise
                        restored = True
                        await self.fleet.restore(flight.server, error, flight.sent)
                except ServerFailed as error:
                    self.fleet.stop_if_broken(error)
                    if flight.pinned:
                        await self.fleet.leave_out_if_away(flight.server, error)
                    if self.fleet.samples(flight.server):
                        if error.status != 429 and not flight.pinned:  # stay at a full server, which has the prefix
                            self._homes.pop(request.cache_key, None)
                        await self.fleet.wait(flight.server, error, tries)
                if not flight.pinned:
                    flight.server = self._home(request.cache_key)
                elif not self.fleet.samples(flight.server):
                    raise EngineError(f"{flight.server} was left out, because it lacks the newest weights")
                if request.listener is not None:
                    # The stream may have ended after some tokens, and the next attempt samples from the beginning.
                    request.listener.again()

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

    def _accepted(self, found: Sampled, flight: Flight, request: Request) -> Sampled:
        """Return the answer with version spans. Raises EngineError if it can't be used."""
        check_size(request, found, self._vocabulary)
        self.fleet.check_sender(flight.server, flight.sent)
        return self._versioned(found, flight)

    def _versioned(self, found: Sampled, flight: Flight) -> Sampled:
        """Return the answer with version spans. Raises ForeignWeights if a version is unknown or older than
        `flight.version`. Raises EngineError if the answer names no versions, but may contain tokens from two versions.

        An answer without spans is accepted only if no sync overlapped the request. All its tokens then have
        `flight.version`. If `flight.moment` is odd, the request was sent during a sync. If `mixed > flight.moment`, a
        sync in a mode other than `drain` began later. A `drain` sync doesn't count, because it waits until the request
        has ended."""
        fleet = self.fleet
        if found.spans is not None or not found.ids:
            oldest = fleet.versions[flight.version]
            foreign = {version for version, _, _ in found.spans or () if fleet.versions.get(version, -1) < oldest}
            if foreign:
                raise ForeignWeights(
                    f"{flight.server} sampled with weights {sorted(foreign)}, which were not "
                    f"published here since {flight.version!r}; was it restarted, or does someone "
                    "else publish to it?",
                    retry=True,
                )
            return found
        if flight.moment % 2 or fleet.mixed > flight.moment:
            raise EngineError(
                "the weights changed during the request and the server doesn't say which token came from which: "
                "let it serve /inference/v1/generate (vLLM 0.32 and later, --enable-scale-out), or "
                "publish with mode drain",
                retry=True,
            )
        return replace(found, spans=((flight.version, 0, len(found.ids)),))

    async def _abort(self, flight: Flight, asking: asyncio.Future[Sampled], request: Request) -> Sampled | None:
        """Abort a cancelled request at the server and return the tokens sampled so far. Returns None if the server
        doesn't send them within 10 seconds, or if the partial answer fails a check."""
        try:
            if flight.stream is not None and self._dialect.streams:
                # The chunks received so far are the partial answer. `asking.cancel()` below closes the connection,
                # which makes the server end the request.
                return self._accepted(self._dialect.parse(flight.stream.answer(cut=True)), flight, request)
            # The original request is still shielded. The server answers it with the tokens sampled before the abort.
            route, body = self._dialect.abort(flight.id)
            async with asyncio.timeout(10.0):
                await flight.server.post(route, body)
                return await asyncio.shield(asking)
        except (EngineError, TimeoutError):
            return None
        finally:
            asking.cancel()

    def _completion(self, request: Request, found: Sampled, *, cancelled: bool = False) -> Completion:
        self.stats.tokens += len(found.ids)
        # vLLM applies the grammar to the logits first, so its log-probs aren't the model's own, and those are unknown.
        unknown = array("f", [float("nan")]) * len(found.ids)
        return Completion(
            text=self._renderer.decode(found.ids),
            ids=found.ids,
            logprobs=unknown if request.grammar else found.logprobs,
            enforced=bool(request.grammar),
            spans=found.spans or (),
            finish="cancelled" if cancelled else found.finish,
            usage=found.usage,
        )

    def _home(self, key: str) -> Server:
        """Return the server of the conversation with this cache key. For a new conversation, choose one. `key` is empty
        if the request belongs to no conversation."""
        home = self._homes.get(key)
        if home is None or not self.fleet.samples(home):
            home = self.fleet.best()
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
