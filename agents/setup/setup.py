"""The agent, the environment and the tasks of a run, as names in a configuration or as Python objects.

A name is `package.module:name` or `file.py:name`. Loading a name runs the user's code, as an import does. `run`,
`train` and `evaluate` use `Setup.resolve`, which accepts names and objects. It also returns the settings that are
recorded in the run's `config.yaml`.
"""

from __future__ import annotations

import asyncio
import inspect
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import reduce
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple, Self, cast

from pydantic import Field, JsonValue

from ...envs.adapters.tools import ToolEnvironment, unscored
from ...envs.blocking import CallThread
from ...envs.environment import AnyEnvironment, Environment, EnvironmentFactory, first_use
from ...envs.load_named import load_function, load_named, not_loaded, raised
from ...envs.rewards import load_rewards, rewarded
from ...envs.taskset import TASK_FILES, BadTasks, Taskset, hub_tasks, standard_row
from ...tapes.common.config import Config
from ...tapes.common.run_async import run_async
from ...tapes.common.text import counted, logger
from ...tapes.errors import BadArgument, TapereelError, UsageError
from ...tapes.records import Task
from ..episode.agent import Agent, FunctionAgent
from .code_digest import code_digests
from .on_config import On

if TYPE_CHECKING:
    from ...envs.remote.pool import Pool

log = logger("tasks")

UNNAMED = "<object "
"""Prefix of the name that is recorded for an object that can't be imported by name."""
LOAD_SECONDS = 60.0
"""When an environment is loaded, one instance is created and closed as a check. This is the time limit in seconds for
its creation, and without `environment_seconds` for its `close`."""
LISTED = 100
"""A list of up to this many plain values is recorded as it is. For a longer list, a digest is recorded."""

AgentSource = Annotated[
    str | Agent | type[Agent] | Callable[[], Agent], "an Agent, its class, a function that makes one, or 'module:name'"
]
EnvSource = str | EnvironmentFactory
"""An environment class, a function without arguments that creates an instance, or the name of one of these."""
TasksSource = Annotated[
    str | Iterable[Any] | Callable[[], Iterable[Any]],
    "an iterable of tasks or plain values, a function that returns one, a file, or 'module:name'",
]


@dataclass(frozen=True)
class LoadedSetup:
    """The objects that a `Setup` names. `env` creates one environment per episode."""

    agent: Agent
    env: EnvironmentFactory
    pool: Pool | None = field(default=None, kw_only=True)
    tasks: Taskset
    sample: AnyEnvironment = field(kw_only=True)
    """An instance that is already closed."""
    held_out: Taskset | None = field(default=None, kw_only=True)
    """Held-out tasks that Python code passed."""
    unscored: str | None = field(default=None, kw_only=True)
    """Name of the environment's class, if it is known that nothing scores its episodes."""
    code: dict[str, str] = field(default_factory=dict[str, str], kw_only=True)
    """Digests of the user's code (`code_digests`)."""
    sources: tuple[AgentSource, EnvSource] = field(kw_only=True)
    """The agent and the environment, each as an object or a name, for another process to load."""

    @property
    def tools(self) -> bool:
        """Whether the environment is known to offer tools."""
        return isinstance(self.sample, ToolEnvironment)

    @property
    def shows(self) -> str | None:
        """A sentence that names a task or the environment that shows pictures. None if neither is known to show any."""
        name = type(self.sample).__name__
        return f"the environment {name} shows pictures" if self.sample.pixels else shown_by(self.tasks)

    def check_tasks(self, tasks: Iterable[Task]) -> None:
        """Raise UsageError for a task that no episode can begin with. Log once what is taken from the tasks."""
        said: dict[str | None, None] = {}
        for k, task in enumerate(tasks):
            try:
                said[self.sample.check_task(task)] = None
            except (TypeError, ValueError, TapereelError) as error:
                raise UsageError(f"task {k} {f'({task.id}) ' * bool(task.id)}can't be used: {error}") from error
        for sentence in list(filter(None, said))[:3]:  # rows of many forms fill no screen
            log.warning(f"tasks: {sentence}")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        """End the processes of `env_processes`, if there are any."""
        if self.pool is not None:
            self.pool.close()


