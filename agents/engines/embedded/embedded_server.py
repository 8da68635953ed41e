"""The embedded engine over HTTP, in the protocol of vLLM's server that `connect` speaks: ids in, ids out, new weights.

    POST /inference/v1/generate, /inference/v1/abort_requests      GET /health, /version, /v1/models, /weight_info,
    POST /pause, /collective_rpc (reload_weights),                     /is_paused
         /reset_prefix_cache, /update_weight_version, /resume

For models that fit into one process, and to try what runs against vLLM without it. Where it differs from vLLM:

1. Every route asks for the token where there is one; beyond loopback there must be.
2. What it can't do is refused (penalties, unknown fields), never ignored.
3. New weights are taken when they get their version: `/collective_rpc` reads and checks them, and
   `/update_weight_version` puts both in place at once, so no token ever carries the wrong one. Resuming between the two
   is refused.
4. No KV outlives a version, so `/reset_prefix_cache` has nothing left to do.
5. A stream begins with the first token, so an error before it has its status; its last chunk has all the log-probs.

Requests whose Host is not ours are refused: a page elsewhere must not reach it by a name that it points here. Knows
nothing of tapes and texts.
"""

from __future__ import annotations

import asyncio
import json
from array import array
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from importlib.metadata import version as installed
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ....tapes.common.extras import raise_missing
from ....tapes.common.redact import guard_log
from ....tapes.errors import TapereelError
from ....tapes.records import Sampling
from ....tapes.view.view_server import Access
from ..engine import Completion, EngineError, PromptTooLong, Request
from .embedded_engine import EmbeddedEngine, PublishMode, eos_ids

try:
    from aiohttp import web
except ModuleNotFoundError as _error:
    raise_missing(_error, "an engine over HTTP")

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel

LARGEST = 64 << 20
"""Bytes of one request."""
WRITE_SECONDS = 60.0
"""In which a client must have taken a piece of a stream."""
OFF: dict[str, Any] = {
    "n": 1,
    "min_p": 0.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "repetition_penalty": 1.0,
    "min_tokens": 0,
}
"""Sampling parameters that must be off."""
KNOWN = {"temperature", "top_p", "top_k", "seed", "max_tokens", "stop_token_ids", "ignore_eos", "logprobs", *OFF}
_Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class BadRequest(TapereelError, ValueError):
    """A request that this server can't answer; says which field and what would do."""


class _IdsOnly:
    """What the engine needs of a renderer, where nobody reads."""

    end_ids = ()

    def decode(self, ids: array[int]) -> str:
        return ""


