"""OpenAI's chat-completions protocol as pure functions, which read a request and write an answer.

Each field in a request is either honoured, or refused by name, or ignored because it can't affect sampling. No field
that matters is dropped silently. `gateway_server` handles HTTP.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    JsonValue,
    TypeAdapter,
    ValidationError,
)

from ...tapes.decoding import DATA_URL, MAX_PIXELS
from ...tapes.errors import TapereelError
from ...tapes.records import Message

_CHANGE_NOTHING = frozenset({"user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key"})
"""Fields for a hosted service that don't affect sampling. They are ignored."""
_NEUTRAL: dict[str, tuple[JsonValue, ...]] = {
    "n": (1,),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "logit_bias": ({},),
    "top_logprobs": (0,),
    "response_format": ({"type": "text"},),
    "tool_choice": ("auto", "none"),
    "modalities": (["text"],),
}
"""Fields that are accepted only with these values."""
PICTURES = 500
"""Maximum pictures in one request, as at OpenAI."""
PIXELS = 4 * MAX_PIXELS
"""Maximum number of pixels in all new pictures of a request. Pictures that an earlier request sent aren't decoded
again, so they don't count."""
CHUNK = "chat.completion.chunk"
"""The `object` field of each chunk of a stream."""


_KINDS = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}
"""OpenAI's error type for each HTTP status. Any other status below 500 is an `invalid_request_error`."""
_CODES = {401: "invalid_api_key", 404: "not_found", 405: "method_not_allowed", 413: "request_too_large"}
"""The default error code for each HTTP status."""


class Refused(TapereelError, ValueError):
    """The gateway refuses a request. The error body has the form that OpenAI's clients read."""

    def __init__(
        self, status: int, message: str, *, code: str | None = None, param: str | None = None, final: bool = False
    ) -> None:
        """`final` means that no retry helps. Without it, OpenAI's clients retry some statuses by themselves."""
        super().__init__(message)
        known = _KINDS.get(status, "server_error" if status >= 500 else "invalid_request_error")
        kind = code if code == "insufficient_quota" else known
        self.status = status
        """HTTP status code."""
        self.headers = {"x-should-retry": "false"} if final else {"Retry-After": "1"} if status == 429 else {}
        self.body = {"error": {"message": message, "type": kind, "param": param, "code": code or _CODES.get(status)}}
        """The JSON object that is sent."""


def _bad(message: str, param: str | None = None) -> Refused:
    return Refused(400, message, param=param)


def invalid(error: ValidationError, *within: str) -> Refused:
    """Return the refusal of a body that doesn't fit its model. It states the first error's place, problem and value."""
    found = error.errors(include_url=False)[0]
    place = [*within, *map(str, found["loc"])]
    place = [part for k, part in enumerate(place) if k == 0 or part != place[k - 1]]  # the type of a content part
    if found["type"] == "extra_forbidden":
        return _bad(f"{'.'.join(place)}: not supported here; leave it out", place[0])
    problem = found["msg"].removeprefix("Value error, ")
    if found["type"] not in ("missing", "too_short", "too_long"):
        problem += f", not {json.dumps(found['input'], default=str)[:100]}"
    return _bad(f"{'.'.join(place) or 'the body'}: {problem}", place[0] if place else None)


class _Function(BaseModel):
    name: str
    arguments: str = ""


class _ToolCall(BaseModel):
    id: str = ""
    type: Literal["function"] = "function"
    function: _Function


class _TextPart(BaseModel):
    type: Literal["text"]
    text: str


def _data_url(url: str) -> str:
    if not DATA_URL.match(url):
        raise ValueError("must be data:image/png;base64,... (or jpeg, webp), since no URL is ever fetched")
    return url


class _ImageUrl(BaseModel):
    url: Annotated[str, AfterValidator(_data_url)]
    detail: Literal["auto", "low", "high"] | None = None
    """Only hosted models use this. Elsewhere the image processor chooses the size. The call records the value."""


