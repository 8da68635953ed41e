"""OpenAI's chat-completions API as a dialect of the gateway."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Literal, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    JsonValue,
    TypeAdapter,
    ValidationError,
    model_validator,
)

from ...tapes.records import Message
from .dialect import (
    ANY_OBJECT,
    THOUGHT,
    Answered,
    Asked,
    DataUrl,
    Flag,
    MaxTokens,
    Refused,
    Schema,
    StopString,
    Temperature,
    TopK,
    TopP,
    check_pictures,
    demanded,
    event,
    fields_of,
    invalid,
)

_IGNORED = frozenset(
    {
        "metadata",
        "moderation",
        "prediction",
        "prompt_cache_key",
        "prompt_cache_options",
        "prompt_cache_retention",
        "reasoning_effort",  # the chat template decides whether and how a model thinks
        "safety_identifier",
        "service_tier",
        "store",
        "user",
        "verbosity",
    }
)
"""Fields that mean nothing for a model of one's own."""
_NEUTRAL: dict[str, tuple[JsonValue, ...]] = {
    "n": (1,),
    "logit_bias": ({},),
    "top_logprobs": (0,),
    "modalities": (["text"],),
}
"""Fields that are accepted only with these values."""
_OFF: dict[str, tuple[float, ...]] = {
    "top_k": (-1, 0),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "min_p": (0,),
    "repetition_penalty": (1,),
}
"""Settings of the sampler that change nothing with these values."""
CHUNK = "chat.completion.chunk"
"""The `object` field of each chunk of a stream."""
_KINDS = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}
"""OpenAI's error type for each HTTP status. Any other status below 500 is an `invalid_request_error`."""
_CODES = {401: "invalid_api_key", 404: "not_found", 405: "method_not_allowed", 413: "request_too_large"}
"""The default error code for each HTTP status."""


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


class _ImageUrl(BaseModel):
    url: DataUrl
    detail: Literal["auto", "low", "high"] | None = None
    """Only hosted models use this. Elsewhere the image processor chooses the size. The call records the value."""


class _ImagePart(BaseModel):
    type: Literal["image_url"]
    image_url: _ImageUrl


class ChatMessage(BaseModel):
    """A message in a request. Fields that only a hosted service knows, such as `refusal`, are left out."""

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: Annotated[
        list[Annotated[_TextPart | _ImagePart, Field(discriminator="type")]],
        BeforeValidator(lambda value: [{"type": "text", "text": value}] if isinstance(value, str) else value or []),
    ] = []
    name: str | None = None
    tool_call_id: str | None = None
    tool_calls: list[_ToolCall] | None = None
    function_call: _Function | None = None
    """The old form of a single call. Its result is the message of role `function` with the same name."""
    reasoning_content: str | None = None
    """The thoughts of an answer, in an assistant's message. vLLM calls this field `reasoning`."""
    reasoning: str | None = None

    def plain(self) -> Message:
        """Return the message without empty fields. Its content is one text, or a list of parts if it has pictures."""
        rest: Message = {}
        if self.role == "function":
            return ChatMessage(role="tool", content=self.content, tool_call_id=self.name).plain()
        if self.function_call is not None and not self.tool_calls:
            rest["tool_calls"] = [_ToolCall(id=self.function_call.name, function=self.function_call).model_dump()]
        if self.name is not None:
            rest["name"] = self.name
        if self.tool_call_id is not None:
            rest["tool_call_id"] = self.tool_call_id
        if self.tool_calls:
            rest["tool_calls"] = [call.model_dump() for call in self.tool_calls]
        pieces = [part.text for part in self.content if isinstance(part, _TextPart)]
        content = "".join(pieces) if len(pieces) == len(self.content) else [part.model_dump() for part in self.content]
        if self.role == "assistant" and (thought := self.reasoning_content or self.reasoning):
            rest[THOUGHT] = thought
        return {"role": self.role, "content": content, **rest}


_messages: TypeAdapter[list[ChatMessage]] = TypeAdapter(Annotated[list[ChatMessage], Field(min_length=1)])


def _tool(tool: dict[str, JsonValue]) -> dict[str, JsonValue]:
    function = tool.get("function")
    if tool.get("type") != "function" or not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise ValueError('must be {"type": "function", "function": {"name": ...}}')
    return {"type": "function", "function": function}  # without `cache_control`, which a template would show


