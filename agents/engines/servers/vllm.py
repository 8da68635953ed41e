"""vLLM's dialects: `/inference/v1/generate` (ids in, ids out), and the fallback `/v1/completions` with token ids.

Pure functions over JSON values, written for vLLM 0.32 and 0.33. Requests contain every sampling parameter: the model's
generation_config.json would otherwise set the missing ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..engine import Request
from ..transport.wire import BadAnswer, Sampled, field, reader, sampled


def sampling_parameters(request: Request, stops: Sequence[int]) -> dict[str, Any]:
    """Return the request's sampling parameters under vLLM's names. `extra` comes last and overrides them."""
    sampling = request.sampling
    return {
        "n": 1,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "min_p": 0.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "repetition_penalty": 1.0,
        "seed": request.seed,
        "max_tokens": sampling.max_tokens,
        "min_tokens": 0,
        "stop_token_ids": list(stops),
        **sampling.extra,
    }


class Generate:
    """Dialect of `/inference/v1/generate`. The server must run with `--enable-scale-out`."""

    name = "vllm"
    route = "/inference/v1/generate"
    streams = False
    tells = True

    def body(self, request: Request, *, model: str, request_id: str, stops: Sequence[int]) -> dict[str, Any]:
        assert request.prompt is not None
        parameters = sampling_parameters(request, stops) | {"logprobs": 0}
        return {
            "model": model,
            "token_ids": request.prompt.tolist(),
            "request_id": request_id,
            "sampling_params": parameters,
            "stream": False,
        }

    @reader
    def parse(self, answer: Any) -> Sampled:
        choice = field(answer, "choices", 0)
        ids, content = choice.get("token_ids"), (choice.get("logprobs") or {}).get("content")
        logprobs = None
        if isinstance(content, list):
            logprobs = [field(content, k, "logprob") for k in range(len(content))]
            named = [field(content, k, "token_id") for k in range(len(content))]
            if ids is not None and named != ids:
                # A shift by one position would train each token with its neighbour's log-prob.
                raise BadAnswer(f"the log-probs of the answer are those of the ids {named!r}, sampled were {ids!r}")
        return sampled(
            ids,
            logprobs,
            finish=choice.get("finish_reason"),
            versions=choice.get("weight_versions"),
            prompt_tokens=_prompt_tokens(answer),
            cached=None,
        )

    def abort(self, request_id: str) -> tuple[str, dict[str, Any]]:
        return "/inference/v1/abort_requests", {"request_ids": [f"generate-tokens-{request_id}"]}

    def listing(self, body: dict[str, Any], count: int) -> dict[str, Any]:
        return body | {"sampling_params": {**body["sampling_params"], "logprobs": count}}

    @reader
    def listed(self, answer: Any) -> list[float]:
        return [
            field(found, "logprob") for found in field(answer, "choices", 0, "logprobs", "content", 0, "top_logprobs")
        ]


class Completions:
    """Dialect of `/v1/completions` with a prompt of token ids."""

    name = "vllm"
    route = "/v1/completions"
    streams = False
    tells = False

    def body(self, request: Request, *, model: str, request_id: str, stops: Sequence[int]) -> dict[str, Any]:
        assert request.prompt is not None
        return {
            "model": model,
            "prompt": request.prompt.tolist(),
            "request_id": request_id,
            "logprobs": 0,
            "return_token_ids": True,
            "return_weight_versions": True,
            "stream": False,
            "echo": False,
            **sampling_parameters(request, stops),
        }

    @reader
    def parse(self, answer: Any) -> Sampled:
        choice = field(answer, "choices", 0)
        logprobs = (choice.get("logprobs") or {}).get("token_logprobs")
        usage = answer.get("usage") or {}
        cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens")
        return sampled(
            choice.get("token_ids"),
            logprobs,
            finish=choice.get("finish_reason"),
            versions=choice.get("weight_versions"),
            prompt_tokens=_prompt_tokens(answer),
            cached=cached,
            prompt=choice.get("prompt_token_ids"),
        )

    def abort(self, request_id: str) -> tuple[str, dict[str, Any]]:
        return "/abort_requests", {"request_ids": [f"cmpl-{request_id}-0"]}

    def listing(self, body: dict[str, Any], count: int) -> dict[str, Any]:
        return body | {"logprobs": count}

    @reader
    def listed(self, answer: Any) -> list[float]:
        return list(field(answer, "choices", 0, "logprobs", "top_logprobs", 0).values())


def _prompt_tokens(answer: Any) -> int | None:
    return (answer.get("usage") or {}).get("prompt_tokens")