class _ImagePart(BaseModel):
    type: Literal["image_url"]
    image_url: _ImageUrl


class ChatMessage(BaseModel):
    """A message in a request. Fields that only a hosted service knows, such as `refusal`, are left out."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Annotated[
        list[Annotated[_TextPart | _ImagePart, Field(discriminator="type")]],
        BeforeValidator(lambda value: [{"type": "text", "text": value}] if isinstance(value, str) else value or []),
    ] = []
    name: str | None = None
    tool_call_id: str | None = None
    tool_calls: list[_ToolCall] | None = None

    def plain(self) -> Message:
        """Return the message without empty fields. Its content is one text, or a list of parts if it has pictures."""
        rest = self.model_dump(include={"name", "tool_call_id", "tool_calls"}, exclude_none=True)
        if not self.tool_calls:
            rest.pop("tool_calls", None)
        pieces = [part.text for part in self.content if isinstance(part, _TextPart)]
        content = "".join(pieces) if len(pieces) == len(self.content) else [part.model_dump() for part in self.content]
        return {"role": self.role, "content": content, **rest}


_messages: TypeAdapter[list[ChatMessage]] = TypeAdapter(Annotated[list[ChatMessage], Field(min_length=1)])


def _tool(tool: dict[str, JsonValue]) -> dict[str, JsonValue]:
    function = tool.get("function")
    if tool.get("type") != "function" or not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise ValueError('must be {"type": "function", "function": {"name": ...}}')
    return tool


class StreamOptions(BaseModel):
    """Options of a streamed answer."""

    include_usage: bool | None = Field(default=None, strict=True)
    """Whether the stream ends with a chunk that has the token counts."""


class ChatRequest(BaseModel):
    """One request for a completion."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    model: str = ""
    """The client's name for the model. The answer repeats this name, but it doesn't choose a model."""
    messages: list[Message]
    """A message's content is plain text, or parts with data URLs that aren't decoded yet. Empty fields are left out."""
    tools: list[Annotated[dict[str, JsonValue], AfterValidator(_tool)]] = []
    parallel_tool_calls: bool = Field(default=True, strict=True)
    """If false, the answer contains only the first of several tool calls. The tape has all of them."""
    temperature: float | None = Field(default=None, strict=True, ge=0)
    """None if the client doesn't set it. The same holds for `top_p`, `max_tokens` and `seed`."""
    top_p: float | None = Field(default=None, strict=True, gt=0, le=1)
    max_tokens: int | None = Field(default=None, strict=True, ge=1, lt=2**63)
    seed: int | None = Field(default=None, strict=True, ge=-(2**63), lt=2**63)
    stop: Annotated[
        list[Annotated[str, Field(min_length=1)]],
        Field(max_length=4),
        BeforeValidator(lambda value: [value] if isinstance(value, str) else value),
    ] = []
    stream: bool = Field(default=False, strict=True)
    stream_options: StreamOptions = StreamOptions()
    logprobs: bool = Field(default=False, strict=True)
    token_ids: bool = Field(default=False, strict=True, validation_alias="return_token_ids")
    """Whether the answer contains the token ids of prompt and completion. This is vLLM's extension of the protocol."""


def read_request(data: Mapping[str, JsonValue]) -> ChatRequest:
    """Check the JSON object of a request. Raises Refused with the name of the invalid field."""
    left = {name: value for name, value in data.items() if value is not None and name not in _CHANGE_NOTHING}
    for name, allowed in _NEUTRAL.items():
        if name in left and left[name] not in allowed:
            raise _bad(
                f"{name}={json.dumps(left[name])[:200]} is not supported; leave it out"
                + (", and ask once for each answer" if name == "n" else ""),
                name,
            )
    if left.get("tool_choice") == "none":
        left.pop("tools", None)
    if "max_completion_tokens" in left:
        left["max_tokens"] = left.pop("max_completion_tokens")
    fields = {name: value for name, value in left.items() if name not in _NEUTRAL}
    try:
        messages = _messages.validate_python(fields.get("messages"))
    except ValidationError as error:
        raise invalid(error, "messages") from None
    pictures = sum(isinstance(part, _ImagePart) for message in messages for part in message.content)
    if pictures > PICTURES:
        raise _bad(f"messages: {pictures:,} pictures, at most {PICTURES} are read; send fewer", "messages")
    try:
        return ChatRequest.model_validate({**fields, "messages": [message.plain() for message in messages]})
    except ValidationError as error:
        raise invalid(error) from None


