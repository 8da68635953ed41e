"""An agent, an environment and tasks by name, as a configuration gives them: `package.module:name` or `file.py:name`.

Loading runs the caller's own code, as importing it would. Whatever can't be what was asked for is a UsageError that
says what was found there and what would do.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

from pydantic import Field, JsonValue

from ...envs.environment import Environment
from ...envs.load_named import load_named
from ...envs.rewards import load_rewards, rewarded
from ...envs.taskset import BadTasks, Taskset, TaskStream
from ...tapes.common.config import Config
from ...tapes.errors import UsageError
from ..episode.agent import Agent

TASK_FILES = (".jsonl", ".json", ".parquet", ".csv")


@dataclass(frozen=True)
class Loaded:
    """What a `Scene` names."""

    agent: Agent
    env: Callable[[], Environment[Any]]
    tasks: Taskset


class Scene(Config):
    """Who acts, where, and on what."""

    agent: str
    """`module:name` of an Agent: an instance, a class or a function without arguments that makes one."""
    env: str
    """`module:name` of an Environment class, or of a function without arguments that makes an instance."""
    tasks: str | tuple[JsonValue, ...]
    """`module:name` of tasks (or of a function that gives them), a JSONL, JSON, Parquet or CSV file, or a list."""
    task_row: str | None = None
    """`module:name` of a function from one row of a file or list to a task; None: the row is its private part."""
    count: int | None = Field(default=None, ge=1)
    """How many tasks to take, from the first; None for all."""

    rewards: tuple[str, ...] = ()
    """What scores each episode when it has ended, beside the environment: `module:name` of a Rewards, a RewardSource or
    a function from a tape to its score, a `.py` file with a `reward_func`, or the address of an HTTP reward model."""

    def load(self) -> Loaded:
        """The things themselves."""
        env, rewards = load_env(self.env), load_rewards(self.rewards)
        return Loaded(
            load_agent(self.agent),
            env if rewards is None else rewarded(env, rewards),
            load_tasks(self.tasks, self.task_row, self.count),
        )


def load_agent(name: str) -> Agent:
    """The agent called `name`."""
    found = load_named(name)
    makes = found if isinstance(found, Agent) or _is_act(found) or not callable(found) else _call(found, name)
    if isinstance(makes, Agent):
        return makes
    hint = "; put @agent above it, and it is one" if _is_act(found) else ""
    raise UsageError(
        f"{name} is {_described(found)}{_gave(found, makes)}, not an agent: name an Agent, its class, or "
        f"a function without arguments that makes one{hint}"
    )


def load_env(name: str) -> Callable[[], Environment[Any]]:
    """A factory of the environment called `name`: each episode gets an instance of its own."""
    found = load_named(name)
    wanted = "name an Environment class, or a function without arguments that makes an instance"
    if isinstance(found, Environment):
        raise UsageError(
            f"{name} is one instance of {type(found).__qualname__}, and an instance lives for one episode: {wanted}"
        )
    made = _call(found, name) if callable(found) else found
    if not isinstance(made, Environment):
        raise UsageError(f"{name} is {_described(found)}{_gave(found, made)}, not an environment: {wanted}")
    asyncio.run(made.close())
    return cast(Callable[[], Environment[Any]], found)


def load_tasks(source: str | Sequence[Any], row: str | None = None, count: int | None = None) -> Taskset:
    """The tasks that `source` names or lists, or the first `count` of them."""
    to_task = _function(row) if row is not None else None
    try:
        tasks = _tasks(source, to_task, count)
    except BadTasks as error:
        raise UsageError(f"tasks: {error}") from error
    if not len(tasks):
        raise UsageError(f"{source if isinstance(source, str) else 'the list of tasks'} holds no tasks")
    return tasks


def _tasks(source: str | Sequence[Any], row: Callable[[Any], Any] | None, count: int | None) -> Taskset:
    if not isinstance(source, str):
        return Taskset(source, row=row, size=count)
    if source.endswith(TASK_FILES):
        return Taskset.load(source, row=row, size=count)
    found: Any = load_named(source)
    if callable(found) and not isinstance(found, Taskset | TaskStream) and not _required(found):
        found = found()
    if isinstance(found, Taskset | TaskStream):
        if row is not None:
            raise UsageError(f"{source} gives tasks already; leave task_row out")
        if isinstance(found, TaskStream) and count is None:
            raise UsageError(f"{source} is a stream of tasks without end: set count")
        return found.take(count) if isinstance(found, TaskStream) and count is not None else _first(found, count)
    if inspect.iscoroutine(found):
        found.close()
        raise UsageError(f"{source} is async; tasks are made by a plain function")
    return Taskset(found, row=row, size=count)


def _first(tasks: Any, count: int | None) -> Taskset:
    if count is not None and count > len(tasks):
        raise UsageError(f"count is {count}, but there are {len(tasks)} tasks")
    return tasks if count is None else tasks[:count]


def _function(name: str) -> Callable[[Any], Any]:
    found = load_named(name)
    if not callable(found):
        raise UsageError(f"{name} is {_described(found)}, not a function from a row to a task")
    return found


def _call(thing: Any, name: str) -> Any:
    needed = _required(thing)
    if needed:
        raise UsageError(
            f"{name} is {_described(thing)} that needs {', '.join(needed)}: name a function without "
            "arguments that makes it"
        )
    if inspect.iscoroutinefunction(thing):
        raise UsageError(f"{name} is async; name a plain function")
    return thing()


def _required(thing: Any) -> list[str]:
    """Parameters that a call must give; none where that can't be told."""
    try:
        parameters = inspect.signature(thing).parameters.values()
    except (TypeError, ValueError):
        return []
    return [p.name for p in parameters if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]


def _is_act(thing: Any) -> bool:
    return inspect.isasyncgenfunction(thing)


def _described(thing: Any) -> str:
    if isinstance(thing, type):
        return f"the class {thing.__qualname__}"
    if inspect.isroutine(thing):
        return f"the function {thing.__qualname__}"
    if inspect.ismodule(thing):
        return "a module"
    return f"an object of type {type(thing).__qualname__}"


def _gave(found: Any, made: Any) -> str:
    if found is made or isinstance(found, type):
        return ""
    return f", which gave {_described(made)}"
