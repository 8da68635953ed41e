"""Steps: observations, thoughts and actions, as typed and immutable pydantic values.

A step holds only content. The record around it states who produced the step, when, and from which model calls. So this
information can't leak into a prompt. Steps with equal content are equal. A model reads a step as `str(step)`.
"""

from __future__ import annotations

import inspect
import operator
import re
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any, ClassVar, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, JsonValue, model_validator
from pydantic_core import PydanticSerializationError, to_json

from .errors import Unwritable
from .journal import MAX_BODY
from .pictures import RECORDED, Picture, Video, Visual, visuals_of
from .value import Value

Role = Literal["observation", "thought", "action"]
PLACE: dict[str, JsonValue] = {"type": "image"}
"""A content part that marks the place of a picture in the messages of a `Prompt`. The picture itself is in
`Prompt.pictures`."""
PLACES: tuple[dict[str, JsonValue], ...] = (PLACE, {"type": "video"})
"""The content parts that mark the place of a picture and the place of a video in the messages of a `Prompt`."""


def content_parts(message: Mapping[str, object]) -> list[dict[str, JsonValue]]:
    """Return the parts of a chat message's content, or an empty list if the content is text."""
    content = message.get("content")
    return [part for part in content if isinstance(part, dict)] if isinstance(content, list) else []


def place_of(shown: Visual) -> dict[str, JsonValue]:
    """Return the content part that marks the place of this picture or video in the messages of a `Prompt`."""
    return PLACES[isinstance(shown, Video)]


_registry: dict[str, type[Step]] = {}
_WORD = re.compile(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])")
"""Matches the boundary between two words of a class name, such as `Tool` and `Call` in `ToolCall`."""


class Step(BaseModel):
    """One item of a tape. Subclass `Observation`, `Thought` or `Action`, never this class.

    `class Guess(Action): number: int` has the kind `guess`, and `class Guess(Action, kind="g")` has the kind `g`. Each
    kind belongs to one class. If a class with the same module and qualified name is defined again, as when a notebook
    cell runs again, the new class replaces the old one.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", ser_json_inf_nan="strings", ser_json_bytes="base64")

    kind: ClassVar[str] = "step"
    """The name of this class on tapes. The default is the class name in snake case."""

    def __init_subclass__(cls, *, kind: str | None = None, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "kind" in inspect.get_annotations(cls) and cls.__qualname__ != "Step":
            raise TypeError(
                f"{cls.__qualname__} has a field named 'kind', which names the class of a step on the tape; "
                "rename the field"
            )

    @classmethod
    def __pydantic_init_subclass__(cls, *, kind: str | None = None, **kwargs: Any) -> None:
        super().__pydantic_init_subclass__(**kwargs)
        if cls.__pydantic_generic_metadata__["origin"] is not None:
            return
        cls.kind = kind or _WORD.sub("_", cls.__name__).lower()
        known = _registry.get(cls.kind)
        if known is not None and (known.__module__, known.__qualname__) != (cls.__module__, cls.__qualname__):
            raise TypeError(
                f"the kind {cls.kind!r} of {cls.__module__}.{cls.__qualname__} already belongs to "
                f"{known.__module__}.{known.__qualname__}; give one of them another kind: "
                f'class {cls.__name__}(..., kind="...")'
            )
        _registry[cls.kind] = cls

    def __eq__(self, other: object) -> bool:
        """Compare two steps. Raises TypeError for a string, which a step never equals: compare `str(step)`."""
        if isinstance(other, str):
            raise self._no_text("==")
        return super().__eq__(other)

    def __contains__(self, part: object) -> bool:
        raise self._no_text("in")

    def _no_text(self, operator: str) -> TypeError:
        remedy = "its .text" if "text" in type(self).model_fields else "str(...) of it"
        return TypeError(f"`{operator}` between a string and a step ({type(self).__qualname__}): compare {remedy}")

    def __str__(self) -> str:
        """Return the text that a model reads. A step with a single plain field is shown as the value of this field, and
        any other step as JSON. A step with pictures is shown part by part, with each picture as `[picture 640x480
        1f0c...]`."""
        values = self.__dict__
        if len(values) == 1:
            (only,) = values.values()
            if isinstance(only, str | int | float | bool):
                return str(only)
        if visuals_of(self):
            return "\n".join(map(str, parts_of(self)))
        return self.model_dump_json()


def parts_of(step: Step) -> tuple[str | Visual, ...]:
    """Return the parts of a step that a model reads, in order: strings, pictures and videos. A step without pictures
    and videos has one part, its `str()`.

    The parts of a step with pictures are in the order of its fields. Consecutive fields without a picture are joined
    into one text, which is written as for a step with only these fields. If the class defines its own `__str__`, this
    text comes first, and all pictures follow.
    """
    if not visuals_of(step):
        return (str(step),)
    if type(step).__str__ is not Step.__str__:
        return (str(step), *visuals_of(step))
    return tuple(part for part in _parts(step) if part != "")


def _parts(value: object) -> Iterator[str | Visual]:
    """Yield the parts of a value: its strings, pictures and videos, in order."""
    if isinstance(value, Picture | Video):
        yield value
    elif isinstance(value, BaseModel):
        yield from _parts_of_fields(value.__dict__)
    elif isinstance(value, dict):
        for name, part in value.items():
            yield str(name)
            yield from _parts(part)
    elif isinstance(value, list | tuple):
        for part in value:
            yield from _parts(part)
    else:
        yield from _text_of({"": value})


def _parts_of_fields(fields: Mapping[str, object]) -> Iterator[str | Visual]:
    plain: dict[str, object] = {}
    for name, part in fields.items():
        if visuals_of(part):
            yield from _text_of(plain)
            plain = {}
            yield from _parts(part)
        elif part is not None and part != ():
            plain[name] = part
    yield from _text_of(plain)


def text_of_fields(fields: Mapping[str, object]) -> str:
    """Return the text of a step that has these fields and whose class doesn't define `__str__`."""
    if len(fields) == 1:
        (only,) = fields.values()
        if isinstance(only, str | int | float | bool):
            return str(only)
    if visuals_of(fields):
        return "\n".join(str(part) for part in _parts_of_fields(fields) if part != "")
    return to_json(fields, inf_nan_mode="strings").decode()