class LoadedScene(NamedTuple):
    """The agent and the environment that a `Setup` names. `env` creates one environment per episode."""

    agent: Agent
    env: EnvironmentFactory
    sample: AnyEnvironment
    """An instance that is already closed."""
    pool: Pool | None
    unscored: str | None
    """The same as `LoadedSetup.unscored`."""
    code: dict[str, str]
    """The same as `LoadedSetup.code`."""


class DatasetConfig(Config):
    """How rows of files and datasets become tasks."""

    split: str = "train"
    """The split that is read from a dataset."""
    config: str | None = None
    """The subset of a dataset. None means the only subset, or the subset called `default` or `main`."""
    columns: dict[str, str] = Field(default={})
    """The dataset's column for each new name, such as `{prompt: question, answer: answer}`. The new column `prompt` is
    the public part of the task, and holds a string or chat messages. All other new columns are the private part. If
    `columns` is empty, each row is a plain value, and `reset` gets the dict."""


class TasksConfig(Config):
    """Tasks, given by name, by file or as a list."""

    tasks: str | tuple[JsonValue, ...] | None = None
    """The tasks, as a list or by name. A name is one of `module:name` (tasks, or a function that returns them), a
    JSONL, JSON, Parquet or CSV file, a folder with a dataset, and `org/name` or `org/name@revision` on the Hugging Face
    hub. None means that Python code passes the tasks, or that there are no tasks of this kind."""
    dataset: DatasetConfig = DatasetConfig()
    """How rows of files and datasets become tasks."""
    task_row: str | None = None
    """`module:name` of a function that turns one row of a file or list into a task. If it is None, the row is a plain
    value."""


class SeedConfig(Config):
    """The seed of a run."""

    seed: int = 0
    """Seed for sampling, environments and training."""


