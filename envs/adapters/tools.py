"""Tools: what an agent may call by name, and the environment in which it calls them.

Plain functions are tools by their type hints and docstring. The calls of one turn are one action, `ToolCalls`, and
their results one observation, `ToolResults`; what a tool raises, or doesn't give in time, is a result too, for the
agent to read. Where tools come from elsewhere (an MCP server, a sandbox) is their source's matter. This module knows
nothing of models and prompts.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import inspect
import re
import threading
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, cast, runtime_checkable

from pydantic import JsonValue, TypeAdapter, ValidationError
from pydantic_core import ArgsKwargs, to_json

from ...tapes import Answer, TapereelError, Task, ToolCall, ToolCalls, ToolOffer, ToolResult, ToolResults
from ..environment import Effect, Environment, Outcome

SECONDS = 30.0
"""That a tool may take unless told otherwise."""
CHARACTERS = 20_000
"""Of a result, unless told otherwise: about 5,000 tokens."""


class BadTool(TapereelError, TypeError):
    """A function that can't be offered as a tool; names it and what would do."""


class ToolFailed(TapereelError, ValueError):
    """Raised inside a tool: the agent reads the message as it is, as an error."""


class ToolsLost(TapereelError, ConnectionError):
    """What serves the tools is gone, so none of its calls can be answered: the environment's fault, not a result."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tool:
    """Something that an agent may call."""

    name: str
    description: str
    parameters: dict[str, JsonValue]
    """JSON Schema of the arguments, an object."""
    call: Callable[[dict[str, JsonValue]], Awaitable[str]]
    """From the arguments, as the agent gave them, to the result."""
    effect: Effect = "pure"
    """What calling it again would do to the world outside."""
    timeout: float = SECONDS
    """Seconds until the agent is told that there is no answer."""
    limit: int = CHARACTERS
    """Characters of a result; what is longer is cut, with a note."""

    @property
    def schema(self) -> dict[str, JsonValue]:
        """As chat templates and APIs take it."""
        function = {"name": self.name, "description": self.description, "parameters": self.parameters}
        return {"type": "function", "function": function}


@runtime_checkable
class ToolSource(Protocol):
    """Where tools come from that have to be opened first."""

    @property
    def effect(self) -> Effect:
        """The worst that its tools may do, as far as it's known."""
        ...

    async def open(self) -> Sequence[Tool]:
        """Ahead of an episode: its tools."""
        ...

    async def close(self) -> None:
        """After the episode; also where `open` failed, or was never called."""
        ...


def worst(effects: Iterable[Effect]) -> Effect:
    """The one of them that asks for most care; `pure` for none."""
    found = set(effects)
    return "irreversible" if "irreversible" in found else "idempotent" if "idempotent" in found else "pure"


def tool(
    function: Callable[..., Any],
    *,
    name: str | None = None,
    description: str | None = None,
    effect: Effect = "pure",
    timeout: float = SECONDS,
    limit: int = CHARACTERS,
) -> Tool:
    """A plain function, or a bound method, as a tool: its name, its docstring, its parameters by type hints.

    Arguments are checked against the hints before it runs. A sync function runs in a thread of its own, since it may
    block; one that outlasts its time is left behind, because Python can't stop it. An entry under `Args:` in the
    docstring (`name: text`) describes a parameter, as `Annotated[int, Field(description=...)]` does.
    """
    known = name or getattr(function, "__name__", type(function).__name__)
    text = description if description is not None else inspect.getdoc(function) or ""
    adapter, parameters = _signature(function, known)
    for argument, meaning in _arguments(text).items():
        schema = parameters["properties"].get(argument)
        if schema is not None and "description" not in schema:
            schema["description"] = meaning
    blocks = not inspect.iscoroutinefunction(function)

    async def call(arguments: dict[str, JsonValue]) -> str:
        given = ArgsKwargs((), arguments)
        result = await in_thread(adapter.validate_python, given) if blocks else adapter.validate_python(given)
        return as_text(await result if inspect.isawaitable(result) else result)

    return Tool(
        name=known,
        description=_summary(text),
        parameters=parameters,
        call=call,
        effect=effect,
        timeout=timeout,
        limit=limit,
    )