def _text_of(fields: dict[str, object]) -> Iterator[str]:
    only = next(iter(fields.values())) if len(fields) == 1 else fields
    if isinstance(only, str | int | float | bool):
        yield str(only)
    elif fields:
        yield to_json(only, inf_nan_mode="strings").decode()


class Observation(Step):
    """A step that the environment shows to the agent."""


class Thought(Step):
    """A step that an agent writes for itself. The environment never sees it."""

    said_back: ClassVar[bool] = False
    """True if the agent's next prompt shows this thought as a message *to* the agent, such as a correction."""


class Action(Step):
    """A step in which an agent acts. Each turn ends with one action, which goes to the environment."""


class Text(Observation):
    """Plain text from the environment."""

    text: str


class Answer(Action):
    """Plain text to the environment."""

    text: str


class Reasoning(Thought):
    """Plain text that an agent writes for itself."""

    text: str


class Exchange(Thought):
    """A request that an external program sent to the model, and the model's answer. Long strings are shortened in this
    step. The call's record has them in full."""

    asked: str
    """The messages that the request added."""
    answered: str

    def __str__(self) -> str:
        return f"{self.asked}\n→ {self.answered}"


class ParseError(Thought, kind="misread"):
    """The model's answer could not be parsed as an action. The next prompt tells the model why."""

    said_back: ClassVar[bool] = True
    problem: str
    """The problem, written as a sentence for the model."""

    def __str__(self) -> str:
        return self.problem


class ToolOffer(Observation):
    """First observation of an episode with tools: the question and the tools. A model reads the text, and receives the
    tools as function schemas."""

    text: str
    tools: tuple[dict[str, JsonValue], ...]
    """Function schemas in the chat format: `{"type": "function", "function": {...}}`."""
    sources: tuple[dict[str, JsonValue], ...] = Field(default=(), exclude_if=operator.not_)
    """How each source of tools runs its tools, if it states this. For example, a sandbox states its backend, isolation
    and memory. No model reads this field."""

    def __str__(self) -> str:
        return self.text


class Prompt(ToolOffer, kind="chat_prompt"):
    """First observation of an episode that begins with several chat messages. A model reads these messages
    unchanged."""

    messages: tuple[dict[str, JsonValue], ...]
    """Each message has `role` and `content`. The content of the last user message is also `text`."""
    tools: tuple[dict[str, JsonValue], ...] = ()
    pictures: tuple[Visual, ...] = Field(default=(), exclude_if=operator.not_)
    """The pictures and videos in the messages, in order. There is one for each content part `{"type": "image"}` or
    `{"type": "video"}`."""

    @model_validator(mode="after")
    def _one_picture_each(self) -> Self:
        places = [part for message in self.messages for part in content_parts(message) if part in PLACES]
        wanted = [place_of(one) for one in self.pictures]
        if self.pictures and places != wanted:
            image, video = ((places.count(one), wanted.count(one)) for one in PLACES)
            raise ValueError(
                f"the messages have {image[0]} parts of type 'image' for {image[1]} pictures and {video[0]} parts of "
                f"type 'video' for {video[1]} videos, or they have them in another order: write one part "
                '{"type": "image"} in the place of each picture, and {"type": "video"} in the place of each video'
            )
        return self


class ToolCall(Value):
    """One function call inside `ToolCalls`."""

    id: str
    name: str
    arguments: dict[str, JsonValue]


class ToolResult(Value):
    """The result of one `ToolCall`, which `id` identifies."""

    id: str
    name: str
    content: str
    error: bool = False
    pictures: tuple[Visual, ...] = Field(default=(), exclude_if=operator.not_)
    """Pictures and videos, which are shown after the text."""


