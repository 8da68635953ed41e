"""Adapter for environments of `verifiers` 0.4: `VerifiersEnvironment(load_environment(config))`.

It runs environments in which one agent answers one prompt, with or without tools. The toolsets become tools, and the
task's own rewards, metrics and judges score the episode. Some details differ from verifiers:

1. The agent takes the place of the harness. It sees the prompt and the toolsets' tools, as with the harness `null`. The
   run's limits apply.
2. Toolsets run in this process, one instance per episode, and a turn's calls run one after the other.
3. Hooks that get a `runtime` get the one of type `subprocess`: a new folder on this machine.
4. A reward function that raises is an error of the environment, not a score of 0.

An environment that needs more (several agents, a container, `@stop`, `@intercept`) is refused by name. The package is
imported when it is used.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import json
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

from pydantic_core import to_jsonable_python

from ...tapes import Action, Observation, Status, Tape, Task, ToolCalls
from ...tapes.errors import BadArgument, MissingExtra
from ...tapes.messages import heard, text_of
from ...tapes.records import Message
from ...tapes.steps import ParseError, Prompt
from ..blocking import in_thread
from ..environment import Effect, Outcome
from ..rewards import Rewards, RewardSource, Scored
from ..taskset import BadTasks, Taskset
from .mcp import McpServer
from .tools import Tool, ToolEnvironment
from .trl import as_message, recorded_calls

PUBLIC = ("prompt", "system_prompt")
"""The fields of a task's data that the agent sees. All others are private."""
OVERRIDABLE = ("run", "setup", "finalize", "start")
"""The hooks of an environment that would be skipped here."""


def verifiers_tasks(env: object, *, size: int | None = None) -> Taskset:
    """Return the tasks of `env`, or its first `size` distinct tasks. The prompts are public, all other data private.

    A task's position is part of its name, not of its hash. Raises BadTasks if a task can't be recorded, or if the
    taskset is infinite and `size` is None, and BadArgument if VerifiersEnvironment can't run the environment.
    """
    found = _checked(env)
    if size is None and not found.taskset.bounded:
        raise BadTasks(f"the taskset {found.config.env_id!r} is infinite: pass `size`")

    def tasks() -> Iterator[Task]:
        for task in found.taskset:
            yield _recorded(found, task)

    return Taskset(tasks, size=size, name=found.config.env_id)


class VerifiersEnvironment(ToolEnvironment):
    """An environment of verifiers, for tasks made by `verifiers_tasks`.

    The agent for this environment is `ChatAgent(actions=[ToolCalls], plain=Answer)`. Each reward, metric and judge is a
    component `verifiers/NAME` with its own weight. A metric has the weight 0.
    """

    def __init__(self, env: object, *, effect: Effect = "pure") -> None:
        """`env` is the result of `load_environment`, which all episodes share. `effect` is the effect of its tools.

        Raises MissingExtra without verifiers, and BadArgument if the environment needs more than this adapter has.
        """
        super().__init__((), parallel=1)
        self._env = _checked(env)
        self._declared: Effect = effect
        self.effect = effect
        self.rewards = Rewards([RewardSource(score=self._score, name="verifiers", pure=False)])
        self._task: Any = None
        self._trace: Any = None
        self._runtime: Any = None
        self._status = Status.FINISHED

    async def reset(self, task: object) -> Prompt:
        vf, env = _package(), self._env
        self._task = inner = _restored(env, Task.of(task))
        info = vf.TraceTask(type=type(inner).__name__, data=inner.data, key=inner.key, hash=inner.hash)
        state = _package("state").state_cls(type(inner))()
        self._trace = vf.Trace(task=info, state=state, agent=vf.AgentInfo(config=env.config.agent))
        self._runtime = _package("runtimes").make_runtime(vf.SubprocessConfig(), name=self._trace.id)
        self._runtime.env = dict(inner.runtime_env())
        await self._runtime.start()
        await _package("utils.decorators").invoke(inner.setup, self._hooked)
        own, shared = inner.toolsets(inner.config), env.taskset.toolsets(env.taskset.config)
        for one in (*own, *shared):
            if one.config.url or one.config.runtime.type != "subprocess":
                place = one.config.url or f"the runtime {one.config.runtime.type!r}"
                raise BadArgument(
                    f"the toolset {type(one).__name__} is at {place}; VerifiersEnvironment runs it here only"
                )
        self._sources = [
            _Toolset(functools.partial(_served, one, self._trace, data), name=one.server_name, effect=self._declared)
            for some, data in ((own, inner.data), (shared, None))
            for one in some
        ]
        offer = await super().reset(task)
        system, given = inner.data.system_prompt, inner.data.prompt
        messages = [{"role": "system", "content": system}] if system is not None else []
        messages += [{"role": "user", "content": given}] if isinstance(given, str) else map(_wire, given)
        text = offer.text if isinstance(given, str) else text_of(messages[-1])
        return Prompt(text=text, messages=tuple(messages), tools=offer.tools)

    async def prompt(self, task: Task) -> str:
        return self._task.data.prompt_text

    async def finish(self, status: Status) -> Outcome | None:
        self._status = status
        return await super().finish(status)

    async def close(self) -> None:
        await super().close()
        if self._runtime is not None:
            await self._runtime.stop()

    @property
    def _hooked(self) -> dict[str, Any]:
        return {"trace": self._trace, "runtime": self._runtime}

    async def _score(self, tape: Tape) -> Scored:
        """Score as their rollout does: fill the trace, then call the task's `finalize` and `score`."""
        trace = self._trace
        _fill(trace, tape)
        trace.stop("agent_completed" if self._status is Status.FINISHED else "max_turns")
        await _package("utils.decorators").invoke(self._task.finalize, self._hooked)
        await self._task.score(trace, self._runtime)
        rewards = {name: reward for name, reward in trace.rewards.items() if reward is not None}
        metrics = {
            f"{name}/metric" if name in rewards else name: value
            for name, value in trace.metrics.items()
            if value is not None
        }
        return Scored(
            {name: reward.score for name, reward in rewards.items()} | metrics,
            evidence=to_jsonable_python(trace.info, fallback=str) or None,
            weights={name: reward.weight for name, reward in rewards.items()} | dict.fromkeys(metrics, 0.0),
        )