class EngineServer:
    """Serves one model. `async with EngineServer(model, "name").serving() as server: server.url`"""

    def __init__(
        self,
        model: PreTrainedModel,
        name: str,
        *,
        host: str = "127.0.0.1",
        token: str | None = None,
        version: str = "default",
        slots: int = 64,
        capacity: int | None = None,
    ) -> None:
        """Takes `model` over. `token` is what clients send as their API key; ValueError where others could connect
        without one. `version` is the first label of the weights."""
        self.access = Access(host, 0, token)
        if token is None and not self.access.loopback:
            raise ValueError(
                f"a server at {host} can be reached by others: give it a token, which clients send as their API key"
            )
        self.name = name
        self.engine = EmbeddedEngine(
            model, _IdsOnly(), version=version, slots=slots, capacity=capacity, end_ids=(), copy=False
        )
        self._model: Any = model
        self._eos = eos_ids(model)
        self._under_way: dict[str, asyncio.Task[Completion]] = {}
        self._paused = ""
        """The mode of the pause; empty while it serves."""
        self._mode: PublishMode = "reprefill"
        self._weights: dict[str, Tensor] | None = None
        """Read, and without a version yet."""

    @property
    def url(self) -> str:
        """Where it listens."""
        host = f"[{self.access.host}]" if ":" in self.access.host else self.access.host
        return f"http://{host}:{self.access.port}"

    @asynccontextmanager
    async def serving(self, port: int = 0) -> AsyncIterator[EngineServer]:
        """Serves inside; `port` 0 takes a free one."""
        guard_log("aiohttp.server")  # which quotes the headers that it can't read
        runner = web.AppRunner(self.application(), access_log=None, handler_cancellation=True, shutdown_timeout=1)
        await runner.setup()
        try:
            await web.TCPSite(runner, self.access.host, port).start()
            self.access = Access(self.access.host, runner.addresses[0][1], self.access.token)
            yield self
        finally:
            await self.engine.close()
            await runner.cleanup()

    def application(self) -> web.Application:
        """The aiohttp application."""
        app = web.Application(middlewares=[self._guard], client_max_size=LARGEST)
        answers: dict[str, Callable[[], Any]] = {
            "/health": dict,
            "/version": lambda: {"version": f"tapereel {installed('tapereel')}"},
            "/v1/models": lambda: {"data": [{"id": self.name, "max_model_len": self.engine.context}]},
            "/weight_info": lambda: {"weight_version": self.engine.version},
            "/is_paused": lambda: {"is_paused": bool(self._paused)},
        }
        for route, answer in answers.items():
            app.router.add_get(route, _given(answer))
        does: dict[str, Callable[[web.Request], Awaitable[Any]]] = {
            "/inference/v1/generate": self._generate,
            "/inference/v1/abort_requests": self._abort,
            "/pause": self._pause,
            "/collective_rpc": self._reload,
            "/reset_prefix_cache": self._reset,
            "/update_weight_version": self._name_weights,
            "/resume": self._resume,
        }
        for route, work in does.items():
            app.router.add_post(route, _done(work))
        return app

    @web.middleware
    async def _guard(self, request: web.Request, handler: _Handler) -> web.StreamResponse:
        if not self.access.names(request.host):
            return _refusal(403, f"this server answers for its own address only, not for {request.host[:80]!r}")
        if not self.access.has_token(request):
            return _refusal(401, "an API key is needed: the token that the server was started with")
        return await handler(request)

    # -- sampling -----------------------------------------------------------------------------------------------------

    async def _generate(self, request: web.Request) -> Any:
        if self._paused in ("wait", "abort"):
            raise web.HTTPServiceUnavailable(reason="Generation is paused")
        body = await _body(request)
        partial: list[Completion] = []
        asked = self._request(body, partial.append)
        name = f"generate-tokens-{body.get('request_id')}"
        if name in self._under_way:
            raise BadRequest(f"request_id {body.get('request_id')!r} is under way already")
        stream = _Stream(request, name) if body.get("stream") else None
        task = self._under_way[name] = asyncio.ensure_future(self.engine.complete(replace(asked, listener=stream)))
        try:
            if stream is not None:
                task.add_done_callback(lambda _: stream.heard.put_nowait(None))
                await stream.pass_on()
            await asyncio.wait([task])
            nothing = Completion(text="", ids=array("i"), logprobs=array("f"))
            found = (partial or [nothing])[0] if task.cancelled() else task.result()
        except EngineError as error:
            if stream is None or not stream.response.prepared:
                raise
            return await stream.end({"error": {"message": str(error), "code": 500}})
        except (TimeoutError, ConnectionError):
            # Whoever asked has gone, or takes nothing.
            if request.transport is not None:
                request.transport.abort()
            assert stream is not None
            return stream.response
        finally:
            del self._under_way[name]
            task.cancel()
        top = self._likeliest(asked, found, int(body["sampling_params"].get("logprobs") or 0))
        answer = _answer(name, asked, found, top, aborted=task.cancelled())
        return answer if stream is None else await stream.end(answer)

    def _request(self, body: dict[str, Any], on_partial: Callable[[Completion], None]) -> Request:
        if body.get("model") not in (None, "", self.name):
            raise BadRequest(f"model {body['model']!r} is not served here; it is {self.name!r}")
        ids, given = body.get("token_ids"), body.get("sampling_params")
        if not isinstance(ids, list) or not ids or not all(type(id) is int and 0 <= id < 2**31 for id in ids):
            raise BadRequest("token_ids must be a list of ids, one at least")
        if not isinstance(given, dict):
            raise BadRequest("sampling_params must be an object")
        for name, value in given.items():
            if name not in KNOWN or (name in OFF and value != OFF[name]):
                raise BadRequest(
                    f"sampling_params.{name} = {value!r}: the embedded engine can't do that; it has "
                    "temperature, top_p, top_k, seed, max_tokens, stop_token_ids and ignore_eos"
                )
        eos = () if given.get("ignore_eos") else self._eos
        room = self.engine.context - len(ids)
        sampling = Sampling(
            temperature=given.get("temperature", 1.0),
            top_p=given.get("top_p", 1.0),
            top_k=max(given.get("top_k", 0), 0),
            max_tokens=given.get("max_tokens") or max(room, 1),
        )
        return Request(
            messages=(),
            prompt=array("i", ids),
            sampling=sampling,
            seed=given.get("seed") or 0,
            stop_ids=(*given.get("stop_token_ids", ()), *eos),
            on_partial=on_partial,
        )

    def _likeliest(self, asked: Request, found: Completion, n: int) -> Sequence[Sequence[tuple[int, float]]]:
        """The n likeliest (id, log-prob) in the place of each token, by the plain forward of the weights as they are
        now; none where n is 0."""
        if not n or not found.ids or asked.prompt is None:
            return [()] * len(found.ids or ())
        import torch

        with torch.inference_mode():
            whole = torch.tensor([list(asked.prompt + found.ids)])
            logits = self._model(input_ids=whole, use_cache=False).logits[0, len(asked.prompt) - 1 : -1].float()
            values, ids = (logits / (asked.sampling.temperature or 1.0)).log_softmax(-1).topk(min(n, logits.shape[-1]))
        return [list(zip(at, value, strict=True)) for at, value in zip(ids.tolist(), values.tolist(), strict=True)]

    async def _abort(self, request: web.Request) -> Any:
        for name in (await _body(request)).get("request_ids") or list(self._under_way):
            if name in self._under_way:
                self._under_way[name].cancel()
        return {}

    # -- weights ------------------------------------------------------------------------------------------------------

    async def _pause(self, request: web.Request) -> Any:
        mode, clear = request.query.get("mode", "abort"), request.query.get("clear_cache", "true")
        if mode not in ("abort", "wait", "keep") or clear not in ("true", "false"):
            raise BadRequest(f"mode={mode!r}, clear_cache={clear!r}: must be abort, wait or keep, and true or false")
        self._paused = mode
        self._mode = "stale_kv" if mode == "keep" and clear == "false" else "reprefill"
        if mode == "keep":
            self.engine.freeze()
            return {}
        self.engine.thaw()
        tasks = list(self._under_way.values())
        if mode == "abort":
            for task in tasks:
                task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        return {}

    async def _reload(self, request: web.Request) -> Any:
        body = await _body(request)
        folder = body.get("kwargs", {}).get("weights_path")
        if body.get("method") != "reload_weights" or not isinstance(folder, str):
            raise BadRequest(f"method {body.get('method')!r}: only reload_weights with kwargs.weights_path is served")
        self._need_pause()
        weights = await asyncio.to_thread(_read_weights, Path(folder))
        self.engine.check(weights)
        self._weights = weights
        return {"results": [None]}

    async def _reset(self, request: web.Request) -> Any:
        return {}

    async def _name_weights(self, request: web.Request) -> Any:
        version = (await _body(request)).get("new_version")
        if not isinstance(version, str) or not version:
            raise BadRequest(f"new_version must be a text, not {version!r}")
        if self._weights is None:
            self.engine.relabel(version)
        else:
            self._need_pause()
            weights, self._weights = self._weights, None
            # A trainer that died in mid-update publishes this version again.
            await self.engine.sync_weights(weights, version, self._mode, again=True)
        return {}

    async def _resume(self, request: web.Request) -> Any:
        if self._weights is not None:
            raise BadRequest("weights were loaded that have no version yet: /update_weight_version comes first")
        self._paused = ""
        self.engine.thaw()
        return {}

    def _need_pause(self) -> None:
        if not self._paused:
            raise BadRequest("weights change only while generation is paused: /pause comes first")


