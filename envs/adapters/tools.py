"""Tools that an agent calls by name, and `ToolEnvironment`, an environment with tools.

A plain function becomes a tool through its type hints and docstring. The calls in one turn are one action, `ToolCalls`,
and their results are one observation, `ToolResults`. If a tool raises an exception or exceeds its time limit, the agent
reads this as a result. Tools that must be opened first (an MCP server, a sandbox) come from a `ToolSource`.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import re
import sqlite3
import sys
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, replace
from functools import partial, wraps
from typing import Any, Protocol, cast, runtime_checkable

from pydantic import ConfigDict, JsonValue, TypeAdapter, ValidationError
from pydantic_core import ArgsKwargs, to_json

from ...tapes import (
    Answer,
    Picture,
    Status,
    TapereelError,
    Task,
    Text,
    ToolCall,
    ToolCalls,
    ToolOffer,
    ToolResult,
    ToolResults,
)
from ...tapes.common.arguments import check_arguments
from ...tapes.common.text import storable
from ...tapes.decoding import DATA_URL
from ...tapes.errors import BadArgument, BadPicture, MissingExtra, error_message
from ...tapes.messages import text_of
from ...tapes.pictures import Visual
from ...tapes.records import Message
from ...tapes.steps import PLACES, Prompt, content_parts, place_of
from ..blocking import CallThread, in_thread
from ..environment import Effect, Environment, EnvironmentFault, Outcome
from ..questions import Question, as_messages, question, question_part, taken
from ..taskset import SHOWN

SECONDS = 30.0
"""Default time limit for a tool, in seconds."""
CHARACTERS = 20_000
"""Default size limit for a result, in characters. This is about 5,000 tokens."""

_IMAGE_FILE = re.compile(rb"\x89PNG\r\n\x1a\n|\xff\xd8\xff|RIFF....WEBP", re.DOTALL)
"""Matches the beginning of the image files that a `Picture` is made from."""

_SECTIONS = re.compile(
    r"""(?mx) ^[ \t]* (?:
        (?: Args | Arguments | Parameters | Returns | Yields | Raises ) (?: :[ \t]*$ | [ \t]*\n[ \t]*-{3,}[ \t]*$ )
        | : (?: param | arg | type | return | rtype | raise ) [^:\n]* : )"""
)
"""Matches the beginning of a docstring's section."""
_STYLES = (
    # Google: `name (type): text`, indented below `Args:`
    (
        r"^(?:Args|Arguments|Parameters):[ \t]*\n((?:[ \t]+.*\n?|\n)*)",
        r"^[ \t]+(\w+)[ \t]*(?:\([^)]*\))?:[ \t]*(.+(?:\n[ \t]{5,}.+)*)",
    ),
    # numpy: `name, name : type` below an underlined heading, and the text indented below it
    (
        r"^Parameters[ \t]*\n-{3,}[ \t]*\n((?:(?!.*\n-{3,}).*\n?)*?)(?=\Z|.*\n-{3,})",
        r"^(\w+(?:,[ \t]*\w+)*)[ \t]*(?::.*)?\n((?:[ \t]+.*\n?|\n)+)",
    ),
    # Sphinx: `:param type name: text`
    (r"(?s)(.*)", r"^:(?:param|arg)\w*[ \t]+(?:[^:\n]*[ \t])?(\w+):[ \t]*(.+(?:\n(?!:).*\S.*)*)"),
)
"""Each style of docstrings: how the section of the parameters is found, and in it each entry, (names, text)."""

_run_sync: ContextVar[Callable[..., Awaitable[Any]]] = ContextVar("_run_sync", default=in_thread)
"""Runs a sync tool of the call in progress."""


class ToolFailed(TapereelError, ValueError):
    """An error to raise inside a tool. The agent reads its message unchanged."""