def _signature(function: Callable[..., Any], name: str) -> tuple[TypeAdapter[Any], dict[str, Any]]:
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError) as error:
        raise BadTool(f"{name} has no signature that Python can tell: wrap it in a function with type hints") from error
    for parameter in signature.parameters.values():
        if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            what = str(parameter).partition(":")[0]
            raise BadTool(
                f"tool {name}: a model gives arguments by name, so {what} can't be offered; give each "
                "parameter a name of its own"
            )
        if parameter.annotation is parameter.empty:
            raise BadTool(f"tool {name}: parameter {parameter.name!r} has no type hint, so its schema isn't known")
    adapter: TypeAdapter[Any] = TypeAdapter(cast(Any, function))
    schema = adapter.json_schema()
    for part in schema.get("properties", {}).values():
        part.pop("title", None)
    return adapter, {"type": "object", "properties": {}, **schema}


def _summary(text: str) -> str:
    """A docstring up to its sections: those describe parameters and results, which have places of their own."""
    return re.split(r"\n\s*(?:Args|Arguments|Parameters|Returns|Raises):\s*\n", text, maxsplit=1)[0].strip()


def _arguments(text: str) -> dict[str, str]:
    """name -> description, of the entries under `Args:`."""
    section = re.search(r"(?:^|\n)(?:Args|Arguments|Parameters):\s*\n(.*?)(?:\n\S|\Z)", text, re.DOTALL)
    if section is None:
        return {}
    entries = re.findall(r"^[ \t]+(\w+)[ \t]*(?:\([^)]*\))?:[ \t]*(.+(?:\n[ \t]{5,}.+)*)", section[1], re.MULTILINE)
    return {name: " ".join(meaning.split()) for name, meaning in entries}


def as_text(result: Any) -> str:
    """What a model reads of a tool's result: text as it is, everything else as JSON."""
    if isinstance(result, str):
        return result
    try:
        return to_json(result, inf_nan_mode="strings").decode()
    except ValueError:  # nothing that JSON knows
        return str(result)


def cut(text: str, limit: int) -> str:
    """At most `limit` characters, with a note of what was cut, and nothing that JSON can't hold."""
    if len(text) > limit:
        text = f"{text[:limit]}\n[cut here: {len(text) - limit:,} of {len(text):,} characters left out]"
    return text.encode("utf-8", "backslashreplace").decode()