class Setup(TasksConfig, SeedConfig):
    """The agent, the environment, the tasks and the seed of a run."""

    agent: str | None = None
    """`module:name` of an Agent instance, a class, or a function without arguments that creates an agent. None means
    that Python code passes the object."""
    env: str | None = None
    """`module:name` of an Environment class, or of a function without arguments that creates an instance. None means
    that Python code passes the object."""
    env_processes: int | None = Field(default=None, ge=1)
    """Number of processes for the environments. Each process runs one episode at a time, and further episodes wait.
    None means that environments run in this process. In that case, an environment that exits ends the run, and an
    environment that computes without awaiting blocks the run."""
    on: On = None
    """Where episodes run. None means this process. `ray` starts Ray on this machine, and `ray:ADDRESS` takes a running
    cluster. A mapping has further settings, such as {cpus: 4}."""
    count: int | None = Field(default=None, ge=1)
    """Number of tasks to use, starting with the first. None means all tasks."""
    rewards: tuple[str, ...] = ()
    """Sources that score each episode at its end, in addition to the environment. Each is the address of an HTTP
    reward model, a `.py` file with a `reward_func`, or the `module:name` of a Rewards, a RewardSource or a function
    from a tape to its score."""

    @property
    def environment_seconds(self) -> float:
        """The limit for a call to the environment, in seconds."""
        return LOAD_SECONDS

    def resolve(
        self,
        *,
        agent: AgentSource | None = None,
        env: EnvSource | None = None,
        tasks: TasksSource | None = None,
    ) -> tuple[Self, LoadedSetup]:
        """Load the objects. Return (the configuration to record, the objects).

        Each argument is an object or a name, and replaces a setting that is None. The recorded configuration has the
        name `module:qualname` for an object if importing this name returns the same object. Otherwise, it has
        `<object of module.Class>`. Raises UsageError if a setting and its argument differ.
        """
        scene = self.scene(agent=agent, env=env, pooled=self.on is None)
        source, name = self._source("tasks", tasks)
        made_tasks = load_tasks(source, self.task_row, self.count, dataset=self.dataset, name=name)
        names = {
            "agent": self._recorded("agent", agent, _name_of),
            "env": self._recorded("env", env, _name_of),
            "tasks": self._recorded("tasks", tasks, lambda thing: name_of_tasks(thing, made_tasks)),
        }
        loaded = LoadedSetup(
            scene.agent,
            scene.env,
            made_tasks,
            pool=scene.pool,
            sample=scene.sample,
            unscored=scene.unscored,
            code=scene.code,
            sources=(self._source("agent", agent)[0], self._source("env", env)[0]),
        )
        loaded.check_tasks(made_tasks)
        return self.model_copy(update=names), loaded

    def scene(self, *, agent: AgentSource | None, env: EnvSource | None, pooled: bool = True) -> LoadedScene:
        """Load the agent and the environment with its rewards. The arguments are as in `resolve`. With `pooled`, the
        processes of `env_processes` are started."""
        made_agent = load_agent(*self._source("agent", agent))
        made_env, sample = _loaded_env(*self._source("env", env), self.environment_seconds)
        pool = _pool(made_env, self.env_processes) if pooled and self.env_processes is not None else None
        rewards = load_rewards(self.rewards)
        code = code_digests(made_agent, made_env, sample, sample.rewards, rewards)
        made_env = pool or made_env
        made_env = made_env if rewards is None else rewarded(made_env, rewards)
        unscored_by = type(sample).__name__ if rewards is None and unscored(sample) else None
        return LoadedScene(made_agent, made_env, sample, pool, unscored_by, code)

    def _source(self, key: str, passed: Any) -> tuple[Any, str]:
        """Return (source, name). `source` is the object, or the name or list to load. `name` is for error messages.
        Raises UsageError if there is no source."""
        setting = getattr(self, key)
        source = setting if passed is None else passed
        if source is None:
            raise UsageError(f"{key} is not set: name it as `module:name` in the configuration, or give `{key}=...`")
        if isinstance(source, str):
            return source, source
        return source, f"{key}={_name_of(source)}" if passed is not None else f"the list in `{key}`"

    def _recorded(self, key: str, passed: Any, name_of: Callable[[Any], Any]) -> Any:
        """Return the value of `key` for `config.yaml`. Raises UsageError if the setting and the argument differ."""
        setting = getattr(self, key)
        if passed is None:
            return setting
        name = passed if isinstance(passed, str) else name_of(passed)
        if setting is not None and setting != name:
            raise UsageError(
                f"{key} is {setting!r} in the configuration, and {key}={name} is passed: remove one of them"
            )
        return name


def load_agent(source: AgentSource, name: str | None = None) -> Agent:
    """Return the agent. `source` is an agent, a class or function that creates one, or the name of one of these. A
    class or function then creates one for each episode (`Agent.for_episode`). `name` is the agent's name in error
    messages."""
    name = name or (source if isinstance(source, str) else _name_of(source))
    found = _named(source, "agent")
    # An instance is used as it is. An act function is not called, because only `@agent` makes it an agent (see the
    # hint).
    is_act = inspect.isasyncgenfunction(found)
    made = found if isinstance(found, Agent) or is_act or not callable(found) else _call(found, name)
    if isinstance(made, Agent):
        return made if made is found else made.made_by(cast(Callable[[], Agent], found))
    hint = "; put @agent above it, and it is one" if is_act else ""
    raise UsageError(
        f"{name} is {_described(found)}{_returned(found, made)}, not an agent: name an Agent, its class, or "
        f"a function without arguments that makes one{hint}"
    )


def load_env(source: EnvSource, name: str | None = None) -> EnvironmentFactory:
    """Return the environment's factory. `source` is this factory or its name. Each call of the factory creates an
    instance for one episode.

    `name` is the factory's name in error messages.
    """
    return _loaded_env(source, name)[0]


