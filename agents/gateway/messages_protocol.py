"""Anthropic's Messages API as a dialect of the gateway."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    JsonValue,
    Tag,
    ValidationError,
    model_validator,
)

from ...tapes.common.plain_json import read_plain
from ...tapes.records import Message
from .dialect import (
    PLACE,
    THOUGHT,
    Answered,
    Asked,
    Flag,
    MaxTokens,
    Part,
    PartStream,
    Refused,
    Schema,
    StopString,
    Temperature,
    TopK,
    TopP,
    check_pictures,
    content_of,
    data_url,
    demanded,
    event,
    fields_of,
    invalid,
    parts_of,
)

_IGNORED = frozenset(
    {
        "betas",
        "billing_policy",
        "cache_control",
        "diagnostics",
        "inference_geo",
        "metadata",
        "service_tier",
        "speed",
        "thinking",  # the chat template decides whether and how a model thinks
        "user_profile_id",
        "workspace_id",
    }
)
"""Fields that mean nothing for a model of one's own. The same holds for `cache_control` in blocks and tools, for
`output_config.effort`, and for the headers `anthropic-version` and `anthropic-beta`."""
_HOSTED = re.compile(r"(web_search|web_fetch|code_execution|tool_search_tool_(bm25|regex))(_\d{8})?|mcp_toolset")
"""Types of tools that Anthropic would run."""
_INVALID = "INVALID_JSON"
"""Anthropic's key for arguments that aren't a JSON object."""
_KINDS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
}
"""Anthropic's error type for each HTTP status. Any other status below 500 is an `invalid_request_error`."""
_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
"""Anthropic's stop reason for each `Answered.finish`."""


def _blocks(value: Any) -> Any:
    return [{"type": "text", "text": value}] if isinstance(value, str) else value


class _Text(BaseModel):
    type: Literal["text"]
    text: str

    def chat(self, place: str) -> Message:
        return {"type": "text", "text": self.text}


class _Source(BaseModel):
    type: Literal["base64"]
    media_type: str
    data: str

    @property
    def url(self) -> str:
        return f"data:{self.media_type};base64,{self.data}"

    @model_validator(mode="after")
    def _check(self) -> Self:
        data_url(self.url)
        return self


class _Image(BaseModel):
    type: Literal["image"]
    source: _Source

    def chat(self, place: str) -> Message:
        return {"type": "image_url", "image_url": {"url": self.source.url, "detail": None}, PLACE: f"{place}.source"}


class _ToolResult(BaseModel):
    type: Literal["tool_result"]
    tool_use_id: str
    content: Annotated[list[Annotated[_Text | _Image, Field(discriminator="type")]], BeforeValidator(_blocks)] = []
    is_error: Flag | None = None
    """The model reads the content of an error after the word `Error`."""

    def chat(self, place: str) -> Message:
        parts = [part.chat(f"{place}.content.{n}") for n, part in enumerate(self.content)]
        if self.is_error:
            parts.insert(0, {"type": "text", "text": "Error: " if parts else "Error"})
        return {"role": "tool", "content": content_of(parts), "tool_call_id": self.tool_use_id}


class _ToolUse(BaseModel):
    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, JsonValue]

    def chat(self) -> Message:
        broken = self.input.get(_INVALID) if len(self.input) == 1 else None
        arguments = broken if isinstance(broken, str) else json.dumps(self.input, ensure_ascii=False)
        return {"id": self.id, "type": "function", "function": {"name": self.name, "arguments": arguments}}


class _Thinking(BaseModel):
    """Thoughts. The text of redacted ones is unknown."""

    type: Literal["thinking", "redacted_thinking"]
    thinking: str = ""


class _Said(BaseModel):
    """A message of the user, of the system or with results of tools."""

    role: Literal["user", "system"]
    content: Annotated[
        list[Annotated[_Text | _Image | _ToolResult, Field(discriminator="type")]], BeforeValidator(_blocks)
    ]

    def chat(self, place: str) -> list[Message]:
        """Return a message for each result, and one for each run of other blocks."""
        found, parts = list[Message](), list[Message]()
        for n, block in enumerate(self.content):
            made = block.chat(f"{place}.content.{n}")
            if not isinstance(block, _ToolResult):
                parts.append(made)
                continue
            if parts:
                found.append({"role": self.role, "content": content_of(parts)})
            found.append(made)
            parts = []
        if parts or not found:
            found.append({"role": self.role, "content": content_of(parts)})
        return found