class _Named(BaseModel):
    model_config = ConfigDict(extra="forbid")
    name: str


class _Choice(BaseModel):
    """The tool that the answer must call."""

    model_config = ConfigDict(extra="forbid")
    type: Literal["function"]
    function: _Named


class _JsonSchema(BaseModel):
    """`name`, `description` and `strict` change nothing: a form is always enforced if the engine can."""

    schema_: Schema = Field(default=ANY_OBJECT, alias="schema")


class _Format(BaseModel):
    model_config = ConfigDict(extra="forbid")
    type: Literal["text", "json_object", "json_schema"]
    json_schema: _JsonSchema | None = None

    @model_validator(mode="after")
    def _check(self) -> Self:
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise ValueError("json_schema goes with the type json_schema")
        return self

    @property
    def demand(self) -> Schema | None:
        given = ANY_OBJECT if self.json_schema is None else self.json_schema.schema_
        return None if self.type == "text" else given


class _StreamOptions(BaseModel):
    include_usage: bool | None = Field(default=None, strict=True)


Penalty = Annotated[float, Field(strict=True, ge=-2, le=2)]


class _Request(BaseModel):
    """The fields of a request except `messages`."""

    model_config = ConfigDict(extra="forbid")
    model: str = ""
    tools: list[Annotated[dict[str, JsonValue], AfterValidator(_tool)]] = []
    tool_choice: Literal["auto", "none", "required"] | _Choice = "auto"
    response_format: _Format | None = None
    parallel_tool_calls: Flag = True
    temperature: Temperature | None = None
    top_p: TopP | None = None
    top_k: TopK | None = None
    presence_penalty: Penalty = 0
    frequency_penalty: Penalty = 0
    min_p: Annotated[float, Field(strict=True, ge=0, le=1)] = 0
    repetition_penalty: Annotated[float, Field(strict=True, gt=0, le=2)] = 1
    max_tokens: MaxTokens | None = None
    seed: int | None = Field(default=None, strict=True, ge=-(2**63), lt=2**63)
    stop: Annotated[
        list[StopString],
        Field(max_length=4),
        BeforeValidator(lambda value: [value] if isinstance(value, str) else value),
    ] = []
    stream: Flag = False
    stream_options: _StreamOptions = _StreamOptions()
    logprobs: Flag = False
    return_token_ids: Flag = False
    """vLLM's extension of the protocol."""


def read(data: Mapping[str, JsonValue]) -> Asked:
    """Check the JSON object of a request. Raises Refused with the name of the invalid field."""
    left = fields_of(data, _IGNORED, _NEUTRAL)
    if "max_completion_tokens" in left:
        left["max_tokens"] = left.pop("max_completion_tokens")
    left = {name: value for name, value in left.items() if value not in _OFF.get(name, ())}
    sent = left.pop("messages", None)
    try:
        messages = _messages.validate_python(sent)
    except ValidationError as error:
        raise invalid(error, "messages") from None
    check_pictures(sum(isinstance(part, _ImagePart) for message in messages for part in message.content), "messages")
    try:
        found = _Request.model_validate(left)
    except ValidationError as error:
        raise invalid(error) from None
    choice, form = found.tool_choice, found.response_format
    tools = [] if choice == "none" else found.tools
    forced = choice.function.name if isinstance(choice, _Choice) else "" if choice == "required" else None
    constraint, demanded_by = demanded(tools, form and form.demand, "response_format", forced)
    return Asked(
        messages=[message.plain() for message in messages],
        tools=tools,
        constraint=constraint,
        demanded_by=demanded_by,
        model=found.model,
        parallel_tool_calls=found.parallel_tool_calls,
        temperature=found.temperature,
        top_p=found.top_p,
        top_k=found.top_k,
        penalties={name: float(getattr(found, name)) for name in _OFF if name in left and name != "top_k"},
        max_tokens=found.max_tokens,
        seed=found.seed,
        stop=found.stop,
        stream=found.stream,
        logprobs=found.logprobs,
        token_ids=found.return_token_ids,
        wire={"include_usage": bool(found.stream_options.include_usage)},
    )