class _Stream:
    """One answer on its way to a client, which hears of it."""

    def __init__(self, request: web.Request, name: str) -> None:
        self.response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        self.heard: asyncio.Queue[array[int] | None] = asyncio.Queue()
        """Ids as they come; None: there are no more."""
        self._request, self._name, self._sent = request, name, 0

    def tokens(self, ids: array[int]) -> None:
        self.heard.put_nowait(ids)

    def again(self) -> None:
        """The engine tries once."""

    async def pass_on(self) -> None:
        """Send what comes until there is no more."""
        while (ids := await self.heard.get()) is not None:
            self._sent += len(ids)
            await self._send({"request_id": self._name, "choices": [{"index": 0, "token_ids": ids.tolist()}]})

    async def end(self, last: dict[str, Any]) -> web.StreamResponse:
        """Send the end: the whole answer without the ids that were sent, or an error."""
        for choice in last.get("choices", ()):
            choice["token_ids"] = choice["token_ids"][self._sent :]
        await self._send(last)
        await self._write(b"data: [DONE]\n\n")
        return self.response

    async def _send(self, event: dict[str, Any]) -> None:
        await self._write(f"data: {json.dumps(event)}\n\n".encode())

    async def _write(self, data: bytes) -> None:
        async with asyncio.timeout(WRITE_SECONDS):
            await self.response.prepare(self._request)
            await self.response.write(data)


