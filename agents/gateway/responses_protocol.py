"""OpenAI's Responses API as a dialect of the gateway.

A response is a list of items: the thoughts, a message with the text, and one item for each tool call
(`responses_tools`). An item's id names its answer, so a client may send a reference in place of an item, or continue
from a response by its id.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, JsonValue, ValidationError

from ...tapes.records import Message
from .chat_protocol import refusal as chat_refusal
from .dialect import (
    ANSWER,
    ANY_OBJECT,
    PLACE,
    THOUGHT,
    Answered,
    Asked,
    DataUrl,
    Flag,
    MaxTokens,
    Part,
    PartStream,
    Refused,
    Schema,
    Temperature,
    TopP,
    check_pictures,
    content_of,
    demanded,
    event,
    fields_of,
    invalid,
    parts_of,
)
from .responses_tools import Hosted, Place, Tool, asked_call, functions, item_of

_IGNORED = frozenset(
    {
        "background_options",
        "client_metadata",
        "max_tool_calls",  # counts calls of OpenAI's own tools, which aren't accepted
        "moderation",
        "prompt_cache_key",
        "prompt_cache_options",
        "prompt_cache_retention",
        "reasoning",  # the chat template decides whether and how a model thinks
        "safety_identifier",
        "service_tier",
        "stream_options",  # obfuscation
        "user",
    }
)
"""Fields that mean nothing for a model of one's own. The answer repeats `metadata` and `store`, which change nothing
else: an answer is remembered as long as its tape is open."""
_NEUTRAL: dict[str, tuple[JsonValue, ...]] = {
    "background": (False,),
    "top_logprobs": (0,),
    "truncation": ("disabled", "auto"),  # a prompt that is too long is an error with both
}
"""Fields that are accepted only with these values."""
_LOGPROBS = "message.output_text.logprobs"
_Include = Literal[
    "message.output_text.logprobs",
    "reasoning.encrypted_content",
    "message.input_image.image_url",
    "file_search_call.results",
    "web_search_call.results",
    "web_search_call.action.sources",
    "computer_call_output.output.image_url",
    "code_interpreter_call.outputs",
]
"""Only log-probs are included. The others belong to OpenAI's own tools and to encrypted thoughts."""
_ITEM_ID = re.compile(r"(msg|fc|ctc|rs|call)_([0-9a-f]{24})(\d{0,9})", re.ASCII)


class _Text(BaseModel):
    type: Literal["input_text", "output_text", "text"]
    text: str

    def chat(self, place: str) -> Message:
        return {"type": "text", "text": self.text}


class _Refusal(BaseModel):
    type: Literal["refusal"]
    refusal: str

    def chat(self, place: str) -> Message:
        return {"type": "text", "text": self.refusal}


class _Image(BaseModel):
    type: Literal["input_image"]
    image_url: DataUrl
    detail: Literal["auto", "low", "high"] | None = None

    def chat(self, place: str) -> Message:
        shown = {"url": self.image_url, "detail": self.detail}
        return {"type": "image_url", "image_url": shown, PLACE: f"{place}.image_url"}


def _parts(value: Any) -> Any:
    return [{"type": "input_text", "text": value}] if isinstance(value, str) else value


_Parts = Annotated[list[Annotated[_Text | _Refusal | _Image, Field(discriminator="type")]], BeforeValidator(_parts)]


class _MessageItem(BaseModel):
    type: Literal["message"]
    id: str | None = None
    role: Literal["system", "developer", "user", "assistant"]
    content: _Parts


class _CallItem(BaseModel):
    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str
    namespace: str | None = None

    def chat(self) -> Message:
        return asked_call(Place("function", self.name, self.namespace), self.call_id, self.arguments)


class _CustomCallItem(BaseModel):
    type: Literal["custom_tool_call"]
    call_id: str
    name: str
    input: str
    namespace: str | None = None

    def chat(self) -> Message:
        return asked_call(Place("custom", self.name, self.namespace), self.call_id, self.input)


class _OutputItem(BaseModel):
    type: Literal["function_call_output", "custom_tool_call_output"]
    call_id: str
    output: _Parts


class _Thought(BaseModel):
    type: Literal["reasoning_text", "summary_text"]
    text: str


class _ReasoningItem(BaseModel):
    """Thoughts. Clients may leave out their text, or send it in a summary."""

    type: Literal["reasoning"]
    id: str | None = None
    content: list[_Thought] | None = None
    summary: list[_Thought] = []

    @property
    def text(self) -> str:
        return "".join(part.text for part in self.content or self.summary)


class _ToolsItem(BaseModel):
    """More tools for this request, as if they were in its field `tools`."""

    type: Literal["additional_tools"]
    tools: list[Tool]