def _loaded_env(
    source: EnvSource, name: str | None, seconds: float = LOAD_SECONDS
) -> tuple[EnvironmentFactory, Environment]:
    """Return (factory, an instance that is already closed). `seconds` is the limit for closing it."""
    name = name or (source if isinstance(source, str) else _name_of(source))
    found = _named(source, "env")
    wanted = "name an Environment class, or a function without arguments that makes a new instance in each call"
    if isinstance(found, Environment):
        raise UsageError(
            f"{name} is one instance of {type(found).__qualname__}, and an instance lives for one episode: {wanted}, "
            f"as `lambda: {type(found).__qualname__}(...)` does"
        )
    # Create one instance now, so that a wrong factory fails here and not in the first episode.
    made = run_async(_trial(found, name, seconds)) if callable(found) else found
    if not isinstance(made, Environment):
        raise UsageError(f"{name} is {_described(found)}{_returned(found, made)}, not an environment: {wanted}")
    return cast(EnvironmentFactory, found), made


async def _trial(factory: Callable[[], Any], name: str, seconds: float) -> object:
    """Return the value that the factory makes. If it is an environment, close it first, since its `__init__` may have
    opened something.

    The factory has `LOAD_SECONDS` and `close` has `seconds`. They run in a thread that is abandoned then, in case the
    user's code hangs.
    """
    thread, doing, limit = CallThread("tapereel-trial"), f"{name}()", f"{LOAD_SECONDS:g} s"
    try:
        async with asyncio.timeout(LOAD_SECONDS):
            made = await thread.run(_call, factory, name)
        if isinstance(made, Environment):
            doing, limit = f"{type(made).__qualname__}.close", f"{seconds:g} s (limits.environment_seconds)"
            async with asyncio.timeout(seconds):
                await thread.run(lambda: asyncio.run(first_use(made).close()))
        return made
    except TimeoutError as error:
        raise UsageError(f"{name} can't be loaded: {doing} did not return within {limit}") from error
    except (TapereelError, asyncio.CancelledError, KeyboardInterrupt):
        raise
    except BaseException as error:  # from `close`, since `_call` raises only UsageError
        raise UsageError(
            f"{doing} must also work if `reset` failed or never ran, but on a new instance it raised {raised(error)}: "
            "set the attributes that it reads in `__init__`"
        ) from error


def _pool(make: EnvironmentFactory, processes: int) -> Pool:
    """Create a pool without time limits of its own, because the time limits of the episodes apply."""
    try:
        from ...envs.remote.pool import Pool

        return Pool(make, processes=processes, seconds=None, patience=None)
    except (TypeError, ValueError) as error:
        raise UsageError(f"env_processes = {processes}: {error}") from error


def load_tasks(
    source: TasksSource,
    row: str | None = None,
    count: int | None = None,
    *,
    dataset: DatasetConfig | None = None,
    name: str | None = None,
) -> Taskset:
    """Load the tasks from `source`, and return all of them or the first `count`.

    `row` and `dataset` mean the same as `Setup.task_row` and `Setup.dataset`. `name` is used in error messages.
    """
    dataset = dataset or DatasetConfig()
    name = name or (source if isinstance(source, str) else "the list of tasks")
    to_task = load_function(row, "a function from a row to a task") if row is not None else None
    if row is not None and dataset.columns:
        raise UsageError(f"task_row={row} and dataset.columns both say how a row becomes a task: remove one of them")
    if dataset.columns:
        to_task = standard_row(dataset.columns)
    try:
        tasks = _tasks(source, name, to_task, count, dataset)
    except (BadTasks, BadArgument) as error:
        raise UsageError(f"tasks: {error}") from error
    if not len(tasks):
        raise UsageError(f"{name} holds no tasks")
    if tasks.dropped:
        log.warning(f"tasks: {counted(tasks.dropped, 'equal task')} left out; to try each task 3 times, `attempts=3`?")
    return tasks


def _tasks(
    source: Any, name: str, row: Callable[[Any], Any] | None, count: int | None, dataset: DatasetConfig
) -> Taskset:
    if isinstance(source, str) and source.endswith(TASK_FILES):
        return Taskset.load(source, row=row, size=count)
    if isinstance(source, str) and ":" not in source and ("/" in source or Path(source).is_dir()):
        return hub_tasks(source, dataset.split, config=dataset.config, row=row, size=count)
    found: Any = _named(source, "tasks")
    if callable(found) and not isinstance(found, Taskset) and not _required(found):
        found = found()
    if isinstance(found, Taskset):
        if row is not None:
            raise UsageError(f"{name} gives tasks already; leave task_row and dataset.columns out")
        if count is not None and count > len(found):
            raise UsageError(f"count is {count}, but there are {len(found)} tasks")
        return found if count is None else found[:count]
    if inspect.iscoroutine(found):
        found.close()  # otherwise Python warns about a coroutine that was never awaited
        raise UsageError(f"{name} is async; tasks are made by a plain function")
    return Taskset(found, row=row, size=count)