def _read_weights(folder: Path) -> dict[str, Tensor]:
    from safetensors.torch import load_file

    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise BadRequest(f"there are no weights (*.safetensors) in {folder}")
    return {name: tensor for path in files for name, tensor in load_file(path).items()}


def _answer(
    name: str, asked: Request, found: Completion, top: Sequence[Sequence[tuple[int, float]]], *, aborted: bool
) -> Any:
    ids, logprobs = (found.ids or array("i")).tolist(), found.logprobs or array("f")
    listed = [[{"token_id": k, "logprob": value, "rank": r + 1} for r, (k, value) in enumerate(at)] for at in top]
    content = [
        {"token_id": id, "logprob": logprob, "rank": None, "top_logprobs": likely}
        for id, logprob, likely in zip(ids, logprobs, listed, strict=True)
    ]
    versions = [{"version": version, "start": start, "end": end} for version, start, end in found.spans]
    usage = {"prompt_tokens": len(asked.prompt or ()), "completion_tokens": len(ids)}
    return {
        "request_id": name,
        "usage": usage,
        "choices": [
            {
                "index": 0,
                "token_ids": ids,
                "logprobs": {"content": content},
                "weight_versions": versions,
                "finish_reason": "abort" if aborted else found.finish,
            }
        ],
    }


async def _body(request: web.Request) -> dict[str, Any]:
    try:
        body = await request.json()
    except ValueError as error:
        raise BadRequest(f"the request is no JSON: {error}") from error
    if not isinstance(body, dict):
        raise BadRequest("the request must be a JSON object")
    return body


def _given(answer: Callable[[], Any]) -> _Handler:
    async def handler(request: web.Request) -> web.StreamResponse:
        return web.json_response(answer())

    return handler


def _done(work: Callable[[web.Request], Awaitable[Any]]) -> _Handler:
    """The answer as JSON, or the error as a status: 400 for what will never do, 503 for what may a moment later."""

    async def handler(request: web.Request) -> web.StreamResponse:
        try:
            found = await work(request)
            return found if isinstance(found, web.StreamResponse) else web.json_response(found)
        except web.HTTPException as error:
            return _refusal(error.status, error.reason)
        except PromptTooLong as error:
            return _refusal(400, f"maximum context length: {error}")
        except EngineError as error:
            return _refusal(503 if error.retry else 400, str(error))
        except (TapereelError, ValueError, TypeError, json.JSONDecodeError) as error:
            return _refusal(400, str(error))

    return handler


def _refusal(status: int, why: str) -> web.Response:
    return web.json_response({"error": {"message": why, "code": status}}, status=status)