class _Toolset(McpServer):
    """A toolset, registered by its own code at an MCP server in this process. Its name is the prefix of its tools."""

    def _tool(self, found: Any, session: Any) -> Tool:
        made = super()._tool(found, session)
        return replace(made, name=f"{self.name}_{made.name}") if self.name else made


@asynccontextmanager
async def _served(toolset: Any, trace: Any, data: Any) -> AsyncIterator[Any]:
    """Yield a client of the toolset, whose calls read and write the trace's state as they do over HTTP: a call gets a
    copy, which replaces the state if the call succeeds."""
    # The imports take about a second and would block the event loop.
    mcp, server = [await in_thread(importlib.import_module, name) for name in ("mcp", "mcp.server.mcpserver")]
    synced = toolset._with_state

    async def pull() -> Any:
        return toolset._state_adapter.validate_json(trace.state.model_dump_json())

    async def push(before: bytes) -> None:
        trace.state = type(trace.state).model_validate_json(toolset.state.model_dump_json())

    toolset._pull_state, toolset._push_state = pull, push
    toolset._with_state = lambda function: synced(_unblocked(function))
    async with toolset._exit_stack:
        await toolset.setup()
        if data is not None:
            await toolset.setup_task(data)
        made = server.MCPServer(toolset.server_name or type(toolset).__name__)
        toolset.register(made)
        async with mcp.Client(made) as client:
            yield client