class _Assistant(BaseModel):
    role: Literal["assistant"]
    content: Annotated[
        list[Annotated[_Text | _ToolUse | _Thinking, Field(discriminator="type")]], BeforeValidator(_blocks)
    ]

    def chat(self, place: str) -> list[Message]:
        text = "".join(block.text for block in self.content if isinstance(block, _Text))
        calls = [block.chat() for block in self.content if isinstance(block, _ToolUse)]
        thought = "".join(block.thinking for block in self.content if isinstance(block, _Thinking))
        more = {"tool_calls": calls} if calls else {}
        return [{"role": "assistant", "content": text, **more, **({THOUGHT: thought} if thought else {})}]


class _Tool(BaseModel):
    """A tool of the client. Those whose schema only Anthropic's models know (`bash_20250124`) are refused."""

    type: Literal["custom"] | None = None
    name: str
    description: str | None = None
    input_schema: dict[str, JsonValue]

    def chat(self) -> dict[str, JsonValue]:
        described = {} if self.description is None else {"description": self.description}
        return {"type": "function", "function": {"name": self.name, **described, "parameters": self.input_schema}}


class _Hosted(BaseModel):
    """A tool that Anthropic would run, which is left out. With `tool_choice` auto, a model need not call it."""

    type: str


def _kind(tool: Any) -> str:
    kind = tool.get("type") if isinstance(tool, dict) else None
    return "hosted" if isinstance(kind, str) and _HOSTED.fullmatch(kind) else "custom"


class _Choice(BaseModel):
    model_config = ConfigDict(extra="forbid")
    type: Literal["auto", "none", "any", "tool"]
    name: str | None = None
    disable_parallel_tool_use: Flag = False

    @model_validator(mode="after")
    def _check(self) -> Self:
        if (self.type == "tool") != bool(self.name):
            raise ValueError("name goes with the type tool")
        return self


class _JsonSchema(BaseModel):
    model_config = ConfigDict(extra="forbid")
    type: Literal["json_schema"]
    schema_: Schema = Field(alias="schema")


class _Output(BaseModel):
    model_config = ConfigDict(extra="forbid")
    effort: str | None = None
    format: _JsonSchema | None = None


class _Edit(BaseModel):
    """An edit of thoughts means nothing, because the chat template decides which thoughts a prompt repeats."""

    type: Annotated[str, Field(pattern="^clear_thinking_")]


class _Edits(BaseModel):
    model_config = ConfigDict(extra="forbid")
    edits: list[_Edit] = []


class _Request(BaseModel):
    """The fields of a request."""

    model_config = ConfigDict(extra="forbid")
    model: str = ""
    max_tokens: MaxTokens
    messages: Annotated[list[Annotated[_Said | _Assistant, Field(discriminator="role")]], Field(min_length=1)]
    system: Annotated[list[_Text], BeforeValidator(_blocks)] = []
    tools: list[
        Annotated[Annotated[_Tool, Tag("custom")] | Annotated[_Hosted, Tag("hosted")], Discriminator(_kind)]
    ] = []
    tool_choice: _Choice = _Choice(type="auto")
    stop_sequences: Annotated[list[StopString], Field(max_length=64)] = []
    temperature: Temperature | None = None
    top_p: TopP | None = None
    top_k: TopK | None = None
    context_management: _Edits | None = None
    output_config: _Output | None = None
    stream: Flag = False


def read(data: Mapping[str, JsonValue]) -> Asked:
    """Check the JSON object of a request. Raises Refused with the name of the invalid field."""
    try:
        found = _Request.model_validate(fields_of(data, _IGNORED, {}))
    except ValidationError as error:
        raise invalid(error) from None
    messages: list[Message] = []
    if found.system:
        messages.append({"role": "system", "content": "".join(block.text for block in found.system)})
    for k, message in enumerate(found.messages):
        messages += message.chat(f"messages.{k}")
    contents = [message["content"] for message in messages]
    parts = [part for content in contents if isinstance(content, list) for part in content]
    check_pictures(sum(part["type"] == "image_url" for part in parts), "messages")
    choice, form = found.tool_choice, found.output_config and found.output_config.format
    tools = [] if choice.type == "none" else [t.chat() for t in found.tools if isinstance(t, _Tool)]
    forced = choice.name or ("" if choice.type == "any" else None)
    constraint, demanded_by = demanded(tools, form and form.schema_, "output_config.format", forced)
    return Asked(
        messages=messages,
        tools=tools,
        left_out=tuple(tool.type for tool in found.tools if isinstance(tool, _Hosted)),
        constraint=constraint,
        demanded_by=demanded_by,
        model=found.model,
        parallel_tool_calls=not choice.disable_parallel_tool_use,
        temperature=found.temperature,
        top_p=found.top_p,
        top_k=found.top_k,
        max_tokens=found.max_tokens,
        stop=found.stop_sequences,
        stream=found.stream,
    )


