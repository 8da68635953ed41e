"""vLLM's `/v1/chat/completions`, for servers that reject token ids: messages in, token ids and log-probs out.

The server renders the messages with its own copy of the chat template and returns the prompt ids with the answer. They
must equal the ids of the local renderer; an answer after any other prompt is rejected. Answers are streamed, so a
cancelled request keeps the tokens sampled so far without an abort route. Pure functions over JSON values.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from ..engine import Request
from ..transport.wire import Sampled, field, reader, sampled
from .vllm import sampling_parameters


class Chat:
    """Dialect of `/v1/chat/completions` with `return_token_ids`."""

    name = "vllm-chat"
    route = "/v1/chat/completions"
    streams = True
    tells = False

    def __init__(self, template_kwargs: Mapping[str, Any] | None = None) -> None:
        """`template_kwargs` are those of the local renderer: both sides must render with the same arguments."""
        self._template_kwargs = dict(template_kwargs or {})

    def body(self, request: Request, *, model: str, request_id: str, stops: Sequence[int]) -> dict[str, Any]:
        body = {
            "model": model,
            "messages": [_message(message) for message in request.messages],
            "request_id": request_id,
            "logprobs": True,
            "top_logprobs": 0,
            "return_token_ids": True,
            "return_weight_versions": True,
            "stream": True,
            "stream_options": {"include_usage": True},
            "add_generation_prompt": True,
            **sampling_parameters(request, stops),
        }
        if request.tools:
            # The server needs the tools for its template. `none` disables its parser: the local renderer parses calls.
            body |= {"tools": list(request.tools), "tool_choice": "none"}
        if self._template_kwargs:
            body["chat_template_kwargs"] = self._template_kwargs
        return body

    @reader
    def parse(self, answer: Any) -> Sampled:
        choice = field(answer, "choices", 0)
        content = (choice.get("logprobs") or {}).get("content")
        logprobs = [field(content, k, "logprob") for k in range(len(content))] if isinstance(content, list) else None
        usage = answer.get("usage") or {}
        cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens")
        return sampled(
            choice.get("token_ids"),
            logprobs,
            finish=choice.get("finish_reason"),
            versions=choice.get("weight_versions"),
            prompt_tokens=usage.get("prompt_tokens"),
            cached=cached,
            prompt=answer.get("prompt_token_ids"),
            prompt_needed=True,  # the server rendered the prompt itself: without its ids the prompt is unverified
        )

    def abort(self, request_id: str) -> tuple[str, dict[str, Any]]:
        return "/abort_requests", {"request_ids": [f"chatcmpl-{request_id}"]}

    def listing(self, body: dict[str, Any], count: int) -> dict[str, Any]:
        return body | {"top_logprobs": count}

    @reader
    def listed(self, answer: Any) -> list[float]:
        return [
            field(found, "logprob") for found in field(answer, "choices", 0, "logprobs", "content", 0, "top_logprobs")
        ]


def _message(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return the message in OpenAI's format, where the arguments of a tool call are JSON text."""
    calls = message.get("tool_calls")
    if not calls:
        return dict(message)
    return {**message, "tool_calls": [_call(call) for call in calls]}


def _call(call: Mapping[str, Any]) -> dict[str, Any]:
    function = call.get("function")
    if not isinstance(function, Mapping) or isinstance(function.get("arguments"), str):
        return dict(call)
    return {**call, "function": {**function, "arguments": json.dumps(function.get("arguments"), ensure_ascii=False)}}