class _ReferenceItem(BaseModel):
    type: Literal["item_reference"]
    id: str


def _typed(item: Any) -> Any:
    """Return the item with its type. It may be missing in a message and in a reference."""
    if not isinstance(item, dict) or item.get("type") is not None:
        return item
    return {**item, "type": "message" if "role" in item else "item_reference" if set(item) <= {"id", "type"} else None}


_Item = Annotated[
    Annotated[
        _MessageItem | _CallItem | _CustomCallItem | _OutputItem | _ReasoningItem | _ToolsItem | _ReferenceItem,
        Field(discriminator="type"),
    ],
    BeforeValidator(_typed),
]


class _Plain(BaseModel):
    model_config = ConfigDict(extra="forbid")
    type: Literal["text", "json_object"]


class _JsonSchema(BaseModel):
    """`name`, `description` and `strict` change nothing: a form is always enforced if the engine can."""

    type: Literal["json_schema"]
    schema_: Schema = Field(alias="schema")


class _Choice(BaseModel):
    """The tool that the answer must call."""

    model_config = ConfigDict(extra="forbid")
    type: Literal["function", "custom"]
    name: str


class _Format(BaseModel):
    model_config = ConfigDict(extra="forbid")
    format: Annotated[_Plain | _JsonSchema, Field(discriminator="type")] = _Plain(type="text")
    verbosity: Literal["low", "medium", "high"] | None = None
    """Means nothing for a model of one's own."""


class _Request(BaseModel):
    """The fields of a request."""

    model_config = ConfigDict(extra="forbid")
    model: str = ""
    input: Annotated[
        list[_Item],
        Field(min_length=1),
        BeforeValidator(lambda value: [{"role": "user", "content": value}] if isinstance(value, str) else value),
    ]
    instructions: str | None = None
    tools: list[Tool] = []
    tool_choice: Literal["auto", "none", "required"] | _Choice = "auto"
    parallel_tool_calls: Flag = True
    temperature: Temperature | None = None
    top_p: TopP | None = None
    max_output_tokens: MaxTokens | None = None
    previous_response_id: str | None = None
    include: list[_Include] = []
    text: _Format = _Format()
    metadata: dict[str, str] = {}
    store: Flag = True
    stream: Flag = False


def read(data: Mapping[str, JsonValue]) -> Asked:
    """Check the JSON object of a request. Raises Refused with the name of the invalid field."""
    left = fields_of(data, _IGNORED, _NEUTRAL)
    try:
        found = _Request.model_validate(left)
    except ValidationError as error:
        raise invalid(error) from None
    messages = [] if found.instructions is None else [{"role": "system", "content": found.instructions}]
    instructions = len(messages)
    messages += _messages(found.input)
    previous = found.previous_response_id
    offered = found.tools + [tool for item in found.input if isinstance(item, _ToolsItem) for tool in item.tools]
    called = list(functions(offered))
    choice, form = found.tool_choice, found.text.format
    tools = [] if choice == "none" else [function for _, function in called]
    forced = choice.name if isinstance(choice, _Choice) else "" if choice == "required" else None
    plain = None if form.type == "text" else ANY_OBJECT
    schema = form.schema_ if isinstance(form, _JsonSchema) else plain
    constraint, demanded_by = demanded(tools, schema, "text.format", forced)
    return Asked(
        messages=messages,
        tools=tools,
        left_out=tuple(tool.type for tool in offered if isinstance(tool, Hosted)),
        constraint=constraint,
        demanded_by=demanded_by,
        model=found.model,
        parallel_tool_calls=found.parallel_tool_calls,
        temperature=found.temperature,
        top_p=found.top_p,
        max_tokens=found.max_output_tokens,
        stream=found.stream,
        logprobs=_LOGPROBS in found.include,
        instructions=instructions,
        previous=previous and previous.removeprefix("resp_"),
        wire={
            "called": {place.function: list(place) for place, _ in called},
            "repeated": {
                "instructions": found.instructions,
                "max_output_tokens": found.max_output_tokens,
                "metadata": dict(found.metadata),
                "previous_response_id": previous,
                "store": found.store,
                "text": {"format": {"type": "text"}, **(text if isinstance(text := left.get("text"), dict) else {})},
                "tool_choice": left.get("tool_choice", "auto"),
                "tools": [tool.model_dump() for tool in found.tools if not isinstance(tool, Hosted)],
                "truncation": data.get("truncation") or "disabled",
            },
        },
    )