class ToolsLost(TapereelError, ConnectionError):
    """The server of the tools is gone and can't answer any call. This is an error of the environment, not a result."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tool:
    """A function that an agent may call."""

    name: str
    description: str
    parameters: dict[str, JsonValue]
    """The JSON Schema of the arguments, which form an object."""
    call: Callable[[dict[str, JsonValue]], Awaitable[str | Sequence[str | Visual]]]
    """Takes the agent's unchecked arguments and returns a string, or a sequence of strings, pictures and videos."""
    effect: Effect = "pure"
    """The effect on the outside world when a call is repeated."""
    timeout: float = SECONDS
    """Time limit for a call, in seconds. If it is exceeded, the agent reads that the call was not answered."""
    limit: int = CHARACTERS
    """Size limit for a result, in characters. A longer result is cut, and a note is added."""
    parallel: bool = True
    """Whether a call may run at the same time as other calls in the same action."""

    @property
    def schema(self) -> dict[str, JsonValue]:
        """The tool in the form that chat templates and APIs expect."""
        function = {"name": self.name, "description": self.description, "parameters": self.parameters}
        return {"type": "function", "function": function}


@runtime_checkable
class ToolSource(Protocol):
    """A source of tools that must be opened first.

    A source may have a dict `described`, which is read after `open` and describes how its tools run in this episode.
    The dict is recorded on the tape in `ToolOffer.sources`. Its values may differ between machines, so re-execution
    doesn't compare them.
    """

    @property
    def effect(self) -> Effect:
        """The most harmful effect of the source's tools, as far as it is known."""
        ...

    async def open(self) -> Sequence[Tool]:
        """Return the tools. This method is called before an episode."""
        ...

    async def close(self) -> None:
        """Release the tools. This method is called after the episode, even if `open` failed or was never called."""
        ...


def worst(effects: Iterable[Effect]) -> Effect:
    """Return the most harmful of the effects, or `pure` if there are none."""
    found = set(effects)
    return "irreversible" if "irreversible" in found else "idempotent" if "idempotent" in found else "pure"


def tool(
    function: Callable[..., object],
    *,
    name: str | None = None,
    description: str | None = None,
    effect: Effect = "pure",
    timeout: float = SECONDS,
    limit: int = CHARACTERS,
    parallel: bool | None = None,
) -> Tool:
    """Make a tool from a function, a bound method or a callable object, whose name, docstring and type hints describe
    the tool.

    Arguments are validated before the function runs. An async function runs in the event loop, at the same time as
    other calls of its action. The sync tools of an environment run one after the other, in the order of the calls, in
    one thread that the environment has for them. With `parallel=True`, each call of a sync tool has a thread of its
    own. If the time limit is exceeded, the thread is abandoned, because Python can't stop it. The docstring (in the
    style of Google, numpy or Sphinx) describes the parameters, and so does `Annotated[int, Field(description=...)]`.
    """
    source = described = function.func if isinstance(function, partial) else function
    known = name or getattr(source, "__name__", type(source).__name__)
    if callable(function) and not inspect.isroutine(function) and not isinstance(function, partial | type):
        function = function.__call__
        described = function if function.__doc__ else source
    text = description if description is not None else inspect.getdoc(described) or ""
    adapter, parameters = _signature(function, known)
    for argument, meaning in _arguments(text).items():
        schema = parameters["properties"].get(argument)
        if schema is not None and "description" not in schema:
            schema["description"] = meaning
    blocks = not inspect.iscoroutinefunction(function)

    async def call(arguments: dict[str, JsonValue]) -> str | list[str | Visual]:
        made = adapter.validate_python(ArgsKwargs((), arguments))
        run = in_thread if parallel else _run_sync.get()
        result = await run(made) if blocks else made()
        return await as_parts(await result if inspect.isawaitable(result) else result)

    return Tool(
        name=known,
        # The sections of the docstring are left out, because the schema describes the parameters.
        description=_SECTIONS.split(text, maxsplit=1)[0].strip(),
        parameters=parameters,
        call=call,
        effect=effect,
        timeout=timeout,
        limit=limit,
        parallel=not blocks if parallel is None else parallel,
    )


