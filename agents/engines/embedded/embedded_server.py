"""Serves the embedded engine over HTTP, with the vLLM routes that `connect` uses to sample and to sync weights.

    POST /inference/v1/generate, /inference/v1/abort_requests      GET /health, /version, /v1/models, /weight_info,
    POST /pause, /collective_rpc (reload_weights),                     /is_paused
         /reset_prefix_cache, /update_weight_version, /resume

The server is meant for models that fit into one process, and for testing clients of vLLM without vLLM. These are its
differences from vLLM:

1. Every route requires the access token.
2. The server rejects unsupported sampling parameters (penalties, unknown fields) and never ignores them.
3. `/collective_rpc` only reads and checks new weights. `/update_weight_version` then loads them and sets their version
   in one step, so no sampled token has the wrong version. In between, the server rejects `/resume`.
4. `/reset_prefix_cache` does nothing, because the engine drops all KV from old weights itself.
5. A stream starts with the first token, so earlier errors have their own HTTP status. The last chunk has all log-probs.
"""

from __future__ import annotations

import asyncio
import json
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from importlib.metadata import version as installed
from inspect import isawaitable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ....tapes.common.http_service import BODY, Handler, HttpService, web
from ....tapes.errors import TapereelError, UsageError
from ....tapes.records import Sampling
from ..engine import Completion, EngineError, PromptTooLong, PublishMode, Request
from .embedded_engine import EmbeddedEngine, eos_ids
from .sampler import PENALTIES

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel

WRITE_SECONDS = 60.0
"""Time limit for writing one chunk of a stream to the client."""
OFF: dict[str, Any] = {"n": 1}
"""Unsupported sampling parameters, each with the value that turns it off. All other values are rejected."""
KNOWN = {"temperature", "top_p", "top_k", "seed", "max_tokens", "min_tokens", "stop_token_ids", "ignore_eos"}
KNOWN |= {"logprobs", *OFF, *PENALTIES}