async def in_thread(function: Callable[..., Any], *args: Any) -> Any:
    """The function in a daemon thread of its own, so that one which never returns holds up neither the others nor the
    end of the process. Cancelling stops the waiting, not the thread."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[Any] = loop.create_future()
    context = contextvars.copy_context()

    def settle(result: Any, error: BaseException | None) -> None:
        if done.cancelled():
            return
        if isinstance(error, StopIteration | asyncio.CancelledError | KeyboardInterrupt | SystemExit):
            error = RuntimeError(f"it raised {type(error).__name__}: {error}")
        if error is not None:
            done.set_exception(error)
        else:
            done.set_result(result)

    def work() -> None:
        try:
            result, error = context.run(function, *args), None
        except BaseException as raised:  # handed to whoever waits
            result, error = None, raised
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
            loop.call_soon_threadsafe(settle, result, error)

    threading.Thread(target=work, name=f"tapereel-tool-{getattr(function, '__name__', '')}", daemon=True).start()
    return await done


class ToolEnvironment(Environment[ToolCalls | Answer]):
    """An agent with tools: it calls them, several at once if it likes, until it gives an `Answer`.

    Subclass it for what is asked (`prompt`) and for what an answer is worth (`answered`). The agent for it is
    `ChatAgent(actions=[ToolCalls], plain=Answer)`. The tools stay the same for the whole episode, and are on the tape
    from its first step.
    """

    task: Task
    """Of this episode; set by `reset`."""

    def __init__(self, tools: Sequence[Callable[..., Any] | Tool | ToolSource], *, parallel: int = 8) -> None:
        """tools: functions, `Tool`s, or sources that are opened at `reset`. parallel: calls of one action that run at
        once; the others wait."""
        if parallel < 1:
            raise ValueError(f"parallel must be at least 1, not {parallel}")
        self._sources = [t for t in tools if not isinstance(t, Tool) and isinstance(t, ToolSource)]
        self._given = [
            t if isinstance(t, Tool) else tool(t) for t in tools if isinstance(t, Tool) or not isinstance(t, ToolSource)
        ]
        self._gate = asyncio.Semaphore(parallel)
        self.parallel = parallel
        self.tools: Mapping[str, Tool] = _by_name(self._given)
        """By name; those of sources from `reset` on."""
        self.effect = worst([*(t.effect for t in self._given), *(s.effect for s in self._sources)])

    async def prompt(self, task: Task) -> str:
        """What the agent is asked; the public part of the task unless overridden."""
        return as_text(task.public)

    async def answered(self, text: str) -> Outcome:
        """What an answer leads to; the end, without a score, unless overridden."""
        return Outcome(terminated=True)

    async def reset(self, task: Any) -> ToolOffer:
        self.task = Task.of(task)
        opened = await asyncio.gather(*(source.open() for source in self._sources))
        self.tools = _by_name([*self._given, *(t for tools in opened for t in tools)])
        self.effect = worst(t.effect for t in self.tools.values())
        return ToolOffer(text=await self.prompt(self.task), tools=tuple(t.schema for t in self.tools.values()))

    async def step(self, action: ToolCalls | Answer) -> Outcome:
        if isinstance(action, Answer):
            return await self.answered(action.text)
        results = await asyncio.gather(*(self._result(call) for call in action.calls), return_exceptions=True)
        for result in results:
            if isinstance(result, BaseException):
                raise result
        return Outcome(ToolResults(results=tuple(r for r in results if isinstance(r, ToolResult))))

    async def close(self) -> None:
        await asyncio.gather(*(source.close() for source in self._sources))

    async def _result(self, call: ToolCall) -> ToolResult:
        found = self.tools.get(call.name)
        if found is None:
            problem = f"There is no tool {call.name!r}. There are: {', '.join(self.tools) or 'none'}."
            return ToolResult(id=call.id, name=call.name, content=cut(problem, CHARACTERS), error=True)
        async with self._gate:
            content, error = await _ask(found, call.arguments)
        return ToolResult(id=call.id, name=call.name, content=cut(content, found.limit), error=error)


async def _ask(tool: Tool, arguments: dict[str, JsonValue]) -> tuple[str, bool]:
    """(content, whether it tells of an error)."""
    timer = asyncio.timeout(tool.timeout)
    try:
        async with timer:
            return await tool.call(arguments), False
    except ToolsLost:
        raise
    except ToolFailed as error:
        return str(error), True
    except ValidationError as error:
        return _mismatch(tool, error), True
    except Exception as error:  # what a tool raises is its answer
        if isinstance(error, TimeoutError) and timer.expired():
            return f"{tool.name} gave no answer in {tool.timeout:g} s.", True
        return f"{type(error).__name__}: {error}", True


def _mismatch(tool: Tool, error: ValidationError) -> str:
    parts = [f"{'.'.join(map(str, e['loc'])) or 'arguments'}: {e['msg']}" for e in error.errors(include_url=False)]
    return f"{tool.name} can't be called so: {'; '.join(parts)}."


def _by_name(tools: Iterable[Tool]) -> dict[str, Tool]:
    named: dict[str, Tool] = {}
    for one in tools:
        if one.name in named:
            raise BadTool(f"two tools are called {one.name!r}: give one of them another name")
        named[one.name] = one
    return named
