"""What all dialects of the gateway share. A dialect is a module that translates between the JSON of one API and the
gateway's own request and answer.

The functions of a dialect are pure, and the session knows no dialect. `gateway_server` finds the dialect of a request
by its path. Each field of a request is either honoured, or refused by name, or ignored because it means nothing for a
model of one's own. Each dialect lists the ignored fields in one table.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Protocol

from pydantic import AfterValidator, Field, JsonValue, ValidationError
from pydantic_core import to_json

from ...tapes.decoding import DATA_URL, MAX_PIXELS
from ...tapes.errors import TapereelError
from ...tapes.records import Constraint, Message
from ..rendering.tool_calls import tool_name

PICTURES = 500
"""Maximum pictures in one request, as at OpenAI."""
PIXELS = 4 * MAX_PIXELS
"""Maximum number of pixels in all new pictures of a request. Pictures that an earlier request sent aren't decoded
again, so they don't count."""
THOUGHT = "thought"
"""The key of the thoughts that a client sends back in an assistant's message. The session compares them with the
thoughts that were sent, and removes them."""
_OWN = frozenset({"input", "input_schema", "parameters", "schema"})
"""Keys of objects that belong to the program, so that null is a value in them."""
ANSWER = "answer"
"""A message with this key refers to the answer with this id, which the session inserts."""
PLACE = "place"
"""The key of a picture's part that names its place in the request, if this isn't its place in `Asked.messages`."""


class Refused(TapereelError, ValueError):
    """The gateway refuses a request. Each dialect writes it in the form that its clients read."""

    def __init__(
        self, status: int, message: str, *, code: str | None = None, param: str | None = None, final: bool = False
    ) -> None:
        """`final` means that no retry helps. Without it, the official clients retry some statuses by themselves."""
        super().__init__(message)
        self.status = status
        """HTTP status code."""
        self.code = code
        """What went wrong, as a word for programs. None if the status says it."""
        self.param = param
        """The field of the request that is at fault. None if there is no such field."""
        self.headers = {"x-should-retry": "false"} if final else {"Retry-After": "1"} if status == 429 else {}


@dataclass(frozen=True, slots=True)
class Asked:
    """One request for an answer."""

    messages: list[Message]
    """In the chat format. A message's content is plain text, or parts with data URLs that aren't decoded yet. Empty
    fields are left out. A message with `ANSWER` stands for the thought and the text of an earlier answer. Its own
    fields replace them. Each of its `tool_calls` is a call, or the index of a call of the answer."""
    tools: list[dict[str, JsonValue]]
    """In the chat format."""
    left_out: tuple[str, ...] = ()
    """Types of tools that the API's provider would run. They don't exist here, so the model isn't offered them."""
    model: str = ""
    """The client's name for the model. The answer repeats this name, but it doesn't choose a model."""
    constraint: Constraint | None = None
    """The form that the request demands of the answer, or None if it leaves the form open."""
    demanded_by: str = ""
    """The field of the request that demands the form, for errors."""
    parallel_tool_calls: bool = True
    """If false, the answer contains only the first of several tool calls. The tape has all of them."""
    temperature: float | None = None
    """None if the client doesn't set it. The same holds for `top_p`, `top_k`, `max_tokens` and `seed`."""
    top_p: float | None = None
    top_k: int | None = None
    penalties: Mapping[str, float] = field(default_factory=dict)
    """The penalties and `min_p`, by name, if they change anything."""
    max_tokens: int | None = None
    seed: int | None = None
    stop: Sequence[str] = ()
    stream: bool = False
    logprobs: bool = False
    token_ids: bool = False
    """Whether the answer contains the token ids of prompt and completion."""
    instructions: int = 0
    """How many leading messages hold for this request only. A request that continues from its answer has its own."""
    previous: str | None = None
    """Id of the answer whose conversation this request continues. Its messages come after the instructions."""
    wire: Mapping[str, JsonValue] = field(default_factory=dict)
    """Fields of the request that only its dialect needs, to write the answer."""


@dataclass(frozen=True, slots=True)
class Answered:
    """One answer."""

    id: str
    """24 hexadecimal digits. Each dialect puts its own prefix before it."""
    text: str
    """The answer without its thoughts and calls."""
    finish: str
    """`stop`, `length` or `tool_calls`."""
    stopped: str | None = None
    """The stop string that ended the answer. None if there was none, or if the engine doesn't report token ids."""
    tool_calls: tuple[Message, ...] = ()
    reasoning: str = ""
    """The model's thoughts, without their marks."""
    reasoning_tokens: int = 0
    """Number of tokens of `reasoning` if it is encoded again."""
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
        """The assistant's message in the chat format."""
        content = self.text or None if self.tool_calls else self.text
        message: Message = {"role": "assistant", "content": content}
        if self.tool_calls:
            message["tool_calls"] = list(self.tool_calls)
        return message


