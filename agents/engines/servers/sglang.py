"""SGLang's dialect, which is `/generate` with token ids in and out, and SGLang's routes for new weights.

Tested with SGLang 0.5.23 on a CPU (`tests/contract/test_sglang.py`). SGLang computes log-probs after temperature is
applied, as a tape requires. vLLM does so only with `--logprobs-mode processed_logprobs`.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

from ..engine import PublishMode, Request
from ..transport.http_channel import NO_ROUTE, Server, ServerFailed
from ..transport.wire import BadAnswer, Json, Sampled, field, reader, sampled
from ..weights.sleeping import Part

ALL = 1 << 30
"""The `top_k` that means the whole vocabulary in SGLang."""


SLEEPS = ["kv_cache", "cuda_graph"]
"""What a server frees when it goes to sleep."""


async def draws_by_seed(server: Server) -> bool:
    """Return whether the seed of a request has an effect. Without the flag, SGLang accepts seeds and ignores them."""
    info = await server.get("/server_info", seconds=30.0)
    return cast(dict[str, object], info).get("enable_deterministic_inference") is not False


class SGLangGenerate:
    """The dialect for `/generate` with token ids."""

    name = "sglang"
    route = "/generate"
    streams = False
    tells = False

    def body(self, request: Request, *, model: str, request_id: str, stops: Sequence[int]) -> Json:
        assert request.prompt is not None
        sampling = request.sampling
        parameters = {
            "n": 1,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k or ALL,
            "min_p": 0.0,
            "presence_penalty": 0.0,
            "frequency_penalty": 0.0,
            "repetition_penalty": 1.0,
            "max_new_tokens": sampling.max_tokens,
            "min_new_tokens": min(sampling.barring, sampling.max_tokens),
            "stop_token_ids": list(stops),
            **({"ignore_eos": True} if sampling.ignore_eos else {}),
            # SGLang's seeds have only 31 bits. Two requests draw the same random numbers if the low 31 bits of their
            # seeds are equal.
            "sampling_seed": request.seed & (2**31 - 1),
            **sampling.extra,
        }
        return {
            "rid": request_id,
            "input_ids": request.prompt.tolist(),
            "sampling_params": parameters,
            "return_logprob": True,
            "logprob_start_len": -1,
            "stream": False,
        }

    @reader
    def parse(self, answer: object) -> Sampled:
        meta = cast(dict[str, Any], field(answer, "meta_info"))
        found = field(meta, "output_token_logprobs")
        return sampled(
            cast(dict[str, object], answer).get("output_ids"),
            [field(found, k, 0) for k in range(len(found))] if isinstance(found, list) else None,
            named=[field(found, k, 1) for k in range(len(found))] if isinstance(found, list) else None,
            finish=field(meta, "finish_reason", "type"),
            versions=meta.get("weight_versions"),
            prompt_tokens=meta.get("prompt_tokens"),
            cached=meta.get("cached_tokens"),
        )

    def abort(self, request_id: str) -> tuple[str, Json]:
        return "/abort_request", {"rid": request_id}

    def listing(self, body: Json, count: int) -> Json:
        return body | {"top_logprobs_num": count}

    @reader
    def listed(self, answer: object) -> list[float]:
        top = cast(list[object], field(answer, "meta_info", "output_top_logprobs", 0))
        return [cast(float, field(found, 0)) for found in top]


class SGLangWeights:
    """Reloads weights from a folder. A single request, in `finish`, loads the weights and sets their version."""

    def __init__(self, server: Server, *, seconds: float = 120.0) -> None:
        """`seconds` is the time limit for each step."""
        self.server = server
        self._seconds = seconds
        self._folder: Path | None = None

    async def init(self) -> None:
        await self.server.get("/model_info", seconds=self._seconds)

    async def free(self) -> None:
        """Resume the server if a trainer died and left it paused. Does nothing if the server isn't SGLang.

        SGLang has no route that reports a pause, but resuming a running server has no effect. The version is right even
        after an interrupted sync, because one request sets weights and version together."""
        try:
            await self._post("/continue_generation", {})
        except ServerFailed as error:
            if error.status not in NO_ROUTE:
                raise

    async def pause(self, mode: PublishMode) -> None:
        if mode == "drain":
            raise ValueError("SGLang has no pause that lets requests end; publish with reprefill, abort or stale_kv")
        way = {"reprefill": "retract", "stale_kv": "in_place", "abort": "abort"}[mode]
        await self._post("/pause_generation", {"mode": way})

    async def start(self) -> None:
        """Do nothing, because reloading a folder has no start step."""

    async def update(self, folder: Path) -> None:
        # The folder is only stored. `finish` loads it, because SGLang takes weights and version in the same request.
        self._folder = folder

    async def finish(self, version: str, mode: PublishMode) -> None:
        await self._post(
            "/update_weights_from_disk",
            {
                "model_path": str(self._folder),
                "weight_version": version,
                "flush_cache": mode != "stale_kv",
                "abort_all_requests": False,
                # `resume` ends the pause when all servers have the weights.
                "keep_pause": True,
            },
        )

    async def resume(self) -> None:
        await self._post("/continue_generation", {})

    async def abandon(self, version: str) -> None:
        # Abort and rename come before resume, because no completion may continue with weights of unknown version.
        await self._post("/update_weight_version", {"new_version": version, "abort_all_requests": True})
        await self._post("/continue_generation", {})

    async def close(self) -> None:
        """Do nothing, because each step is a request of its own."""

    # A sleeping server frees its KV cache and CUDA graphs, but keeps its weights. The sleep routes answer with text.

    async def release(self) -> None:
        await self._post("/release_memory_occupation", {"tags": SLEEPS}, plain=True)

    async def clear(self) -> None:
        await self._post("/flush_cache", {}, plain=True)

    async def restore(self, part: Part) -> None:
        if part == "kv_cache":
            await self._post("/resume_memory_occupation", {"tags": SLEEPS}, plain=True)

    async def _post(self, route: str, body: Json, *, plain: bool = False) -> None:
        """Post on a new connection. Raises BadAnswer if SGLang reports a failure with status 200 and `success:
        false`."""
        answer = await self.server.post(route, body, seconds=self._seconds, fresh=True, plain=plain)
        if isinstance(answer, dict) and answer.get("success") is False:
            raise BadAnswer(f"{self.server}{route}: {answer.get('message')}")
