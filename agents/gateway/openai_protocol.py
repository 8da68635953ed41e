"""OpenAI's chat-completions protocol as pure functions: they read a request and write an answer.

Every field of a request is honoured, is refused with its name, or can't change what is sampled. No field that matters
is dropped silently. HTTP is in `gateway_server`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from ...tapes.common.plain_json import read_plain
from ...tapes.errors import TapereelError
from ...tapes.records import Message
from ..episode.chat import TOOL_CALL, calls_in_text, read_tool_call

_CHANGE_NOTHING = frozenset(
    {"user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "parallel_tool_calls"}
)
"""Fields for a hosted service that don't change what is sampled; they are ignored."""
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "n": (1,),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "logit_bias": ({},),
    "top_logprobs": (0,),
    "response_format": ({"type": "text"},),
    "tool_choice": ("auto", "none"),
    "modalities": (["text"],),
}
"""Fields that are accepted with these values only."""
_ROLES = ("system", "developer", "user", "assistant", "tool")
CHUNK = "chat.completion.chunk"
"""The `object` field of each chunk of a stream."""


class Refused(TapereelError, ValueError):
    """A request is refused, with an error body in the form that OpenAI's clients read."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        kind: str = "invalid_request_error",
        code: str | None = None,
        param: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        """HTTP status code."""
        self.headers = headers or {}
        self.body = {"error": {"message": message, "type": kind, "param": param, "code": code}}
        """The JSON object that is sent."""


def _bad(message: str, param: str | None = None) -> Refused:
    return Refused(400, message, param=param)


def invalid(error: ValidationError) -> Refused:
    """The refusal of a body that doesn't fit its model: the place and the problem of the first error."""
    found = error.errors(include_input=False, include_url=False)[0]
    place = ".".join(map(str, found["loc"]))
    return _bad(f"{place or 'the body'}: {found['msg']}", place or None)


@dataclass(frozen=True, slots=True)
class ChatRequest:
    """One request for a completion."""

    model: str
    """The client's name for the model. The answer repeats it; it selects nothing."""
    messages: list[Message]
    """Each content is plain text; empty fields are left out."""
    tools: tuple[dict[str, Any], ...] | None
    temperature: float | None
    """None if the client doesn't set it; the same holds for `top_p`, `max_tokens` and `seed`."""
    top_p: float | None
    max_tokens: int | None
    seed: int | None
    stop: tuple[str, ...]
    stream: bool
    usage: bool
    """Whether a stream ends with a chunk of token counts (`stream_options.include_usage`)."""
    logprobs: bool
    token_ids: bool
    """Whether the answer contains prompt and completion ids (`return_token_ids`, an extension of vLLM)."""


def read_request(body: bytes) -> ChatRequest:
    """Parse a request body. Raises Refused with the name of the wrong field."""
    try:
        data = read_plain(body)
    except ValueError as error:
        raise _bad(f"the body is not JSON in UTF-8: {error}") from None
    if not isinstance(data, dict):
        raise _bad("the body is not a JSON object")
    left = {name: value for name, value in data.items() if value is not None and name not in _CHANGE_NOTHING}
    for name, allowed in _NEUTRAL.items():
        if name in left and left[name] not in allowed:
            raise _bad(
                f"{name}={json.dumps(left[name])[:200]} is not supported; leave it out"
                + (", and ask once for each answer" if name == "n" else ""),
                name,
            )
    options = left.pop("stream_options", {})
    tools = tuple(_tool(tool, k) for k, tool in enumerate(_a(left, "tools", list, []))) or None
    if left.get("tool_choice") == "none":
        tools = None
    limits = [_number(left, name, int, 1) for name in ("max_completion_tokens", "max_tokens")]
    found = ChatRequest(
        model=_a(left, "model", str, ""),
        messages=_messages(left.pop("messages", None)),
        tools=tools,
        temperature=_number(left, "temperature", float, 0),
        top_p=_number(left, "top_p", float, 0),
        max_tokens=next((limit for limit in limits if limit is not None), None),
        seed=_number(left, "seed", int, -(2**63)),
        stop=_stop(left.pop("stop", ())),
        stream=_a(left, "stream", bool, False),
        usage=isinstance(options, dict) and options.get("include_usage") is True,
        logprobs=_a(left, "logprobs", bool, False),
        token_ids=_a(left, "return_token_ids", bool, False),
    )
    unknown = sorted(set(left) - set(_NEUTRAL))
    if unknown:
        raise _bad(f"{', '.join(unknown)}: not supported here; leave it out", unknown[0])
    return found