def _unblocked(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that runs in a thread, since it may block. An async function is returned as it is."""
    if inspect.iscoroutinefunction(function):
        return function
    return functools.wraps(function)(lambda *args, **named: in_thread(functools.partial(function, *args, **named)))


def _checked(env: object) -> Any:
    """Return `env`. Raises BadArgument if it isn't an environment of verifiers that this adapter can run."""
    vf = _package()
    base, name = getattr(vf, "SingleAgentEnv", None), type(env).__qualname__
    if base is None or not isinstance(env, base):
        raise BadArgument(
            f"{name} is not a SingleAgentEnv of verifiers 0.4: pass `verifiers.v1.load_environment(config)` for a "
            "taskset with one agent. Older environments, with a `Rubric`, must be ported to a taskset first"
        )
    found: Any = env
    task, config = type(found.taskset).task_type(), found.config
    hooks = {hook: getattr(config.taskset.task, f"{hook}s", ()) for hook in ("stop", "intercept")}
    harness = config.agent.harness
    needs = [
        *(f"its own `{hook}`" for hook in OVERRIDABLE if getattr(type(found), hook) is not getattr(base, hook)),
        *(f"the hook {given!r} (@{hook})" for hook, given in hooks.items() for given in given),
        *(
            f"the hook {key!r} (@{hook})"
            for hook in hooks
            for key, value in inspect.getmembers(task, callable)
            if hasattr(value, hook)
        ),
        *(["a container"] if task.NEEDS_CONTAINER else []),
        *([f"the harness {harness.id!r}"] if harness is not None and harness.id != "null" else []),
    ]
    if needs:
        raise BadArgument(f"{config.env_id} needs {needs[0]}, which VerifiersEnvironment doesn't have")
    return found


def _recorded(env: Any, task: Any) -> Task:
    data, where = task.data, f"task {task.data.idx} of {env.config.env_id}"
    if data.image is not None or data.prompt is None:
        what = "has no prompt" if data.prompt is None else f"needs the container image {data.image!r}"
        raise BadTasks(f"{where} {what}, so VerifiersEnvironment can't run it: leave it out with `exclude`")
    if not isinstance(data.prompt, str) and any(not isinstance(message.content, str | None) for message in data.prompt):
        raise BadTasks(f"{where} has content parts in its prompt; VerifiersEnvironment takes messages of plain text")
    known = data.model_dump(exclude_defaults=True, exclude={"idx"})  # also leaves out roles, so only its keys are used
    fields = {key: value for key, value in data.model_dump(mode="json").items() if key in known}
    public = {key: fields.pop(key) for key in PUBLIC if key in fields}
    found = Task(id=f"{env.config.env_id}/{data.idx}", public=public, private=fields)
    if _restored(env, found).hash != task.hash:
        raise BadTasks(
            f"{where} has data that JSON doesn't keep, so it can't be restored from a tape: use plain fields"
        )
    return found


def _restored(env: Any, task: Task) -> Any:
    """Return the task of verifiers, rebuilt from its recorded data as their own replay does."""
    if not isinstance(task.public, dict) or not isinstance(task.private, dict) or "prompt" not in task.public:
        raise BadArgument(f"task {task.id or task.hash[:12]} was not made by `verifiers_tasks`")
    kind, position = type(env.taskset).task_type(), task.id.rpartition("/")[2]
    data = {**task.public, **task.private, "idx": int(position) if position.isdecimal() else None}
    return kind(kind.data_type().model_validate(data), config=env.taskset.config.task)


def _fill(trace: Any, tape: Tape) -> None:
    """Write the tape's messages and calls to the trace, as one branch."""
    vf, chat = _package(), _package("dialects.chat")
    first = tape[0]
    assert isinstance(first, Prompt)
    messages = [(message, False) for message in first.messages] + _messages(tape)
    for k, (message, sampled) in enumerate(messages):
        node = vf.MessageNode(parent=k - 1 if k else None, message=chat.parse_message(message), sampled=sampled)
        trace.nodes.append(node)
    trace.tools = trace.nodes[0].tools = chat.parse_tools(list(first.tools))
    answers = [k for k, (_, sampled) in enumerate(messages) if sampled]
    calls = [call for call in tape.calls if call.finish in ("stop", "length", "tool_calls")]
    for k, call in zip(answers, calls, strict=False):
        prompt, completion = call.usage.prompt_tokens, call.usage.completion_tokens
        usage = vf.Usage(prompt_tokens=prompt or 0, completion_tokens=completion or 0)
        trace.calls.append(vf.ModelCall(node=k, finish_reason=call.finish, usage=usage))


def _messages(tape: Tape) -> list[tuple[Message, bool]]:
    """Return the chat messages after the prompt, and whether the model wrote each. Thoughts have none."""
    calls, found = {call.call: call for call in recorded_calls(tape)}, list[tuple[Message, bool]]()
    for entry in tape.entries[1:]:
        step, call = entry.step, calls.get(entry.calls[-1][0]) if entry.calls else None
        said = call.text or "" if call is not None else ""
        if isinstance(step, ToolCalls):
            made = [
                {"id": c.id, "type": "function", "function": {"name": c.name, "arguments": json.dumps(c.arguments)}}
                for c in step.calls
            ]
            parsed = call is not None and call.tool_calls  # by the engine, so the text is the rest of the answer
            text: Message = {"role": "assistant", "content": said} if parsed else as_message(said, step.calls)
            found.append(({**text, "content": text["content"] or None, "tool_calls": made}, True))
        elif isinstance(step, ParseError):  # the text that couldn't be read, and the correction
            found += [({"role": "assistant", "content": said}, True), ({"role": "user", "content": str(step)}, False)]
        elif isinstance(step, Action):
            found.append(({"role": "assistant", "content": str(step)}, True))
        elif isinstance(step, Observation):
            found += [(message, False) for message in heard(step)]
    return found


def _wire(message: Any) -> Message:
    return _package("dialects.chat").message_to_wire(message)


def _package(module: str = "") -> Any:
    """Return `verifiers.v1`, or a module in it."""
    try:
        return importlib.import_module(f"verifiers.v1.{module}".rstrip("."))
    except ModuleNotFoundError as error:
        raise MissingExtra("verifiers", "verifiers", "VerifiersEnvironment") from error