def _signature(function: Callable[..., object], name: str) -> tuple[TypeAdapter[Any], dict[str, Any]]:
    """Return an adapter that checks the arguments and returns the call to make, and their JSON Schema."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError) as error:
        raise BadArgument(f"{name} has no readable signature: wrap it in a function with type hints") from error
    for parameter in signature.parameters.values():
        if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            what = str(parameter).partition(":")[0]
            raise BadArgument(
                f"tool {name}: a model passes arguments by name, so {what} can't be offered; use named parameters"
            )
        if parameter.annotation is parameter.empty:
            raise BadArgument(
                f"tool {name}: parameter {parameter.name!r} has no type hint; add one, its schema needs it"
            )

    # If pydantic called the function, a tool that still ran at the end of the process would abort it: Python ends the
    # tool's thread then, and pydantic's compiled code can't be left in this way.
    @wraps(function)
    def checked(*args: object, **named: object) -> Callable[[], object]:
        return partial(function, *args, **named)

    checked.__annotations__ = {one.name: one.annotation for one in signature.parameters.values()}
    # Dataclasses and typed dicts take this setting over, and pydantic's models have one of their own.
    adapter: TypeAdapter[Any] = TypeAdapter(cast(Any, checked), config=ConfigDict(extra="forbid"))
    schema = adapter.json_schema()
    for part in schema.get("properties", {}).values():
        part.pop("title", None)
    return adapter, {"type": "object", "properties": {}, **schema}


def _arguments(text: str) -> dict[str, str]:
    """Return the description of each parameter in the docstring, by its name."""
    found: dict[str, str] = {}
    for section, entry in _STYLES:
        for part in re.findall(section, text, re.MULTILINE):
            for names, meaning in re.findall(entry, part, re.MULTILINE):
                found.update(dict.fromkeys(re.findall(r"\w+", names), " ".join(meaning.split())))
    return found


def as_text(result: object) -> str:
    """Return a tool's result as the model reads it. Text is unchanged, and everything else is JSON. Raises BadArgument
    for a value that has neither JSON nor a text of its own, such as an async generator. Its text would be an address in
    memory, which differs in each run."""
    if isinstance(result, str):
        return result
    try:
        return to_json(result, inf_nan_mode="strings").decode()
    except ValueError:  # a type that JSON can't hold
        text = str(result)
        if re.search(r"<.+ at 0x[0-9a-fA-F]+>", text):
            raise BadArgument(
                f"a tool returned {text:.200}, which no model can read: return text, JSON values, a pydantic object, "
                "or `tr.Picture.of(image)`; turn a generator into a list first"
            ) from None
        return text


async def as_parts(result: object) -> str | list[str | Visual]:
    """Return a tool's result as the model reads it.

    A `Picture`, a `Video`, a PIL image, the bytes of a PNG, JPEG or WebP file, and TRL's content part `{"type":
    "image", "image": ...}` are shown as pictures, even in a list. Every other value is text.
    """
    values: Sequence[Any] = result if isinstance(result, list | tuple) else [result]
    images = [_image_in(value) for value in values]
    if all(image is None for image in images):
        return as_text(result)
    read = [image if image is None or isinstance(image, Visual) else await Picture.read(image) for image in images]
    return [image or _text_of(value) for image, value in zip(read, values, strict=True)]


def _text_of(value: object) -> str:
    return as_text(value.get("text", value) if isinstance(value, dict) else value)


def _image_in(value: Any) -> Any:
    """Return a picture, a video, a PIL image, the bytes of an image file, or the image (PIL, array, bytes) in a content
    part. Any other value gives None, even a path or URL, because a tool may have got that text from an untrusted
    source."""
    pillow = sys.modules.get("PIL.Image")  # without this module, no PIL image exists
    file = isinstance(value, bytes) and _IMAGE_FILE.match(value)
    if isinstance(value, Visual) or file or (pillow is not None and isinstance(value, pillow.Image)):
        return value
    image = value.get("image") if isinstance(value, dict) and value.get("type") == "image" else None
    return image if isinstance(image, bytes) or hasattr(type(image), "__array_interface__") else None


async def with_pictures(messages: Sequence[Message], row: object) -> tuple[list[Message], list[Visual]]:
    """Return the messages with a content part for each picture and video in the row, and these visuals in order.

    A content part is `{"type": "image"}` or `{"type": "video"}`. If the messages have no parts of these types, the
    parts are put before the text of the first user message, as in TRL. Raises BadPicture if the messages have more or
    fewer of these parts than the row has visuals.
    """
    shown = [one if isinstance(one, Visual) else await Picture.read(one) for one in _shown(row)]
    # In an Arrow column, every part has the keys of all parts. A key that it lacked has the value None.
    parts: list[list[Any]] = [
        [{k: v for k, v in p.items() if v is not None} for p in content_parts(m)] for m in messages
    ]
    places = [one for part in parts for one in part if one in PLACES]
    if shown and not places:
        at = next((k for k, message in enumerate(messages) if message.get("role") == "user"), 0)
        text = parts[at] or [{"type": "text", "text": messages[at].get("content")}]
        places = [place_of(one) for one in shown]
        parts[at] = [*places, *text]
    left = [[one for one in shown if place_of(one) == kind] for kind in PLACES]
    for kind, some in zip(PLACES, left, strict=True):
        n, what = places.count(kind), kind["type"]
        if n != len(some):
            raise BadPicture(f"the prompt has {n} content parts of type {what!r}, and its row {len(some)} {what}s")
    ordered = [left[PLACES.index(place)].pop(0) for place in places]
    return [{**m, "content": part} if part else m for m, part in zip(messages, parts, strict=True)], ordered


def _shown(row: object) -> list[Visual | str]:
    """Return the pictures and data URLs in a row's `images` or `image`, then the videos in its `videos` or `video`. A
    path or URL is never read, because a task may come from another process."""
    shown: list[Visual | str] = []
    for many, one in (SHOWN[:2], SHOWN[2:]):
        found: Any = (row.get(many) or row.get(one)) if isinstance(row, dict) else None
        listed = found if isinstance(found, list) else [found]
        if all(isinstance(v, Visual) or (isinstance(v, str) and DATA_URL.match(v)) for v in listed):
            shown += listed
    return shown


def cut(text: str, limit: int) -> str:
    """Return at most `limit` characters, with a note if text was cut. Lone surrogates are escaped for JSON."""
    if len(text) > limit:
        text = f"{text[:limit]}\n[cut here: {len(text) - limit:,} of {len(text):,} characters left out]"
    return storable(text, len(text))


class ToolEnvironment(Environment[ToolCalls | Answer]):
    """An environment with tools. The agent calls them, possibly several in one turn, until it gives an `Answer`.

    Override `prompt` (the question) and `answered` (the score of an answer). The agent for this environment is
    `ChatAgent(actions=[ToolCalls], plain=Answer)`. The first step on the tape lists the tools. `offer` adds one later.

    Async methods run in the event loop. A sync `prompt` or `answered` (`def` instead of `async def`) runs in the thread
    of the sync tools. With `blocking = True`, every method and sync tool runs in the environment's thread, and
    `Limits.environment_seconds` limits a sync tool.

    An episode that ends without any answer, at a limit or because of unreadable calls, is scored as if the answer were
    "". Without a score, it would not be trained on, and a model that calls tools forever would never learn to stop.
    """

    varies: Mapping[str, str | None] = {"tool_offer.sources": None}
    """How a source ran its tools may differ between two machines."""
    task: Task
    """The task of this episode, which `reset` sets."""
    _answered = False
    """Whether an answer was given in this episode."""
    _new: list[Tool] | None = None
    """The tools that `offer` has added and no observation has shown yet. None before the first `reset`."""

    @check_arguments
    def __init__(self, tools: Sequence[Callable[..., object] | Tool | ToolSource], *, parallel: int = 8) -> None:
        """`tools` are functions, `Tool`s, or sources that are opened at `reset`. At most `parallel` of the calls in one
        action run at once."""
        if parallel < 1:
            raise ValueError(f"parallel must be at least 1, not {parallel}")
        self._sources = [t for t in tools if not isinstance(t, Tool) and isinstance(t, ToolSource)]
        self._given = [
            t if isinstance(t, Tool) else tool(t) for t in tools if isinstance(t, Tool) or not isinstance(t, ToolSource)
        ]
        self._gate, self._turn = asyncio.Semaphore(parallel), asyncio.Lock()
        self._thread: CallThread | None = None
        """The thread of the sync tools."""
        self.parallel = parallel
        self.tools: Mapping[str, Tool] = _by_name(self._given)
        """The tools by name. `reset` adds the tools from sources, and `offer` others."""
        self.effect = worst([*(t.effect for t in self._given), *(s.effect for s in self._sources)])

    def offer(self, function: Callable[..., object] | Tool) -> None:
        """Add a tool to the episode. The agent gets it with the next observation. Raises BadArgument if another tool
        has its name."""
        made = function if isinstance(function, Tool) else tool(function)
        self.tools = _by_name([*self.tools.values(), made])
        self.effect = worst([self.effect, made.effect])
        (self._given if self._new is None else self._new).append(made)

    def _shown(self, outcome: Outcome) -> Outcome:
        """Return the outcome with the schemas of the new tools in its observation."""
        new, seen = tuple(tool.schema for tool in self._new or ()), getattr(outcome, "observation", None)
        if not new or not isinstance(seen, Text | ToolResults):  # with other observations, they wait for the next one
            return outcome
        self._new = []
        text = isinstance(seen, Text)
        seen = ToolOffer(text=seen.text, tools=new) if text else seen.model_copy(update={"tools": new})
        return replace(outcome, observation=seen)

    async def prompt(self, task: Task) -> Question:
        """Return the question to the agent, as text or as chat messages.

        By default, it is the task's public part, or the plain value: text, chat messages, or the value of `prompt`,
        `question`, `problem`, `input` or `messages` in a dict.
        """
        return question(*question_part(task))

    def check_task(self, task: Task) -> str | None:
        own = type(self).prompt, type(self).reset
        if own != (ToolEnvironment.prompt, ToolEnvironment.reset):  # the task is read by other rules
            return None
        part, public = question_part(task)
        question(part, public)
        return None if public else taken(part)

    async def answered(self, text: str) -> Outcome:
        """Return the outcome of an answer. By default the episode ends without a score."""
        return Outcome(terminated=True)

    async def reset(self, task: object) -> ToolOffer:
        self.task = Task.of(task)
        opened = await asyncio.gather(*(source.open() for source in self._sources))
        self.tools = _by_name([*self._given, *(t for tools in opened for t in tools)])
        self.effect, self._new = worst(t.effect for t in self.tools.values()), []
        asked, tools = await self._own(self.prompt, self.task), tuple(t.schema for t in self.tools.values())
        self._new = []
        sources = tuple(dict(said) for source in self._sources if (said := getattr(source, "described", None)))
        # A `prompt` of its own may keep a plain value secret, so only public pictures are shown with it.
        own = type(self).prompt is not ToolEnvironment.prompt
        shown = self.task.filled(self.task.public) if own else question_part(self.task)[0]
        messages, pictures = await with_pictures(as_messages(asked), shown)
        if isinstance(asked, str) and not pictures:
            return ToolOffer(text=asked, tools=tools, sources=sources)
        text = asked if isinstance(asked, str) else text_of(asked[-1])
        return Prompt(text=text, messages=tuple(messages), tools=tools, sources=sources, pictures=tuple(pictures))

    async def step(self, action: ToolCalls | Answer) -> Outcome:
        if isinstance(action, Answer):
            self._answered = True
            return self._shown(await self._own(self.answered, action.text))
        results = await asyncio.gather(*(self._result(call) for call in action.calls), return_exceptions=True)
        for result in results:
            if isinstance(result, BaseException):
                raise result
        seen = ToolResults(results=tuple(r for r in results if isinstance(r, ToolResult)))
        return self._shown(Outcome(seen))

    async def finish(self, status: Status) -> Outcome | None:
        return None if self._answered else await self._own(self.answered, "")

    async def close(self) -> None:
        self._thread = None
        await asyncio.gather(*(source.close() for source in self._sources))

    async def _own(self, function: Callable[..., Any], *args: object, **named: object) -> Any:
        """Return what the user's function returns. A sync function runs in the thread of the sync tools."""
        call = partial(function, *args, **named)
        found = call() if inspect.iscoroutinefunction(function) else await self._in_own_thread(call)
        return await found if inspect.isawaitable(found) else found

    async def _in_own_thread(self, function: Callable[..., Any], *args: object) -> Any:
        if self.blocking:  # this already is the thread of the environment
            return function(*args)
        thread = self._thread = self._thread or CallThread(f"tapereel-tools-{type(self).__qualname__}")
        try:
            return await thread.run(function, *args)
        except asyncio.CancelledError:
            self._thread = None  # the call may never end, so the next one gets another thread
            raise

    async def _result(self, call: ToolCall) -> ToolResult:
        found = self.tools.get(call.name)
        if found is None:
            problem = f"There is no tool {call.name!r}. There are: {', '.join(self.tools) or 'none'}."
            return ToolResult(id=call.id, name=call.name, content=cut(problem, CHARACTERS), error=True)
        async with contextlib.nullcontext() if found.parallel else self._turn, self._gate:
            _run_sync.set(self._in_own_thread)  # each call of an action is a task with a context of its own
            content, error = await _ask(found, call.arguments)
        parts = [content] if isinstance(content, str) else content
        text = cut("\n".join(part for part in parts if isinstance(part, str)), found.limit)
        pictures = tuple(part for part in parts if isinstance(part, Visual))
        return ToolResult(id=call.id, name=call.name, content=text, error=error, pictures=pictures)


def unscored(env: object) -> bool:
    """Return whether it is known that nothing scores an episode of `env`: a ToolEnvironment without rewards and without
    an own method that could return one."""
    if not isinstance(env, ToolEnvironment) or env.rewards is not None:
        return False
    return all(getattr(type(env), f) is getattr(ToolEnvironment, f) for f in ("answered", "finish", "step"))


async def _ask(tool: Tool, arguments: dict[str, JsonValue]) -> tuple[str | Sequence[str | Visual], bool]:
    """Call the tool. Return the content of the result, and whether it is an error."""
    timer = asyncio.timeout(tool.timeout)
    try:
        async with timer:
            return await tool.call(arguments), False
    except (ToolsLost, MissingExtra):
        raise
    except ToolFailed as error:
        return str(error), True
    except ValidationError as error:
        parts = [f"{'.'.join(map(str, e['loc'])) or 'arguments'}: {e['msg']}" for e in error.errors(include_url=False)]
        return f"{tool.name} can't be called so: {'; '.join(parts)}.", True
    except Exception as error:  # the agent reads it as the result
        if isinstance(error, TimeoutError) and timer.expired():
            return f"{tool.name} gave no answer in {tool.timeout:g} s.", True
        if isinstance(error, sqlite3.ProgrammingError) and "thread" in str(error):
            raise EnvironmentFault(
                f"tool {tool.name} uses a sqlite connection of another thread: sync tools run in a thread of their "
                "own. Set `blocking = True` in the environment's class and connect in `reset` or `prompt`, or pass "
                "`check_same_thread=False` to `sqlite3.connect`, since sync tools run one after the other"
            ) from error
        return ": ".join(filter(None, (type(error).__name__, error_message(error)))), True


def _by_name(tools: Iterable[Tool]) -> dict[str, Tool]:
    named: dict[str, Tool] = {}
    for one in tools:
        if one.name in named:
            raise BadArgument(f"two tools have the name {one.name!r}: rename one of them")
        named[one.name] = one
    return named