def _a(data: dict[str, Any], name: str, kind: type, default: Any) -> Any:
    """Remove the field from `data` and return its value, or the default. Raises Refused for a value of another type."""
    value = data.pop(name, default)
    if not isinstance(value, kind):
        raise _bad(f"{name} must be a JSON {_NAMES[kind]}, not {json.dumps(value)[:100]}", name)
    return value


_NAMES = {list: "array", str: "string", bool: "true or false", int: "integer", float: "number"}


def _number(data: dict[str, Any], name: str, kind: type, least: float) -> Any:
    """Remove a number from `data` and return it, or None. Raises Refused outside `least` to 2**63 (int64)."""
    value = data.pop(name, None)
    if value is None:
        return None
    fits = isinstance(value, int) if kind is int else isinstance(value, int | float)
    if isinstance(value, bool) or not fits or not least <= value < 2**63:
        raise _bad(f"{name} must be a {_NAMES[kind]} from {least} on, not {json.dumps(value)[:100]}", name)
    if name == "top_p" and not 0 < value <= 1:
        raise _bad(f"top_p must be above 0 and at most 1, not {value}", name)
    return kind(value)


def _stop(value: Any) -> tuple[str, ...]:
    stops = (value,) if isinstance(value, str) else value
    if not isinstance(stops, list | tuple) or len(stops) > 4 or not all(isinstance(s, str) and s for s in stops):
        raise _bad("stop must be a text, or at most 4 of them, none empty", "stop")
    return tuple(stops)


def _tool(tool: Any, k: int) -> dict[str, Any]:
    function = tool.get("function") if isinstance(tool, dict) else None
    if not isinstance(function, dict) or tool.get("type") != "function" or not isinstance(function.get("name"), str):
        raise _bad(f'tools[{k}] must be {{"type": "function", "function": {{"name": ...}}}}', "tools")
    return tool


def _messages(value: Any) -> list[Message]:
    if not isinstance(value, list) or not value:
        raise _bad("messages must be a JSON array with at least one message", "messages")
    return [_message(message, k) for k, message in enumerate(value)]


def _message(message: Any, k: int) -> Message:
    if not isinstance(message, dict) or message.get("role") not in _ROLES:
        raise _bad(f"messages[{k}] must be an object whose role is one of {', '.join(_ROLES)}", "messages")
    clean: Message = {"role": message["role"], "content": _text(message.get("content"), k)}
    for name in ("name", "tool_call_id"):
        value = message.get(name)
        if value is not None:
            clean[name] = _string(value, f"messages[{k}].{name}")
    if message.get("tool_calls"):
        calls = message["tool_calls"]
        if not isinstance(calls, list):
            raise _bad(f"messages[{k}].tool_calls must be a JSON array", "messages")
        clean["tool_calls"] = [_tool_call(call, k) for call in calls]
    return clean


def _tool_call(call: Any, k: int) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise _bad(f"messages[{k}].tool_calls must be function calls", "messages")
    arguments = _string(function.get("arguments", ""), f"messages[{k}].tool_calls.function.arguments")
    return {
        "id": _string(call.get("id", ""), f"messages[{k}].tool_calls.id"),
        "type": "function",
        "function": {"name": function["name"], "arguments": arguments},
    }


def _string(value: Any, where: str) -> str:
    if not isinstance(value, str):
        raise _bad(f"{where} must be a string, not {json.dumps(value)[:100]}", "messages")
    return value


def _text(content: Any, k: int) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, list):
        raise _bad(f"messages[{k}].content must be a text or an array of text parts", "messages")
    for part in content:
        if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            kind = part.get("type") if isinstance(part, dict) else type(part).__name__
            raise _bad(f"messages[{k}] has a part of type {kind!r}; only text is taken here", "messages")
    return "".join(part["text"] for part in content)