def _messages(items: Iterable[Any]) -> list[Message]:
    """Return the items as messages. Calls belong to the assistant's message before them, or to the one directly behind
    them, as Haystack sends it. A thought begins a message, unless its id shows that it belongs to the message before
    it."""
    found = list[Message]()
    pictures, answer = 0, None
    for k, item in enumerate(items):
        last: Message | None = found[-1] if found and found[-1]["role"] == "assistant" else None
        if isinstance(item, _MessageItem):
            content = _content(item.content, f"input.{k}.content")
            pictures += sum(isinstance(part, _Image) for part in item.content)
            before, answer = answer, _answer_of(item.id)
            same = answer is not None and answer == before
            if item.role == "assistant" and last is not None and isinstance(content, str):
                if last.get("content") == "" and (THOUGHT in last or "tool_calls" in last):
                    last["content"] = content
                    continue
                if same and isinstance(last.get("content", ""), str):
                    last["content"] = last.get("content", "") + content
                    continue
            found.append({"role": item.role, "content": content})
        elif isinstance(item, _ReasoningItem):
            before, answer = answer, _answer_of(item.id)
            if item.text and last is not None and answer is not None and answer == before:
                last[THOUGHT] = last.get(THOUGHT, "") + item.text
            elif item.text:
                found.append({"role": "assistant", "content": "", THOUGHT: item.text})
        elif isinstance(item, _OutputItem):
            content = _content(item.output, f"input.{k}.output")
            found.append({"role": "tool", "content": content, "tool_call_id": item.call_id})
            pictures += sum(isinstance(part, _Image) for part in item.output)
        elif isinstance(item, _CallItem | _CustomCallItem):
            # Vercel's SDK refers to the thought and the text, and sends the calls.
            if last is None or last.get(ANSWER) not in (None, _answer_of(item.call_id) or last.get(ANSWER)):
                last = {"role": "assistant", "content": ""}
                found.append(last)
            last.setdefault("tool_calls", []).append(item.chat())
        elif isinstance(item, _ReferenceItem):
            answer = _answer_of(item.id) or item.id
            if last is None or last.get(ANSWER) != answer:  # an answer has several items
                last = {"role": "assistant", ANSWER: answer}
                found.append(last)
            if (known := _ITEM_ID.fullmatch(item.id)) and known[1] in ("fc", "ctc"):
                last.setdefault("tool_calls", []).append(int(known[3] or 0))
    check_pictures(pictures, "input")
    return found


def _answer_of(id: str | None) -> str | None:
    """Return the id of the answer that an item belongs to, or None if the gateway didn't make the item's id."""
    known = _ITEM_ID.fullmatch(id or "")
    return known[2] if known else None


def _content(parts: Iterable[_Text | _Refusal | _Image], place: str) -> str | list[Message]:
    return content_of([part.chat(f"{place}.{n}") for n, part in enumerate(parts)])


def body(asked: Asked, answer: Answered) -> dict[str, object]:
    """Return the JSON object of an answer that isn't streamed."""
    return _body(asked, answer, parts_of(answer))


def _body(asked: Asked, answer: Answered, parts: list[Part]) -> dict[str, object]:
    cut = answer.finish == "length"
    return _response(asked, answer.id, answer.created) | {
        "status": "incomplete" if cut else "completed",
        "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
        "output": _items(asked, answer, parts),
        "usage": {
            "input_tokens": answer.prompt_tokens,
            "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
            "output_tokens": answer.completion_tokens,
            "output_tokens_details": {"reasoning_tokens": answer.reasoning_tokens},
            "total_tokens": answer.prompt_tokens + answer.completion_tokens,
        },
    }


def refusal(error: Refused) -> dict[str, object]:
    """Return the JSON object of an error."""
    found: Any = chat_refusal(error)
    if error.param == "messages":
        found["error"]["param"] = "input"
    return found


def _response(asked: Asked, id: str, created: int) -> dict[str, object]:
    repeated: Any = asked.wire["repeated"]
    return {
        "id": f"resp_{id}",
        "object": "response",
        "created_at": created,
        "status": "in_progress",
        "background": False,
        "error": None,
        "incomplete_details": None,
        "model": asked.model,
        "output": [],
        "parallel_tool_calls": asked.parallel_tool_calls,
        "reasoning": {"effort": None, "summary": None},
        "temperature": asked.temperature,
        "top_p": asked.top_p,
        "usage": None,
        **repeated,
    }


def _items(asked: Asked, answer: Answered, parts: list[Part]) -> list[dict[str, object]]:
    """Return the items of an answer: its thoughts and text, and its calls. Only the last item may be incomplete."""
    status = "incomplete" if answer.finish == "length" else "completed"
    found = list[dict[str, object]]()
    for k, part in enumerate(parts):
        last = k == len(parts) - 1
        content = [_content_part(part, answer.logprobs if last else None)]
        found.append(_item(parts, k, answer.id, status if last else "completed", content))
    called: Any = asked.wire["called"]
    for k, call in enumerate(answer.tool_calls):
        name = call["function"]["name"]
        place = Place(*called[name]) if name in called else Place("function", name)
        found.append({**item_of(place, f"{answer.id}{k}", call), "status": status})
    return found