class Stream(Protocol):
    """Writes the events of one streamed answer, as the bytes to send. Single use."""

    @property
    def quiet(self) -> bytes:
        """What is sent in a long silence, so that the client doesn't time out."""
        ...

    def begin(self, id: str, created: int) -> bytes:
        """The events before the first text. `created` is in seconds since 1970."""
        ...

    def thought(self, piece: str) -> bytes:
        """The events for a new piece of a thought."""
        ...

    def text(self, piece: str) -> bytes:
        """The events for new text."""
        ...

    def end(self, answer: Answered) -> bytes:
        """The last events. The answer's thoughts and its text begin with the pieces that were sent."""
        ...

    def failed(self, error: Refused) -> bytes:
        """The last events if the answer fails after `begin`."""
        ...


@dataclass(slots=True)
class Part:
    """A part of an answer: a thought, or text."""

    thought: bool
    text: str


def parts_of(answer: Answered) -> list[Part]:
    """Return the parts of an answer that isn't streamed. An answer with calls may have none."""
    parts = [Part(True, answer.reasoning)] if answer.reasoning else []
    return [*parts, Part(False, answer.text)] if answer.text or not (parts or answer.tool_calls) else parts


class PartStream:
    """Writes an answer of an API that sends thoughts and texts one after the other, each with a beginning and an end. A
    dialect's stream says how these events look."""

    def __init__(self) -> None:
        self.parts = list[Part]()
        """What was sent. All parts but the last one have ended."""

    def thought(self, piece: str) -> bytes:
        """The events for a new piece of a thought."""
        return self._add(Part(True, piece))

    def text(self, piece: str) -> bytes:
        """The events for new text."""
        return self._add(Part(False, piece))

    def rest(self, answer: Answered) -> bytes:
        """The events for the parts that weren't sent yet, and the end of the last part."""
        sent = {k: sum(len(part.text) for part in self.parts if part.thought is k) for k in (True, False)}
        rest = b"".join(
            self._add(Part(part.thought, part.text[sent[part.thought] :]))
            for part in parts_of(answer)
            if len(part.text) > sent[part.thought] or not part.text
        )
        return rest + (self.ended(len(self.parts) - 1, answer) if self.parts else b"")

    def _add(self, new: Part) -> bytes:
        before = b""
        if not self.parts or self.parts[-1].thought is not new.thought:
            before = self.ended(len(self.parts) - 1, None) if self.parts else b""
            self.parts.append(Part(new.thought, ""))
            before += self.begun(len(self.parts) - 1)
        self.parts[-1].text += new.text
        return before + (self.delta(len(self.parts) - 1, new.text) if new.text else b"")

    def begun(self, index: int) -> bytes:
        """The events at the beginning of a part."""
        raise NotImplementedError

    def delta(self, index: int, piece: str) -> bytes:
        """The events for a piece of a part."""
        raise NotImplementedError

    def ended(self, index: int, answer: Answered | None) -> bytes:
        """The events at the end of a part. `answer` is the whole answer if the part is the last one."""
        raise NotImplementedError


class Dialect(Protocol):
    """The functions that a dialect's module has."""

    def read(self, data: Mapping[str, JsonValue], /) -> Asked:
        """Check the JSON object of a request. Raises Refused with the name of the invalid field."""
        ...

    def body(self, asked: Asked, answer: Answered, /) -> dict[str, object]:
        """Return the JSON object of an answer that isn't streamed."""
        ...

    def stream(self, asked: Asked, /) -> Stream:
        """Return the writer of a streamed answer."""
        ...

    def refusal(self, error: Refused, /) -> dict[str, object]:
        """Return the JSON object of an error."""
        ...


# Reading


def bad(message: str, param: str | None = None) -> Refused:
    """Return the refusal of an invalid request."""
    return Refused(400, message, param=param)