@dataclass(frozen=True, slots=True)
class ChatAnswer:
    """One completion in the form that is sent to the client."""

    id: str
    model: str
    text: str
    finish: str
    """`stop`, `length` or `tool_calls`."""
    tool_calls: tuple[dict[str, Any], ...] = ()
    prompt_tokens: int = 0
    completion_tokens: int = 0
    logprobs: list[dict[str, Any]] | None = None
    """OpenAI's entries, one per token; None if the request didn't ask for them or they are unknown."""
    prompt_ids: list[int] | None = None
    """Token ids of the prompt; None if the request didn't ask for them. The same holds for `ids` (the completion)."""
    ids: list[int] | None = None
    created: int = 0
    """Seconds since 1970."""

    @property
    def message(self) -> Message:
        """The assistant's message. Clients send it back in later requests."""
        content = self.text or None if self.tool_calls else self.text
        message: Message = {"role": "assistant", "content": content}
        if self.tool_calls:
            message["tool_calls"] = list(self.tool_calls)
        return message

    @property
    def usage(self) -> dict[str, int]:
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
        }

    def body(self) -> dict[str, Any]:
        """The JSON object of an answer that isn't streamed."""
        choice: dict[str, Any] = {
            "index": 0,
            "message": self.message,
            "finish_reason": self.finish,
            "logprobs": self._logprobs(),
        }
        if self.ids is not None:
            choice["token_ids"] = self.ids
        whole = {**self._head("chat.completion"), "choices": [choice], "usage": self.usage}
        return whole if self.prompt_ids is None else {**whole, "prompt_token_ids": self.prompt_ids}

    def chunks(self, sent: str, *, usage: bool) -> Iterator[dict[str, Any]]:
        """The last chunks of a stream: the text after `sent`, the tool calls, then the finish reason with log-probs and
        ids, then the usage. `sent` must be a prefix of `text` (see `Live.end`)."""

        def chunk(choice: dict[str, Any]) -> dict[str, Any]:
            return {**self._head(CHUNK), "choices": [choice]}

        if len(self.text) > len(sent):
            yield chunk(delta({"content": self.text[len(sent) :]}))
        for k, call in enumerate(self.tool_calls):
            yield chunk(delta({"tool_calls": [{"index": k, **call}]}))
        last: dict[str, Any] = {**delta({}), "finish_reason": self.finish, "logprobs": self._logprobs()}
        if self.ids is not None:
            last["token_ids"] = self.ids
        yield {**chunk(last), **({} if self.prompt_ids is None else {"prompt_token_ids": self.prompt_ids})}
        if usage:
            yield {**self._head(CHUNK), "choices": [], "usage": self.usage}

    def _head(self, kind: str) -> dict[str, Any]:
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model}

    def _logprobs(self) -> dict[str, Any] | None:
        return None if self.logprobs is None else {"content": self.logprobs, "refusal": None}


def delta(more: dict[str, Any]) -> dict[str, Any]:
    """The choice of a chunk that adds `more` to the message."""
    return {"index": 0, "delta": more, "finish_reason": None, "logprobs": None}


def read_calls(parsed: Sequence[dict[str, Any]], text: str, name: str) -> tuple[str, tuple[dict[str, Any], ...]]:
    """(text, function calls) of an answer. The text doesn't contain the calls.

    The calls are those that the engine parsed, or else those in the text: between <tool_call> tags or as one JSON
    object. A text that doesn't parse as calls stays text. `name` makes the ids of calls unique in the tape.
    """
    if parsed:
        return text, tuple(_tool_call(call, 0) for call in parsed)
    try:
        calls = [read_tool_call(call, k) for k, call in enumerate(calls_in_text(text))]
    except ValueError:
        return text, ()
    if not calls:
        return text, ()
    made = (
        {
            "id": f"call_{name}{k}",
            "type": "function",
            "function": {"name": call.name, "arguments": json.dumps(call.arguments)},
        }
        for k, call in enumerate(calls)
    )
    return (TOOL_CALL.sub("", text).rstrip() if "<tool_call>" in text else ""), tuple(made)


def token_logprobs(texts: Sequence[str], logprobs: Sequence[float]) -> list[dict[str, Any]]:
    """OpenAI's entries for tokens and their log-probs (natural logarithm). NaN stands for unknown and becomes null."""
    # `value == value` is false for NaN only; JSON has no NaN.
    return [
        {"token": text, "logprob": value if value == value else None, "bytes": list(text.encode()), "top_logprobs": []}
        for text, value in zip(texts, logprobs, strict=True)
    ]