def body(asked: Asked, answer: Answered) -> dict[str, object]:
    """Return the JSON object of an answer that isn't streamed."""
    choice: dict[str, object] = {
        "index": 0,
        "message": {**answer.message, **_thought(answer.reasoning)},
        "finish_reason": answer.finish,
        "logprobs": _logprobs(answer),
    }
    if answer.ids is not None:
        choice["token_ids"] = answer.ids
    whole: dict[str, object] = {
        "id": f"chatcmpl-{answer.id}",
        "object": "chat.completion",
        "created": answer.created,
        "model": asked.model,
        "choices": [choice],
        "usage": _usage(answer),
    }
    return whole if answer.prompt_ids is None else {**whole, "prompt_token_ids": answer.prompt_ids}


def refusal(error: Refused) -> dict[str, object]:
    """Return the JSON object of an error."""
    known = _KINDS.get(error.status, "server_error" if error.status >= 500 else "invalid_request_error")
    kind = error.code if error.code == "insufficient_quota" else known
    code = error.code or _CODES.get(error.status)
    return {"error": {"message": str(error), "type": kind, "param": error.param, "code": code}}


class _Chunks:
    """Writes an answer as chunks. The tool calls, and the log-probs and ids of all tokens, are sent at the end."""

    quiet = b":\n\n"

    def __init__(self, asked: Asked) -> None:
        self._asked = asked
        self._head: dict[str, object] = {}
        self._sent = self._thought = 0

    def begin(self, id: str, created: int) -> bytes:
        self._head = {"id": f"chatcmpl-{id}", "object": CHUNK, "created": created, "model": self._asked.model}
        return self._delta({"role": "assistant", "content": ""})

    def thought(self, piece: str) -> bytes:
        self._thought += len(piece)
        return self._delta(_thought(piece))

    def text(self, piece: str) -> bytes:
        self._sent += len(piece)
        return self._delta({"content": piece})

    def end(self, answer: Answered) -> bytes:
        found = [self.thought(answer.reasoning[self._thought :])] if len(answer.reasoning) > self._thought else []
        found += [self.text(answer.text[self._sent :])] if len(answer.text) > self._sent else []
        found += [self._delta({"tool_calls": [{"index": k, **call}]}) for k, call in enumerate(answer.tool_calls)]
        last = _choice({}) | {"finish_reason": answer.finish, "logprobs": _logprobs(answer)}
        if answer.ids is not None:
            last["token_ids"] = answer.ids
        prompt = {} if answer.prompt_ids is None else {"prompt_token_ids": answer.prompt_ids}
        found.append(event({**self._head, "choices": [last], **prompt}))
        if self._asked.wire["include_usage"]:
            found.append(event({**self._head, "choices": [], "usage": _usage(answer)}))
        return b"".join([*found, b"data: [DONE]\n\n"])

    def failed(self, error: Refused) -> bytes:
        return event(refusal(error))

    def _delta(self, more: Mapping[str, object]) -> bytes:
        return event({**self._head, "choices": [_choice(more)]})


def stream(asked: Asked) -> _Chunks:
    """Return the writer of a streamed answer."""
    return _Chunks(asked)


def _thought(text: str) -> dict[str, str]:
    """Return the fields for thoughts. Clients read one of the two names: DeepSeek's, or the one of vLLM and Ollama."""
    return {"reasoning_content": text, "reasoning": text} if text else {}


def _choice(more: Mapping[str, object]) -> dict[str, object]:
    return {"index": 0, "delta": more, "finish_reason": None, "logprobs": None}


def _usage(answer: Answered) -> dict[str, int]:
    return {
        "prompt_tokens": answer.prompt_tokens,
        "completion_tokens": answer.completion_tokens,
        "total_tokens": answer.prompt_tokens + answer.completion_tokens,
    }


def _logprobs(answer: Answered) -> dict[str, object] | None:
    return None if answer.logprobs is None else {"content": answer.logprobs, "refusal": None}


def token_logprobs(tokens: Sequence[str], logprobs: Sequence[float]) -> list[dict[str, object]]:
    """Return OpenAI's entries for tokens and their log-probs (natural logarithm). An unknown log-prob is NaN and is
    sent as null."""
    # `value == value` is false only for NaN, which JSON doesn't have.
    return [
        {"token": text, "logprob": value if value == value else None, "bytes": list(text.encode()), "top_logprobs": []}
        for text, value in zip(tokens, logprobs, strict=True)
    ]