@dataclass(frozen=True, slots=True)
class ChatAnswer:
    """One completion in the form that is sent to the client."""

    id: str
    model: str
    text: str
    finish: str
    """`stop`, `length` or `tool_calls`."""
    tool_calls: tuple[Message, ...] = ()
    prompt_tokens: int = 0
    completion_tokens: int = 0
    logprobs: list[dict[str, object]] | None = None
    """OpenAI's entries, one per token. None if the request didn't ask for log-probs or they are unknown."""
    prompt_ids: list[int] | None = None
    """Token ids of the prompt, or None if the request didn't ask for them. The same holds for the completion's
    `ids`."""
    ids: list[int] | None = None
    created: int = 0
    """Seconds since 1970."""

    @property
    def message(self) -> Message:
        """The assistant's message, which clients send back in later requests."""
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

    def body(self) -> dict[str, object]:
        """Return the JSON object of an answer that isn't streamed."""
        choice: dict[str, object] = {
            "index": 0,
            "message": self.message,
            "finish_reason": self.finish,
            "logprobs": self._logprobs(),
        }
        if self.ids is not None:
            choice["token_ids"] = self.ids
        whole = {**self._head("chat.completion"), "choices": [choice], "usage": self.usage}
        return whole if self.prompt_ids is None else {**whole, "prompt_token_ids": self.prompt_ids}

    def chunks(self, sent: str, *, usage: bool) -> Iterator[dict[str, object]]:
        """Yield the last chunks of a stream: the text after `sent`, the tool calls, the finish reason with log-probs
        and ids, and the usage. `sent` must be a prefix of `text` (see `Live.end`)."""

        def chunk(choice: dict[str, object]) -> dict[str, object]:
            return {**self._head(CHUNK), "choices": [choice]}

        if len(self.text) > len(sent):
            yield chunk(delta({"content": self.text[len(sent) :]}))
        for k, call in enumerate(self.tool_calls):
            yield chunk(delta({"tool_calls": [{"index": k, **call}]}))
        last: dict[str, object] = {**delta({}), "finish_reason": self.finish, "logprobs": self._logprobs()}
        if self.ids is not None:
            last["token_ids"] = self.ids
        yield {**chunk(last), **({} if self.prompt_ids is None else {"prompt_token_ids": self.prompt_ids})}
        if usage:
            yield {**self._head(CHUNK), "choices": [], "usage": self.usage}

    def _head(self, kind: str) -> dict[str, object]:
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model}

    def _logprobs(self) -> dict[str, object] | None:
        return None if self.logprobs is None else {"content": self.logprobs, "refusal": None}


def delta(more: Mapping[str, object]) -> dict[str, object]:
    """Return a stream chunk's choice, which adds `more` to the message."""
    return {"index": 0, "delta": more, "finish_reason": None, "logprobs": None}


def token_logprobs(tokens: Sequence[str], logprobs: Sequence[float]) -> list[dict[str, object]]:
    """Return OpenAI's entries for tokens and their log-probs (natural logarithm). An unknown log-prob is NaN and is
    sent as null."""
    # `value == value` is false only for NaN, which JSON doesn't have.
    return [
        {"token": text, "logprob": value if value == value else None, "bytes": list(text.encode()), "top_logprobs": []}
        for text, value in zip(tokens, logprobs, strict=True)
    ]
