"""SGLang's dialect, `/generate` with ids in and ids out, and its routes for new weights.

Written from the published wheel of SGLang 0.5.23 and tested against the shapes in it; it was not run against a server,
which needs a GPU. Its log-probs are taken after temperature (vLLM's are not unless told so), as a tape holds them.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..engine import Request
from ..transport.http_channel import Channel, ServerFailed
from ..transport.wire import BadAnswer, Sampled, field, reader, sampled
from ..weights.weight_sync import PublishMode

ALL = 1 << 30
"""top_k of the whole vocabulary."""


class SGLangGenerate:
    """`/generate` with token ids."""

    name = "sglang"
    route = "/generate"
    streams = False
    tells = False

    def body(self, request: Request, *, model: str, request_id: str, stops: Sequence[int]) -> dict[str, Any]:
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
            "min_new_tokens": 0,
            "stop_token_ids": list(stops),
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
    def parse(self, answer: Any) -> Sampled:
        meta = field(answer, "meta_info")
        found = field(meta, "output_token_logprobs")
        ids = answer.get("output_ids")
        if isinstance(found, list):
            named = [field(found, k, 1) for k in range(len(found))]
            if ids is not None and named != ids:
                raise BadAnswer(f"the log-probs of the answer are those of the ids {named!r}, sampled were {ids!r}")
            found = [field(found, k, 0) for k in range(len(found))]
        return sampled(
            ids,
            found,
            finish=field(meta, "finish_reason", "type"),
            versions=meta.get("weight_versions"),
            prompt_tokens=meta.get("prompt_tokens"),
            cached=meta.get("cached_tokens"),
        )

    def abort(self, request_id: str) -> tuple[str, dict[str, Any]]:
        return "/abort_request", {"rid": request_id}

    def listing(self, body: dict[str, Any], count: int) -> dict[str, Any]:
        return body | {"top_logprobs_num": count}

    @reader
    def listed(self, answer: Any) -> list[float]:
        return [field(found, 0) for found in field(answer, "meta_info", "output_top_logprobs", 0)]


class SGLangWeights:
    """Weights reloaded from a folder, with the version set in the same call."""

    def __init__(self, server: Channel, *, seconds: float = 120.0) -> None:
        """Every step is bounded by `seconds`."""
        self.server = server
        self._seconds = seconds
        self._folder: Path | None = None

    async def init(self) -> None:
        await self.server.get("/model_info", seconds=self._seconds)

    async def free(self) -> None:
        """Bring the server out of a pause that nobody will end, as that of a trainer which died in mid-update. It can't
        say whether it is paused, and one that isn't goes on by this as it did. Its weights have the name that came in
        the same call as they. Nothing where it is no SGLang."""
        try:
            await self._post("/continue_generation", {})
        except ServerFailed as error:
            if error.status not in (403, 404, 405):
                raise

    async def pause(self, mode: PublishMode) -> None:
        if mode == "drain":
            raise ValueError("SGLang has no pause that lets requests end; publish with reprefill, abort or stale_kv")
        way = {"reprefill": "retract", "stale_kv": "in_place", "abort": "abort"}[mode]
        await self._post("/pause_generation", {"mode": way})

    async def start(self) -> None:
        """Reloading from a folder has no start."""

    async def update(self, folder: Path) -> None:
        self._folder = folder

    async def finish(self, version: str, mode: PublishMode) -> None:
        await self._post(
            "/update_weights_from_disk",
            {
                "model_path": str(self._folder),
                "weight_version": version,
                "flush_cache": mode != "stale_kv",
                "abort_all_requests": False,
                "keep_pause": True,
            },
        )

    async def resume(self) -> None:
        await self._post("/continue_generation", {})

    async def abandon(self, version: str) -> None:
        await self._post("/update_weight_version", {"new_version": version, "abort_all_requests": True})
        await self._post("/continue_generation", {})

    async def _post(self, route: str, body: Any) -> None:
        answer = await self.server.post(route, body, seconds=self._seconds, fresh=True)
        if isinstance(answer, dict) and answer.get("success") is False:
            raise BadAnswer(f"{self.server}{route}: {answer.get('message')}")