class EngineServer(HttpService):
    """Serves one model. `async with EngineServer(model, "name").serving() as server: server.url`"""

    token_in_file = True

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
        """Take ownership of `model`. Clients send `token` as their API key. By default, a new token is created, which
        clients of the same user on this machine find by themselves. `version` names the initial weights. Raises
        UsageError if the token is too short."""
        super().__init__(host, token)
        self.name = name
        self.engine = EmbeddedEngine(
            model, None, version=version, slots=slots, capacity=capacity, end_ids=(), copy=False
        )
        self._model: Any = model
        self._eos = eos_ids(model)
        self._under_way: dict[str, asyncio.Task[Completion]] = {}
        self._paused = ""
        """The mode of the current pause, or "" if the server isn't paused."""
        self._mode: PublishMode = "reprefill"
        self._weights: dict[str, Tensor] | None = None
        """New weights that were read and checked, but not loaded yet."""

    async def stop(self) -> None:
        """Close the engine first, so that its requests end as `abort` and their handlers return before the timeout."""
        await self.engine.close()

    def routes(self) -> Iterator[web.RouteDef]:
        """Return the vLLM routes that `connect` uses."""
        answers: dict[str, Callable[[web.Request], Any]] = {
            "/health": lambda _: {},
            "/version": lambda _: {"version": f"tapereel {installed('tapereel')}"},
            "/v1/models": lambda _: {"data": [{"id": self.name, "max_model_len": self.engine.context}]},
            "/weight_info": lambda _: {"weight_version": self.engine.version},
            "/is_paused": lambda _: {"is_paused": bool(self._paused)},
        }
        does: dict[str, Callable[[web.Request], Any]] = {
            "/inference/v1/generate": self._generate,
            "/inference/v1/abort_requests": self._abort,
            "/v1/completions": self._score,
            "/pause": self._pause,
            "/collective_rpc": self._reload,
            "/reset_prefix_cache": self._reset,
            "/update_weight_version": self._name_weights,
            "/resume": self._resume,
        }
        yield from (web.get(route, _as_json(answer)) for route, answer in answers.items())
        yield from (web.post(route, _as_json(work)) for route, work in does.items())

    async def answer(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Turn errors into status 400 if the same request can never succeed, and into 503 if a retry may succeed."""
        try:
            return await super().answer(request, handler)
        except PromptTooLong as error:
            return self.refusal(request, 400, f"maximum context length: {error}")
        except EngineError as error:
            return self.refusal(request, 503 if error.retry else 400, str(error))
        except (TapereelError, ValueError, TypeError) as error:
            return self.refusal(request, 400, str(error))

    # -- sampling -----------------------------------------------------------------------------------------------------

    async def _generate(self, request: web.Request) -> Any:
        if self._paused in ("wait", "abort"):
            raise web.HTTPServiceUnavailable(reason="Generation is paused")
        body = request[BODY]
        partial: list[Completion] = []
        asked = self._request(body, partial.append)
        name = f"generate-tokens-{body.get('request_id')}"
        if name in self._under_way:
            raise UsageError(f"request_id {body.get('request_id')!r} is in flight already")
        stream = _Stream(request, name) if body.get("stream") else None
        # The completion runs in its own task. If /abort_requests or /pause cancels this task, the handler continues and
        # answers with the partial completion.
        task = self._under_way[name] = asyncio.ensure_future(self.engine.complete(replace(asked, listener=stream)))
        try:
            if stream is not None:
                # The listener has all ids when the task ends, so None is the last item in the queue.
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
            # The client has disconnected or doesn't read. The connection is aborted, because a stream that ends
            # normally would look complete.
            if request.transport is not None:
                request.transport.abort()
            assert stream is not None
            return stream.response
        finally:
            del self._under_way[name]
            # If the client has disconnected, the engine must stop sampling for it. A task that is done isn't affected.
            task.cancel()
        top = self._likeliest(asked, found, int(body["sampling_params"].get("logprobs") or 0))
        answer = _answer(name, asked, found, top, aborted=task.cancelled())
        return answer if stream is None else await stream.end(answer)

    def _request(self, body: dict[str, Any], on_partial: Callable[[Completion], None]) -> Request:
        if body.get("model") not in (None, "", self.name):
            raise UsageError(f"model {body['model']!r} is not served here; it is {self.name!r}")
        ids, given = body.get("token_ids"), body.get("sampling_params")
        if not isinstance(ids, list) or not ids or not all(type(id) is int and 0 <= id < 2**31 for id in ids):
            raise UsageError(f"token_ids is {ids!r:.200}; it must be a list of at least one id")
        if not isinstance(given, dict):
            raise UsageError(f"sampling_params is {given!r:.200}; it must be an object")
        for name, value in given.items():
            if name not in KNOWN or (name in OFF and value != OFF[name]):
                raise UsageError(
                    f"sampling_params.{name} = {value!r}: the embedded engine can't do that; it has "
                    "temperature, top_p, top_k, seed, max_tokens, min_tokens, stop_token_ids, ignore_eos, min_p and "
                    "penalties"
                )
        eos = () if given.get("ignore_eos") else self._eos
        room = self.engine.context - len(ids)
        sampling = Sampling(
            temperature=given.get("temperature", 1.0),
            top_p=given.get("top_p", 1.0),
            top_k=max(given.get("top_k", 0), 0),
            max_tokens=given.get("max_tokens") or max(room, 1),
            min_tokens=given.get("min_tokens", 0),
            extra={name: given[name] for name, (off, *_) in PENALTIES.items() if given.get(name, off) != off},
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
        """Return the `n` most probable (id, log-prob) pairs at the position of each token, or nothing if `n` is 0.

        The pairs come from one plain forward with the current weights. If a weight sync has happened since, these are
        not the weights that sampled the tokens."""
        if not n or not found.ids or asked.prompt is None:
            return [()] * len(found.ids or ())
        import torch

        with torch.inference_mode():
            whole = torch.tensor([list(asked.prompt + found.ids)], device=self._model.device)
            logits = self._model(input_ids=whole, use_cache=False).logits[0, len(asked.prompt) - 1 : -1].float()
            values, ids = (logits / (asked.sampling.temperature or 1.0)).log_softmax(-1).topk(min(n, logits.shape[-1]))
        return [list(zip(at, value, strict=True)) for at, value in zip(ids.tolist(), values.tolist(), strict=True)]

    async def _score(self, request: web.Request) -> Any:
        ids = request[BODY].get("prompt")
        self._request({**request[BODY], "token_ids": ids, "sampling_params": {}}, lambda _: None)
        values = zip(ids[1:], await self.engine.score(ids), strict=True)
        return {"choices": [{"prompt_logprobs": [None, *({str(id): {"logprob": value}} for id, value in values)]}]}

    async def _abort(self, request: web.Request) -> Any:
        for name in request[BODY].get("request_ids") or list(self._under_way):
            if name in self._under_way:
                self._under_way[name].cancel()
        return {}

    # -- weights ------------------------------------------------------------------------------------------------------

    async def _pause(self, request: web.Request) -> Any:
        mode, clear = request.query.get("mode", "abort"), request.query.get("clear_cache", "true")
        if mode not in ("abort", "wait", "keep") or clear not in ("true", "false"):
            raise UsageError(f"mode={mode!r}, clear_cache={clear!r}: must be abort, wait or keep, and true or false")
        self._paused = mode
        self._mode = "stale_kv" if mode == "keep" and clear == "false" else "reprefill"
        if mode == "keep":
            self.engine.freeze()
            return {}
        # An earlier pause may have frozen the engine. This pause waits until completions end, which they can't while
        # the engine is frozen.
        self.engine.thaw()
        tasks = list(self._under_way.values())
        if mode == "abort":
            for task in tasks:
                task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        return {}

    async def _reload(self, request: web.Request) -> Any:
        body = request[BODY]
        folder = body.get("kwargs", {}).get("weights_path")
        if body.get("method") != "reload_weights" or not isinstance(folder, str):
            raise UsageError(f"method {body.get('method')!r}: only reload_weights with kwargs.weights_path is served")
        self._need_pause()
        weights = await asyncio.to_thread(_read_weights, Path(folder))
        # The check comes first, so that a wrong state dict fails here and leaves no weights for
        # `/update_weight_version`.
        self.engine.check(weights)
        self._weights = weights
        return {"results": [None]}

    async def _reset(self, request: web.Request) -> Any:
        return {}

    async def _name_weights(self, request: web.Request) -> Any:
        version = request[BODY].get("new_version")
        if not isinstance(version, str) or not version:
            raise UsageError(f"new_version must be a string, not {version!r}")
        if self._weights is None:
            self.engine.relabel(version)
        else:
            self._need_pause()
            weights, self._weights = self._weights, None
            # After a failed weight sync, a restarted trainer publishes the same version again.
            await self.engine.sync_weights(weights, version, self._mode, again=True)
        return {}

    async def _resume(self, request: web.Request) -> Any:
        if self._weights is not None:
            raise UsageError("weights were loaded that have no version yet: /update_weight_version comes first")
        self._paused = ""
        self.engine.thaw()
        return {}

    def _need_pause(self) -> None:
        if not self._paused:
            raise UsageError("weights change only while generation is paused: /pause comes first")


class _Stream:
    """One streamed answer. It is also the listener that receives the ids from the engine."""

    def __init__(self, request: web.Request, name: str) -> None:
        self.response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        self.heard: asyncio.Queue[array[int] | None] = asyncio.Queue()
        """Ids in the order in which they were sampled, then None at the end."""
        self._request, self._name, self._sent = request, name, 0

    def tokens(self, ids: array[int]) -> None:
        self.heard.put_nowait(ids)

    def again(self) -> None:
        """Never called, because the embedded engine makes only one attempt for each request."""

    async def pass_on(self) -> None:
        while (ids := await self.heard.get()) is not None:
            self._sent += len(ids)
            await self._send({"request_id": self._name, "choices": [{"index": 0, "token_ids": ids.tolist()}]})

    async def end(self, last: dict[str, Any]) -> web.StreamResponse:
        """Send the last event, which is an error or the whole answer. Ids that were sent already are left out."""
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
        raise UsageError(f"there are no weights (*.safetensors) in {folder}")
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


def _as_json(work: Callable[[web.Request], Any]) -> Handler:
    async def handler(request: web.Request) -> web.StreamResponse:
        found = work(request)
        found = await found if isawaitable(found) else found
        return found if isinstance(found, web.StreamResponse) else web.json_response(found)

    return handler