def _item(parts: list[Part], index: int, id: str, status: str, content: list[dict[str, object]]) -> dict[str, object]:
    """Return the item of a part. The first thought and the first text have the plain id of the answer."""
    thought = parts[index].thought
    id += str(index) if any(part.thought is thought for part in parts[:index]) else ""
    if thought:
        return {"id": f"rs_{id}", "type": "reasoning", "status": status, "summary": [], "content": content}
    return {"id": f"msg_{id}", "type": "message", "status": status, "role": "assistant", "content": content}


def _content_part(part: Part, logprobs: list[dict[str, object]] | None) -> dict[str, object]:
    if part.thought:
        return {"type": "reasoning_text", "text": part.text}
    return {"type": "output_text", "annotations": [], "logprobs": logprobs or [], "text": part.text}


class _Events(PartStream):
    """Writes an answer as events. Calls aren't sent in pieces."""

    quiet = b":\n\n"

    def __init__(self, asked: Asked) -> None:
        super().__init__()
        self._asked = asked
        self._id, self._created = "", 0
        self._number = 0
        """The next event's number."""

    def begin(self, id: str, created: int) -> bytes:
        self._id, self._created = id, created
        begun = _response(self._asked, id, created)
        return self._event("created", response=begun) + self._event("in_progress", response=begun)

    def begun(self, index: int) -> bytes:
        item = _item(self.parts, index, self._id, "in_progress", [])
        place = {"item_id": item["id"], "output_index": index, "content_index": 0}
        added = self._event("output_item.added", output_index=index, item=item)
        part = _content_part(Part(self.parts[index].thought, ""), None)
        return added + self._event("content_part.added", **place, part=part)

    def delta(self, index: int, piece: str) -> bytes:
        item = _item(self.parts, index, self._id, "in_progress", [])
        place = {"item_id": item["id"], "output_index": index, "content_index": 0}
        if self.parts[index].thought:
            return self._event("reasoning_text.delta", **place, delta=piece)
        return self._event("output_text.delta", **place, delta=piece, logprobs=[])

    def ended(self, index: int, answer: Answered | None) -> bytes:
        content = [_content_part(self.parts[index], None)]
        item: Any = _item(self.parts, index, self._id, "completed", content)
        if answer is not None:
            item = _items(self._asked, answer, self.parts)[index]
        (part,) = item["content"]
        place = {"item_id": item["id"], "output_index": index, "content_index": 0}
        kind = "reasoning_text" if self.parts[index].thought else "output_text"
        done = {name: part[name] for name in ("text", "logprobs") if name in part}
        return b"".join(
            [
                self._event(f"{kind}.done", **place, **done),
                self._event("content_part.done", **place, part=part),
                self._event("output_item.done", output_index=index, item=item),
            ]
        )

    def end(self, answer: Answered) -> bytes:
        found = [self.rest(answer)]
        whole = _body(self._asked, answer, self.parts)
        items: Any = whole["output"]
        for k, item in enumerate(items[len(self.parts) :], start=len(self.parts)):
            place = {"item_id": item["id"], "output_index": k}
            custom = item["type"] == "custom_tool_call"
            field = "input" if custom else "arguments"
            kind = "custom_tool_call_input" if custom else "function_call_arguments"
            begun = {**item, "status": "in_progress", field: ""}
            found.append(self._event("output_item.added", output_index=k, item=begun))
            found.append(self._event(f"{kind}.delta", **place, delta=item[field]))
            done = {field: item[field], **({} if custom else {"name": item["name"]})}
            found.append(self._event(f"{kind}.done", **place, **done))
            found.append(self._event("output_item.done", output_index=k, item=item))
        found.append(self._event(str(whole["status"]), response=whole))
        return b"".join(found)

    def failed(self, error: Refused) -> bytes:
        code = "rate_limit_exceeded" if error.status == 429 else "server_error"
        ended = {"status": "failed", "error": {"code": code, "message": str(error)}}
        return self._event("failed", response=_response(self._asked, self._id, self._created) | ended)

    def _event(self, kind: str, **more: object) -> bytes:
        kind = f"response.{kind}"
        data = {"type": kind, "sequence_number": self._number, **more}
        self._number += 1
        return event(data, kind)


def stream(asked: Asked) -> _Events:
    """Return the writer of a streamed answer."""
    return _Events(asked)