def read_count(data: Mapping[str, JsonValue]) -> Asked:
    """Check the JSON object of a request to count the tokens of a prompt. Raises Refused as `read` does."""
    return read({**data, "max_tokens": 1})


def body(asked: Asked, answer: Answered) -> dict[str, object]:
    """Return the JSON object of an answer that isn't streamed."""
    content = [_block(part, answer.id) for part in parts_of(answer)]
    content += [_tool_use(call) | {"input": _input(call)} for call in answer.tool_calls]
    return _message(asked, answer.id) | {"content": content, **_reason(answer), "usage": _usage(answer)}


def refusal(error: Refused) -> dict[str, object]:
    """Return the JSON object of an error."""
    kind = _KINDS.get(error.status, "api_error" if error.status >= 500 else "invalid_request_error")
    return {"type": "error", "error": {"type": kind, "message": str(error)}}


def _message(asked: Asked, id: str) -> dict[str, object]:
    return {
        "id": f"msg_{id}",
        "type": "message",
        "role": "assistant",
        "model": asked.model,
        "content": [],
        "stop_reason": None,
        "stop_sequence": None,
        "usage": {"input_tokens": 0, "output_tokens": 0},
    }


def _block(part: Part, id: str) -> dict[str, object]:
    # Clients drop a thought without a signature, so the answer's id is its signature.
    return (
        {"type": "thinking", "thinking": part.text, "signature": id}
        if part.thought
        else {"type": "text", "text": part.text}
    )


def _tool_use(call: Message) -> dict[str, object]:
    return {"type": "tool_use", "id": call["id"], "name": call["function"]["name"], "input": {}}


def _input(call: Message) -> JsonValue:
    arguments = call["function"]["arguments"]
    try:
        value = read_plain(arguments)
    except ValueError:
        value = None
    return value if isinstance(value, dict) else {_INVALID: arguments}


def _reason(answer: Answered) -> dict[str, object]:
    reason = _REASONS[answer.finish] if answer.stopped is None or answer.tool_calls else "stop_sequence"
    return {"stop_reason": reason, "stop_sequence": answer.stopped if reason == "stop_sequence" else None}


def _usage(answer: Answered) -> dict[str, object]:
    return {"input_tokens": answer.prompt_tokens, "output_tokens": answer.completion_tokens}


class _Events(PartStream):
    """Writes an answer as events. Calls aren't sent in pieces. The length of the prompt is sent at the end."""

    quiet = event({"type": "ping"}, "ping")

    def __init__(self, asked: Asked) -> None:
        super().__init__()
        self._asked = asked
        self._id = ""

    def begin(self, id: str, created: int) -> bytes:
        self._id = id
        return _event("message_start", message=_message(self._asked, id))

    def begun(self, index: int) -> bytes:
        return _open(index, _block(Part(self.parts[index].thought, ""), ""))

    def delta(self, index: int, piece: str) -> bytes:
        if self.parts[index].thought:
            return _delta(index, type="thinking_delta", thinking=piece)
        return _delta(index, type="text_delta", text=piece)

    def ended(self, index: int, answer: Answered | None) -> bytes:
        signed = _delta(index, type="signature_delta", signature=self._id) if self.parts[index].thought else b""
        return signed + _event("content_block_stop", index=index)

    def end(self, answer: Answered) -> bytes:
        found = [self.rest(answer)]
        for k, call in enumerate(answer.tool_calls, start=len(self.parts)):
            found.append(_open(k, _tool_use(call)))
            found.append(_delta(k, type="input_json_delta", partial_json=json.dumps(_input(call))))
            found.append(_event("content_block_stop", index=k))
        found.append(_event("message_delta", delta=_reason(answer), usage=_usage(answer)))
        return b"".join([*found, _event("message_stop")])

    def failed(self, error: Refused) -> bytes:
        return event(refusal(error), "error")


def stream(asked: Asked) -> _Events:
    """Return the writer of a streamed answer."""
    return _Events(asked)


def _event(kind: str, **more: object) -> bytes:
    return event({"type": kind, **more}, kind)


def _open(index: int, block: Mapping[str, object]) -> bytes:
    return _event("content_block_start", index=index, content_block=block)


def _delta(index: int, **delta: object) -> bytes:
    return _event("content_block_delta", index=index, delta=delta)