def invalid(error: ValidationError, *within: str) -> Refused:
    """Return the refusal of a body that doesn't fit its model. It states the first error's place, problem and value."""
    found = error.errors(include_url=False)[0]
    place = [*within, *map(str, found["loc"])]
    place = [part for k, part in enumerate(place) if k == 0 or part != place[k - 1]]  # the type of a content part
    if found["type"] == "extra_forbidden":
        return bad(f"{'.'.join(place)}: not supported here; leave it out", place[0])
    problem = found["msg"].removeprefix("Value error, ")
    if found["type"] not in ("missing", "too_short", "too_long"):
        problem += f", not {json.dumps(found['input'], default=str)[:100]}"
    return bad(f"{'.'.join(place) or 'the body'}: {problem}", place[0] if place else None)


def fields_of(
    data: Mapping[str, JsonValue], ignored: Collection[str], neutral: Mapping[str, tuple[JsonValue, ...]]
) -> dict[str, JsonValue]:
    """Return the fields of a request without those that are null, an empty list, ignored or neutral. Raises Refused if
    a field in `neutral` has a value other than those listed there."""
    left: dict[str, JsonValue] = {}
    for name, value in _without_nulls(dict(data)).items():
        if value == [] or name in ignored or value in neutral.get(name, ()):
            continue
        if name in neutral:
            raise bad(
                f"{name}={json.dumps(value)[:200]} is not supported; leave it out"
                + (", and ask once for each answer" if name == "n" else ""),
                name,
            )
        left[name] = value
    return left


def _without_nulls(value: Any) -> Any:
    """Return a value without fields that are null. Many clients send a null for each field that isn't set."""
    if isinstance(value, list):
        return [_without_nulls(one) for one in value]
    if not isinstance(value, dict):
        return value
    return {
        name: _without_nulls(one) if isinstance(one, list) or (isinstance(one, dict) and name not in _OWN) else one
        for name, one in value.items()
        if one is not None
    }


def demanded(
    tools: Sequence[Mapping[str, JsonValue]], schema: Schema | None, field: str, tool: str | None = None
) -> tuple[Constraint | None, str]:
    """Return (constraint, demanded_by) of an `Asked`.

    `schema` is the JSON schema that the field `field` demands of the content, or None. `tool` is the name of the tool
    that `tool_choice` demands, "" if it demands any of them, or None if the model chooses whether to call one. Raises
    Refused if the tool isn't offered."""
    names = tuple(map(tool_name, tools))
    if tool is None:
        # A model that may call tools may also call one first, and give the content in a later answer.
        constraint = None if schema is None else Constraint(json_schema=schema, tools=names)
        return constraint, field
    if not (tool in names if tool else names):
        offered = f"the request offers {', '.join(names)[:200]}" if names else "the request offers no tools"
        raise bad(
            f"tool_choice: {offered}, and it must call {json.dumps(tool)[:100] if tool else 'one'}", "tool_choice"
        )
    return Constraint(tools=(tool,) if tool else names), "tool_choice"


def check_pictures(pictures: int, param: str) -> None:
    """Raise Refused if a request has too many pictures."""
    if pictures > PICTURES:
        raise bad(f"{param}: {pictures:,} pictures, at most {PICTURES} are read; send fewer", param)


def content_of(parts: Sequence[Message]) -> str | list[Message]:
    """Return the content of a message in the chat format: one text, or the list of parts if it has pictures."""
    texts = [part["text"] for part in parts if part["type"] == "text"]
    return "".join(texts) if len(texts) == len(parts) else list(parts)


def data_url(url: str) -> str:
    """Return the URL. Raises ValueError if it doesn't hold the picture itself."""
    if not DATA_URL.match(url):
        raise ValueError("must be data:image/png;base64,... (or jpeg, webp), since no URL is ever fetched")
    return url


DataUrl = Annotated[str, AfterValidator(data_url)]
"""A picture in the request itself."""
Schema = dict[str, JsonValue]
"""A JSON schema."""
ANY_OBJECT: Schema = {"type": "object"}
"""The schema of a request for any JSON object."""
Temperature = Annotated[float, Field(strict=True, ge=0)]
TopP = Annotated[float, Field(strict=True, gt=0, le=1)]
TopK = Annotated[int, Field(strict=True, ge=1, lt=2**31)]
MaxTokens = Annotated[int, Field(strict=True, ge=1, lt=2**63)]
Flag = Annotated[bool, Field(strict=True)]
StopString = Annotated[str, Field(min_length=1)]


# Writing


def event(data: Mapping[str, object], kind: str | None = None) -> bytes:
    """Return one event of a stream. `kind` is its name, for APIs whose events have one."""
    head = b"" if kind is None else b"event: " + kind.encode() + b"\n"
    return head + b"data: " + to_json(data) + b"\n\n"
