"""An agent is a function from the tape so far to the next steps. It keeps no state except its tape.

A tape doesn't record the local variables of a running `act`, so resume, fork and replay begin between two turns.
"""

from __future__ import annotations

import inspect
from collections.abc import AsyncIterator, Callable
from typing import Any, ClassVar

from pydantic import BaseModel, JsonValue, TypeAdapter

from ...tapes import Step, Tape
from ...tapes.common.arguments import check_arguments
from ...tapes.common.redact import hide
from ...tapes.errors import UsageError
from ...tapes.records import Identity
from .llm import LLM

_json: TypeAdapter[Any] = TypeAdapter(JsonValue)


class Agent:
    """Base class of agents. `async def act(self, tape, llm)` yields any number of thoughts, then one Action."""

    name: str = ""

    patience: ClassVar[float] = 0.0
    """In a replay, each answer waits at most this number of seconds for the answers recorded before it. Set this for an
    agent that asks concurrently from another process, because its requests may arrive in any order."""

    def act(self, tape: Tape, llm: LLM) -> AsyncIterator[Step]:
        """Take one turn. Write it as `async def act(...)` with `yield`, which makes it an async generator."""
        raise NotImplementedError(
            f"{type(self).__qualname__} must define `async def act(self, tape, llm)` with `yield`"
        )

    @property
    def path(self) -> str:
        """The agent's path on the tape if it is the outermost agent. If another agent delegates to it, its path starts
        with that agent's path."""
        return self.name or type(self).__name__.lower()

    def identity(self) -> Identity:
        """Return the name, class and configuration that `begin` records."""
        return Identity(name=self.path, cls=qualified(type(self)), config=configuration(self))

    _factory: Callable[[], Agent] | None = None

    def made_by(self, factory: Callable[[], Agent]) -> Agent:
        """Return this agent, whose other instances `factory` makes. From now on, `for_episode` makes a new one."""
        self._factory = factory
        return self

    def for_episode(self) -> Agent:
        """Return the agent that acts in one episode: a new instance if the run was given a class or a function that
        makes agents, and otherwise this one, which all episodes share."""
        return self if self._factory is None else self._factory()


class FunctionAgent(Agent):
    """An agent made of one async generator function `(tape, llm) -> steps`."""

    @check_arguments
    def __init__(self, function: Callable[[Tape, LLM], AsyncIterator[Step]]) -> None:
        if inspect.iscoroutinefunction(function) or inspect.isgeneratorfunction(function):
            raise UsageError(
                f"the agent {function.__qualname__} must be `async def` with `yield`: it yields its thoughts and then "
                "one action, and returns nothing"
            )
        self.function = function
        self.name = getattr(function, "__name__", type(function).__name__)

    def act(self, tape: Tape, llm: LLM) -> AsyncIterator[Step]:
        return self.function(tape, llm)

    def identity(self) -> Identity:
        return Identity(name=self.path, cls=qualified(self.function))


def agent(function: Callable[[Tape, LLM], AsyncIterator[Step]]) -> FunctionAgent:
    """Decorator that turns a plain `async def` generator into an agent.

    ```python
    @agent
    async def greeter(tape: Tape, llm: LLM):
        yield Answer(text=(await llm(tape)).text)
    ```
    """
    return FunctionAgent(function)


@check_arguments
async def delegate(name: str, agent: Agent, tape: Tape, llm: LLM) -> AsyncIterator[Step]:
    """Run a sub-agent's turn: `async for step in delegate("searcher", self.searcher, tape, llm): yield step`.

    The sub-agent's steps and calls have the path `<this agent>/<name>`, so each agent can be trained separately.
    """
    check_name(name)
    path = f"{tape.scope}/{name}" if tape.scope else name
    steps = agent.act(tape.now().within(path), llm)
    try:
        async for step in steps:
            llm.spoke(step, path)
            yield step
    finally:
        # If an agent stops reading early, the sub-agent's generator must not stay open. Otherwise its cleanup would run
        # later, in whatever task the garbage collector happens to use.
        close = getattr(steps, "aclose", None)
        if close is not None:
            await close()


def check_name(name: str) -> None:
    """Raise UsageError if `name` can't be a part of an agent's path."""
    if not name or "/" in name or name == "env":
        raise UsageError(f"agent name {name!r} is invalid: it must be non-empty, without '/', and not 'env'")


def qualified(thing: type | Callable[..., object]) -> str:
    """Return `module:qualname` for a class or function."""
    return f"{thing.__module__}:{thing.__qualname__}"


def configuration(thing: object) -> dict[str, JsonValue]:
    """Return the public attributes of an instance as JSON values, with secrets hidden.

    A sub-agent or pydantic model is represented by its own configuration, and any other object by a name.
    """
    config: dict[str, JsonValue] = {}
    for key, value in vars(thing).items():
        if key.startswith("_") or key == "name":
            continue
        if isinstance(value, Agent):
            config[key] = value.identity().model_dump(mode="json")
        elif isinstance(value, BaseModel):
            config[key] = value.model_dump(mode="json")
        elif isinstance(value, type) or callable(value):
            config[key] = qualified(value) if hasattr(value, "__qualname__") else qualified(type(value))
        else:
            try:
                config[key] = _json.validate_python(list(value) if isinstance(value, tuple) else value)
            except ValueError:
                config[key] = f"<{type(value).__qualname__}>"
    return hide(config)