class ToolCalls(Action):
    """Function calls that are made at once. Their results come back as one `ToolResults`."""

    calls: tuple[ToolCall, ...]


class ToolResults(Observation):
    """The results of one `ToolCalls`, in the same order as the calls."""

    results: tuple[ToolResult, ...]
    tools: tuple[dict[str, JsonValue], ...] = Field(default=(), exclude_if=operator.not_)
    """Schemas of the tools that the agent can call from now on, in addition to earlier ones."""


class Unknown(Value):
    """Base of UnknownObservation, UnknownThought and UnknownAction. They hold steps whose own class this process has
    not imported."""

    original: str
    """The kind as recorded on the tape."""
    content: dict[str, JsonValue]


class UnknownObservation(Unknown, Observation):
    """An observation whose class this process has not imported. Its content is kept as it was written."""


class UnknownThought(Unknown, Thought):
    """A thought whose class this process has not imported. Its content is kept as it was written."""


class UnknownAction(Unknown, Action):
    """An action whose class this process has not imported. Its content is kept as it was written."""


_unknown: dict[Role, type[Step]] = {
    "observation": UnknownObservation,
    "thought": UnknownThought,
    "action": UnknownAction,
}


def role_of(step: Step) -> Role:
    """Return `observation`, `thought` or `action`. Raises TypeError for a direct subclass of `Step`."""
    return _role(type(step))


@cache  # runs for every step, and isinstance is slow on pydantic classes
def _role(cls: type[Step]) -> Role:
    if issubclass(cls, Action):
        return "action"
    if issubclass(cls, Observation):
        return "observation"
    if issubclass(cls, Thought):
        return "thought"
    raise TypeError(f"{cls.__qualname__} must subclass Observation, Thought or Action")


def read_step(role: Role, kind: str, content: JsonValue) -> Step:
    """Return the step that was written as `content`.

    If no class of this kind is imported, the result is an UnknownObservation, UnknownThought or UnknownAction, which
    keeps the content. Raises ValueError if the class of this kind has another role, and pydantic's ValidationError,
    which is a ValueError, if it rejects the content.
    """
    cls = _registry.get(kind)
    if cls is None:
        return _unknown[role].model_validate({"original": kind, "content": content})
    step = cls.__pydantic_validator__.validate_python(content, context=RECORDED)  # `model_validate` without its checks
    if role_of(step) != role:
        raise ValueError(f"the tape records {kind!r} as a {role}, but {cls.__qualname__} is a {role_of(step)}")
    return step


def measure(step: Step) -> None:
    """Raise Unwritable if the step's text alone has more bytes than a record may have. The lengths of its strings are
    added up, because writing the step as JSON just to find out would take seconds."""
    for value in step.__dict__.values():
        if type(value) is not str or len(value) > 10_000:
            break
    else:
        return  # returns early for most steps, for speed
    left, values = MAX_BODY, [*step.__dict__.values()]
    while values and left >= 0:
        value = values.pop()
        if isinstance(value, str):
            left -= len(value)
        elif isinstance(value, dict | list | tuple | set | frozenset):
            left -= len(value)
            values += value
            values += value.values() if isinstance(value, dict) else ()
        elif isinstance(value, BaseModel) and not isinstance(value, Visual):
            values += value.__dict__.values()
    if left < 0:
        raise Unwritable(
            f"a step of kind {step.kind!r} has more than {MAX_BODY:,} bytes, the most that a record may have"
        )


def unwritable(step: Step, error: Exception) -> Unwritable:
    """Return the error for a step that can't be written. It names the field and the type of its value."""
    for name in type(step).model_fields:
        try:
            step.model_dump_json(include={name})
        except (PydanticSerializationError, UnicodeEncodeError):
            value = _culprit(getattr(step, name))
            if isinstance(value, str):
                return Unwritable(
                    f"a step of kind {step.kind!r} can't be written: the text of its field {name!r} "
                    "holds half a character (a lone surrogate); decode it with errors='replace'"
                )
            cls = type(value)
            module = "" if cls.__module__ == "builtins" else f"{cls.__module__}."
            return Unwritable(
                f"a step of kind {step.kind!r} can't be written: its field {name!r} holds a value of type "
                f"{module}{cls.__qualname__}, for which JSON has no form; make it of numbers, text, lists and "
                "dictionaries before the step is made (an array by its .tolist()), or give the field a type that "
                "pydantic can serialize"
            )
    return Unwritable(f"a step of kind {step.kind!r} can't be written: {error}")


def _culprit(value: Any) -> Any:
    """Return the innermost part of `value` that can't be written as JSON."""
    inside = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple | set) else ()
    for part in inside:
        try:
            to_json(part)
        except (PydanticSerializationError, UnicodeEncodeError):
            return _culprit(part)
    return value
