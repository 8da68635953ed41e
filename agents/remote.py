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
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from .engine import Completion, EngineError, PromptTooLong, Request
from .http import Server, ServerFailed
from .publishing import PublishMode, WeightSync, check_weights, publish, write_weights
from .wire import BadAnswer, Dialect, Sampled

if TYPE_CHECKING:
    from torch import Tensor

    from .render import Renderer

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


@dataclass(slots=True)
class RemoteStats:
    """Sums since the engine was made."""

    requests: int = 0
    tokens: int = 0
    """Sampled and returned."""
    refused: int = 0
    """Answers 429 and 503, asked again."""
    bad_answers: int = 0
    busy_seconds: float = 0.0
    """Wall time in which at least one request was under way."""


class RemoteEngine:
    """Samples from one or several servers of the same model. Made by `connect` of a dialect's module."""

    def __init__(
        self,
        servers: Sequence[Server],
        dialect: Dialect,
        renderer: Renderer,
        capabilities: Capabilities,
        *,
        model_folder: Path,
        version: str,
        syncs: Sequence[WeightSync] = (),
        weights_folder: Path | None = None,
        patience: float = 300.0,
        keep: int = 2,
    ) -> None:
        """`version` names the weights that the servers have now. `weights_folder` is where published weights are
        written, readable by the servers (default: a temporary folder); the `keep` newest stay."""
        self.name = f"{dialect.name}:{capabilities.model}"
        self.version = version
        self.stats = RemoteStats()
        self.capabilities = capabilities
        self._servers = tuple(servers)
        self._dialect = dialect
        self._renderer = renderer
        self._model_folder = model_folder
        self._syncs = tuple(syncs)
        self._own_folder = weights_folder is None
        self._folder = weights_folder or Path(tempfile.mkdtemp(prefix="tapereel-weights-"))
        self._patience = patience
        self._keep = keep
        self._homes: OrderedDict[str, Server] = OrderedDict()
        self._versions = {version}
        self._written: list[Path] = []
        self._publishing = asyncio.Lock()
        self._broken: Exception | None = None
        self._under_way = 0
        self._since = 0.0

    @property
    def renderer(self) -> Renderer:
        """The renderer that the engine was made with."""
        return self._renderer

    @property
    def context(self) -> int | None:
        """Most tokens that prompt and completion may have together."""
        return self.capabilities.context

    async def complete(self, request: Request) -> Completion:
        """Sample. Raises `PromptTooLong` or `EngineError`; a cancelled call gives what was sampled to
        `request.on_partial` if the server still tells within a few seconds."""
        self._check(request)
        server = self._home(request.cache_key)
        request_id = uuid.uuid4().hex
        self._begin()
        asking = asyncio.ensure_future(self._ask(server, request, request_id))
        try:
            return self._completion(await asyncio.shield(asking))
        except asyncio.CancelledError:
            partial = await self._abort(server, request_id, asking)
            if partial is not None and request.on_partial is not None:
                request.on_partial(self._completion(partial, cancelled=True))
            raise
        except ServerFailed as error:
            if error.status == 400 and request.prompt is not None and _too_long(str(error)):
                raise PromptTooLong(str(error)) from error
            if error.status is None:
                self._homes.pop(request.cache_key, None)  # let another server take the conversation
            raise
        finally:
            self._end()

    def forget(self, cache_key: str) -> None:
        """The conversation is over."""
        self._homes.pop(cache_key, None)

    async def publish(self, state: Mapping[str, Tensor], version: str, mode: PublishMode = "reprefill") -> None:
        """Make `state` the weights of all servers; tokens from then on carry `version`. ValueError, before anything has
        changed, when it isn't the model's; PublishFailed, after which the engine samples no more."""
        if version in self._versions:
            raise ValueError(f"version {version!r} was published before; a version names one set of weights for good")
        if not self._syncs:
            raise ValueError(f"{self.name} takes no weights: it was connected for sampling only")
        check_weights(state, self._model_folder)
        async with self._publishing:
            folder = self._folder / version.replace("/", "_").replace(":", "_")
            await asyncio.to_thread(write_weights, state, folder, self._model_folder)
            self._versions.add(version)
            try:
                await publish(self._syncs, folder, version, mode)
            except BaseException as error:
                self._broken = error if isinstance(error, Exception) else RuntimeError(repr(error))
                raise
            self.version = version
            self._written.append(folder)
            while len(self._written) > self._keep:
                await asyncio.to_thread(shutil.rmtree, self._written.pop(0), True)

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
        if not request.prompt:
            raise EngineError(f"a request without prompt ids: {self.name} samples tokens after tokens, render the "
                              "messages with its renderer first")  # fmt: skip
        if self.context is not None and len(request.prompt) >= self.context:
            raise PromptTooLong(f"the prompt has {len(request.prompt)} tokens, the server holds {self.context} for "
                                "prompt and completion together")  # fmt: skip
        if self.capabilities.logprobs == "raw" and request.sampling.temperature != 1.0:
            raise EngineError(f"{self.name} gives log-probs from before temperature, so temperature "
                              f"{request.sampling.temperature} would be trained with the wrong ones; start the server "
                              "with --logprobs-mode processed_logprobs, or sample at temperature 1")  # fmt: skip

    async def _ask(self, server: Server, request: Request, request_id: str) -> Sampled:
        stops = dict.fromkeys((*self._renderer.end_ids, *request.stop_ids))
        body = self._dialect.body(request, model=self.capabilities.model, request_id=request_id, stops=tuple(stops))
        deadline = time.monotonic() + self._patience
        pause = 0.05
        while True:
            before = self.version
            try:
                found = self._dialect.parse(await server.post(self._dialect.route, body))
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
                continue
            self._stop_if_broken(None)
            return self._versioned(found, before)

    def _stop_if_broken(self, cause: Exception | None) -> None:
        """What was under way when a publish failed was sampled by nobody knows which weights."""
        if self._broken is not None:
            raise EngineError(f"a publish failed while this was sampled: {self._broken}") from cause

    def _versioned(self, found: Sampled, before: str) -> Sampled:
        if found.spans is not None or not found.ids:
            unknown = {version for version, _, _ in found.spans or ()} - self._versions
            if unknown:
                raise EngineError(f"the server sampled with weights {sorted(unknown)}, which were not published here; "
                                  "does someone else publish to it?")  # fmt: skip
            return found
        if before != self.version:
            raise EngineError("the weights changed under way and the server doesn't say which token came from which: "
                              "it is too old (vLLM before 0.32), or publish with mode drain", retry=True)  # fmt: skip
        return Sampled(ids=found.ids, logprobs=found.logprobs, spans=((before, 0, len(found.ids)),),
                       finish=found.finish, usage=found.usage)  # fmt: skip

    async def _abort(self, server: Server, request_id: str, asking: asyncio.Future[Sampled]) -> Sampled | None:
        """What was sampled of a cancelled request; None when the server doesn't tell any more."""
        route, body = self._dialect.abort(request_id)
        try:
            async with asyncio.timeout(10.0):
                await server.post(route, body)
                return await asyncio.shield(asking)
        except (EngineError, TimeoutError):
            return None
        finally:
            asking.cancel()

    def _completion(self, found: Sampled, *, cancelled: bool = False) -> Completion:
        self.stats.tokens += len(found.ids)
        return Completion(
            text=self._renderer.decode(found.ids), ids=found.ids, logprobs=found.logprobs, spans=found.spans or (),
            finish="cancelled" if cancelled else found.finish, usage=found.usage,
        )  # fmt: skip

    def _home(self, key: str) -> Server:
        home = self._homes.get(key)
        if home is None:
            home = min(self._servers, key=lambda server: server.in_flight)
            if key:
                self._homes[key] = home
                if len(self._homes) > REMEMBERED:
                    self._homes.popitem(last=False)
        return home

    def _begin(self) -> None:
        self.stats.requests += 1
        if not self._under_way:
            self._since = time.perf_counter()
        self._under_way += 1

    def _end(self) -> None:
        self._under_way -= 1
        if not self._under_way:
            self.stats.busy_seconds += time.perf_counter() - self._since


def _too_long(message: str) -> bool:
    return any(sign in message for sign in ("max_model_len", "maximum context length", "maximum model length"))


async def weight_version(server: Server) -> str | None:
    """The version that a vLLM server names for its weights; None where it has no such route."""
    try:
        found: Any = await server.get("/weight_info", seconds=30.0)
    except ServerFailed as error:
        if error.status in (403, 404, 405):
            return None
        raise
    return str(found["weight_version"])