def shown_by(tasks: Iterable[Task]) -> str | None:
    """Return a sentence about the first task that shows a picture, or None if no task does."""
    return next((f"the task {t.id or t.hash[:12]!r} shows {p}" for t in tasks for p in t.shown), None)


def is_unnamed(name: str) -> bool:
    """Return True if a recorded `name` can't be imported, so that Python code must pass the object again."""
    return name.startswith(UNNAMED)


def _named(source: Any, key: str) -> Any:
    """Return the object that `source` names, or `source` itself if it isn't a name. Raises UsageError for a name that
    can't be imported (`is_unnamed`)."""
    if not isinstance(source, str):
        return source
    if is_unnamed(source):
        raise UsageError(
            f"the run's {key} is a Python object, {source}, that can't be imported by name: pass it to "
            f"the Python function, or name one as `module:name` (`{key}=...`)"
        )
    return load_named(source)


def _name_of(thing: Any) -> str:
    """Return `module:qualname` if importing this name returns `thing`, otherwise `<object of module.Class>`."""
    own = thing.function if isinstance(thing, FunctionAgent) else thing
    module, path = getattr(own, "__module__", None), getattr(own, "__qualname__", None)
    if not isinstance(module, str) or not isinstance(path, str):
        return f"{UNNAMED}of {type(thing).__module__}.{type(thing).__qualname__}>"
    # `found` is the object that importing the name returns. It is None, for example, for a function's `<locals>`.
    found = reduce(lambda owner, key: getattr(owner, key, None), path.split("."), sys.modules.get(module))
    # `__main__` is a different module in every process, so a later process can't import this object by that name.
    if module != "__main__" and found is thing:
        return f"{module}:{path}"
    return f"{UNNAMED}{module}.{path}>"


def name_of_tasks(thing: object, tasks: Taskset) -> JsonValue | tuple[JsonValue, ...]:
    """Return the value for the tasks in the recorded configuration. A short list of plain values is recorded itself,
    and anything else by a name.

    The name is the same as from `_name_of`. If it can't be imported, a digest of the tasks is added. Without this
    digest, no error would be raised when a run is resumed with other tasks.
    """
    if (
        isinstance(thing, list | tuple)
        and len(thing) <= LISTED
        and all(type(one) in (str, int, float) for one in thing)
    ):
        return tuple(thing)
    name = _name_of(thing)
    return f"{name[:-1]}, {len(tasks)} tasks, {tasks.digest[:12]}>" if is_unnamed(name) else name


def _call(thing: Any, name: str) -> Any:
    needed = _required(thing)
    if needed:
        raise UsageError(
            f"{name} is {_described(thing)} that needs {', '.join(needed)}: name a function without "
            "arguments that makes it"
        )
    if inspect.iscoroutinefunction(thing):
        raise UsageError(f"{name} is async; name a plain function")
    try:
        return thing()
    except (TapereelError, KeyboardInterrupt):
        raise
    except BaseException as error:
        raise not_loaded(name, error) from error


def _required(thing: Any) -> list[str]:
    """Return the names of the required parameters, or an empty list if the callable has no readable signature."""
    try:
        parameters = inspect.signature(thing).parameters.values()
    except (TypeError, ValueError):
        return []
    return [p.name for p in parameters if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]


def _described(thing: Any) -> str:
    if isinstance(thing, type):
        return f"the class {thing.__qualname__}"
    if inspect.isroutine(thing):
        return f"the function {thing.__qualname__}"
    if inspect.ismodule(thing):
        return "a module"
    return f"an object of type {type(thing).__qualname__}"


def _returned(found: Any, made: Any) -> str:
    if found is made or isinstance(found, type):
        return ""
    return f", which gave {_described(made)}"
