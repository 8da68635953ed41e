"""vLLM in this process: a `Channel` that maps the routes of vLLM's server to calls of `AsyncLLM`.

`connect_channels([await InProcess.start(folder)], ...)` returns the same `RemoteEngine` as for a server, with the same
checks, version spans, weight syncs and cancellation, without HTTP. vLLM spawns a process for the engine's core, so a
script that starts one needs `if __name__ == "__main__"`. All calls must come from one event loop.
"""

# pyright: reportMissingImports=false, reportAttributeAccessIssue=false

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import aclosing
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ....tapes.errors import MissingExtra
from ..transport.http_channel import ServerFailed

DEFAULTS: dict[str, Any] = {
    "generation_config": "vllm",
    "logprobs_mode": "processed_logprobs",
    "disable_log_stats": True,
}
"""Engine arguments that make the answers training data; `LocalServer` passes the same settings as flags."""
WHOLE_PROMPTS = {"enable_chunked_prefill": False}
"""Engine arguments for vLLM's CPU build. That build crashes on a chunked prompt of a seeded request, because it can't
rewind the random generator."""
TRANSFER = {
    "worker_extension_cls": "tapereel.agents.engines.weights.vllm_worker.Extension",
    "weight_transfer_config": {"backend": "tapereel"},
}
"""Engine arguments that load the weight-transfer backend of `vllm_worker`."""


LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Values that vLLM accepts for `max_lora_rank`."""
LORA_SLOTS = 4
"""Maximum number of adapters in one batch. With fewer slots, completions of older versions wait for a free slot."""


def lora_options(rank: int) -> dict[str, Any]:
    """Return the engine arguments for adapters of that rank. ValueError for a rank above the maximum of vLLM."""
    room = next((room for room in LORA_RANKS if room >= rank), None)
    if room is None:
        raise ValueError(f"LoRA rank {rank}: vLLM serves ranks up to {LORA_RANKS[-1]}")
    return {"enable_lora": True, "max_lora_rank": room, "max_loras": LORA_SLOTS}


class InProcess:
    """A `Channel` to a vLLM engine in this process."""

    def __init__(self, engine: Any, name: str, *, seconds: float = 600.0) -> None:
        """`engine` is an `AsyncLLM`, which `close` shuts down. `name` is the name of its model. `seconds` is the
        default timeout of a request."""
        self.in_flight = 0
        self._engine = engine
        self._name = name
        self._seconds = seconds
        self._adapters: dict[str, Any] = {}
        """vLLM's LoRARequest of each loaded adapter, by adapter name."""
        self._adapters_made = 0
        """Number of adapters ever loaded; also the id of the newest one. Ids are never reused: vLLM identifies adapters
        by id."""
        self._get: dict[str, Callable[[], Awaitable[Any]]] = {
            "/version": self._version,
            "/v1/models": self._models,
            "/weight_info": self._weight_info,
            "/health": self._health,
            "/is_sleeping": self._is_sleeping,
            "/get_world_size": self._world_size,
        }
        self._post: dict[str, Callable[[Any, Mapping[str, str]], Awaitable[Any]]] = {
            "/inference/v1/generate": self._generate,
            "/inference/v1/abort_requests": self._abort,
            "/abort_requests": self._abort,
            "/pause": self._pause,
            "/resume": self._resume,
            "/collective_rpc": self._collective,
            "/reset_prefix_cache": self._reset_prefix_cache,
            "/update_weight_version": self._label,
            "/init_weight_transfer_engine": self._init_transfer,
            "/start_weight_update": self._start_update,
            "/update_weights": self._update_weights,
            "/finish_weight_update": self._finish_update,
            "/v1/load_lora_adapter": self._load_adapter,
            "/v1/unload_lora_adapter": self._unload_adapter,
            "/sleep": self._sleep,
            "/wake_up": self._wake_up,
        }

    @classmethod
    async def start(
        cls,
        model: Path,
        *,
        transfer: bool = False,
        lora_rank: int | None = None,
        options: Mapping[str, Any] | None = None,
        seconds: float = 600.0,
        patience: float = 600.0,
    ) -> InProcess:
        """Start an engine of the model in the folder `model`. `options` are arguments of vLLM's AsyncEngineArgs and
        override the defaults. `transfer` adds the backend that receives weights from files; `lora_rank` reserves room
        for adapters of that rank. `seconds` is the default timeout of a request.

        Raises MissingExtra without vLLM, and TimeoutError when the engine isn't healthy within `patience` seconds."""
        try:
            from vllm.engine.arg_utils import AsyncEngineArgs
            from vllm.platforms import current_platform
            from vllm.v1.engine.async_llm import AsyncLLM
        except ModuleNotFoundError as error:
            raise MissingExtra(error.name or "vllm", "vllm", "vLLM inside this process") from error
        given = {
            **DEFAULTS,
            **(WHOLE_PROMPTS if current_platform.is_cpu() else {}),
            **(TRANSFER if transfer else {}),
            **(lora_options(lora_rank) if lora_rank is not None else {}),
            **(options or {}),
        }
        engine = AsyncLLM.from_engine_args(AsyncEngineArgs(model=str(model), **given))
        found = cls(engine, str(model), seconds=seconds)
        try:
            async with asyncio.timeout(patience):
                await engine.check_health()
        except BaseException:
            await found.close()
            raise
        return found

    def __repr__(self) -> str:
        return f"vLLM in this process ({self._name})"

    async def get(self, route: str, *, seconds: float | None = None) -> Any:
        """Return what vLLM's server answers to this GET. Raises ServerFailed; status 404 for an unknown route."""
        if route not in self._get:
            raise self._no_route(route)
        return await self._bounded(route, self._get[route](), seconds)

    async def post(
        self,
        route: str,
        body: Any = None,
        *,
        params: dict[str, str] | None = None,
        seconds: float | None = None,
        fresh: bool = False,
        plain: bool = False,
    ) -> Any:
        """Return what vLLM's server answers to this POST. Raises ServerFailed; status 404 for an unknown route. `fresh`
        and `plain` have no effect: there is no connection."""
        if route not in self._post:
            raise self._no_route(route)
        self.in_flight += 1
        try:
            return await self._bounded(route, self._post[route](body or {}, params or {}), seconds)
        finally:
            self.in_flight -= 1

    async def stream(self, route: str, body: Any) -> AsyncGenerator[bytes]:
        """Yield the answer to this POST as it arrives, as the server-sent events of vLLM's server. The timeout applies
        to each piece, not to the whole answer. Raises ServerFailed."""
        if route != "/inference/v1/generate":
            raise self._no_route(route)
        self.in_flight += 1
        try:
            # `aclosing` ends vLLM's generator at once when the caller stops reading. Without it, the request would
            # occupy the engine until garbage collection.
            async with aclosing(self._outputs(body, whole=False)) as outputs:
                while (output := await self._bounded(route, anext(outputs, None), None)) is not None:
                    yield f"data: {json.dumps(_answer(output))}\n\n".encode()
            yield b"data: [DONE]\n\n"
        finally:
            self.in_flight -= 1

    async def close(self) -> None:
        """Shut the engine down; requests in flight fail."""
        await asyncio.to_thread(self._engine.shutdown)

    # -- errors ---------------------------------------------------------------------------------------------------

    async def _bounded(self, route: str, work: Awaitable[Any], seconds: float | None) -> Any:
        """Await `work` within the timeout. Maps vLLM's exceptions to the HTTP status that vLLM's server would send, so
        that `RemoteEngine` treats both channels alike. A dead engine has status None, as an unreachable server has."""
        from vllm.exceptions import GracefulHTTPError, RetryableRequestError, VLLMClientError, VLLMNotFoundError
        from vllm.v1.engine.exceptions import EngineDeadError

        bound = self._seconds if seconds is None else seconds
        try:
            async with asyncio.timeout(bound):
                return await work
        except TimeoutError as error:
            raise ServerFailed(
                f"{self}{route}: no answer within {bound:g} s; is it paused or stuck? The bound is the "
                "engine's timeout",
                retry=False,
            ) from error
        except (RetryableRequestError, GracefulHTTPError) as error:
            raise self._failed(route, error, 503) from error
        except VLLMNotFoundError as error:
            raise self._failed(route, error, 404) from error
        except (VLLMClientError, ValueError, TypeError) as error:
            raise self._failed(route, error, 400) from error
        except EngineDeadError as error:
            raise self._failed(route, error, None) from error
        except Exception as error:  # any exception of vLLM counts as status 500
            cause = error.__cause__ if isinstance(error.__cause__, Exception) else error
            raise self._failed(route, cause, 500) from error

    def _failed(self, route: str, error: Exception, status: int | None) -> ServerFailed:
        message = f"{self}{route}: {type(error).__name__}: {error}"
        return ServerFailed(message, retry=status in (500, 503), status=status)

    def _no_route(self, route: str) -> ServerFailed:
        return ServerFailed(f"{self} has no {route}", retry=False, status=404)

    # -- sampling -------------------------------------------------------------------------------------------------

    async def _generate(self, body: Any, params: Mapping[str, str]) -> Any:
        # FINAL_ONLY: vLLM yields one output. After an abort, that output has the tokens sampled so far.
        outputs = [output async for output in self._outputs(body, whole=True)]
        if not outputs:
            raise RuntimeError("the engine ended a request without an answer")
        return _answer(outputs[-1])

    async def _outputs(self, body: Any, *, whole: bool) -> AsyncGenerator[Any]:
        """Yield the whole answer as one RequestOutput (`whole`), or one RequestOutput with the new tokens per step."""
        from vllm import SamplingParams, TokensPrompt
        from vllm.sampling_params import RequestOutputKind

        kind = RequestOutputKind.FINAL_ONLY if whole else RequestOutputKind.DELTA
        sampling = SamplingParams(**body["sampling_params"], output_kind=kind)
        adapter = self._adapter_of(body.get("model"))
        outputs = self._engine.generate(
            TokensPrompt(prompt_token_ids=body["token_ids"]),
            sampling,
            f"generate-tokens-{body['request_id']}",
            lora_request=adapter,
        )
        async with aclosing(outputs):
            async for output in outputs:
                yield output

    def _adapter_of(self, name: str | None) -> Any:
        """Return the LoRARequest of the adapter `name`; None for the base model. Raises VLLMNotFoundError (404)."""
        if not name or name == self._name:
            return None
        if name not in self._adapters:
            from vllm.exceptions import VLLMNotFoundError

            raise VLLMNotFoundError(f"there is no model or adapter {name!r}")
        return self._adapters[name]

    async def _abort(self, body: Any, params: Mapping[str, str]) -> None:
        await self._engine.abort(body["request_ids"])

    # -- what it is -----------------------------------------------------------------------------------------------

    async def _version(self) -> Any:
        import vllm

        return {"version": vllm.__version__}

    async def _models(self) -> Any:
        return {"data": [{"id": self._name, "max_model_len": self._engine.model_config.max_model_len}]}

    async def _weight_info(self) -> Any:
        return {"weight_version": await self._engine.get_weight_version()}

    async def _health(self) -> None:
        await self._engine.check_health()

    async def _is_sleeping(self) -> Any:
        return {"is_sleeping": await self._engine.is_sleeping()}

    async def _world_size(self) -> Any:
        return {"world_size": self._engine.vllm_config.parallel_config.world_size_across_dp}

    # -- weights --------------------------------------------------------------------------------------------------

    async def _pause(self, body: Any, params: Mapping[str, str]) -> None:
        await self._engine.pause_generation(mode=params["mode"], clear_cache=params["clear_cache"] == "true")

    async def _resume(self, body: Any, params: Mapping[str, str]) -> None:
        await self._engine.resume_generation()

    async def _collective(self, body: Any, params: Mapping[str, str]) -> None:
        await self._engine.collective_rpc(body["method"], timeout=body.get("timeout"), kwargs=body.get("kwargs"))

    async def _reset_prefix_cache(self, body: Any, params: Mapping[str, str]) -> Any:
        return {"success": await self._engine.reset_prefix_cache()}

    async def _label(self, body: Any, params: Mapping[str, str]) -> None:
        await self._engine.update_weight_version(body["new_version"])

    async def _init_transfer(self, body: Any, params: Mapping[str, str]) -> None:
        from vllm.distributed.weight_transfer.base import WeightTransferInitRequest

        await self._engine.init_weight_transfer_engine(WeightTransferInitRequest(init_info=body["init_info"]))

    async def _start_update(self, body: Any, params: Mapping[str, str]) -> None:
        await self._engine.start_weight_update()

    async def _update_weights(self, body: Any, params: Mapping[str, str]) -> None:
        from vllm.distributed.weight_transfer.base import WeightTransferUpdateRequest

        await self._engine.update_weights(WeightTransferUpdateRequest(update_info=body["update_info"]))

    async def _finish_update(self, body: Any, params: Mapping[str, str]) -> None:
        await self._engine.finish_weight_update(body.get("weight_version"))

    async def _load_adapter(self, body: Any, params: Mapping[str, str]) -> None:
        from vllm.lora.request import LoRARequest

        name = body["lora_name"]
        if name in self._adapters:
            raise ValueError(f"the adapter {name!r} is loaded already")
        self._adapters_made += 1
        adapter = LoRARequest(lora_name=name, lora_int_id=self._adapters_made, lora_path=body["lora_path"])
        # Registered after vLLM has loaded it: an adapter that failed to load must answer 404.
        await self._engine.add_lora(adapter)
        self._adapters[name] = adapter

    async def _unload_adapter(self, body: Any, params: Mapping[str, str]) -> None:
        adapter = self._adapter_of(body["lora_name"])
        await self._engine.remove_lora(adapter.lora_int_id)
        del self._adapters[adapter.lora_name]

    async def _sleep(self, body: Any, params: Mapping[str, str]) -> None:
        await self._engine.sleep(int(params.get("level", "1")))

    async def _wake_up(self, body: Any, params: Mapping[str, str]) -> None:
        await self._engine.wake_up([params["tags"]] if "tags" in params else None)


def _answer(output: Any) -> dict[str, Any]:
    """Return a RequestOutput as the JSON answer of `/inference/v1/generate`."""
    (choice,) = output.outputs
    ids = list(choice.token_ids)
    content = (
        None
        if choice.logprobs is None
        else [
            {
                "token_id": token,
                "logprob": listed[token].logprob if token in listed else None,
                "top_logprobs": [{"token_id": k, "logprob": found.logprob} for k, found in listed.items()],
            }
            for token, listed in zip(ids, choice.logprobs, strict=True)
        ]
    )
    versions = None if choice.weight_versions is None else [asdict(span) for span in choice.weight_versions]
    return {
        "choices": [
            {
                "token_ids": ids,
                "logprobs": {"content": content},
                "finish_reason": choice.finish_reason,
                "weight_versions": versions,
            }
        ],
        "usage": {
            "prompt_tokens": len(output.prompt_token_ids or ()),
            "prompt_tokens_details": {"cached_tokens": output.num_cached_tokens},
        },
    }
