"""Serves OpenEnv's protocol: its messages become calls to a `Service`, and the answers become its messages.

Actions and observations are sent as their fields. A field `kind` is added if the environment has several kinds. `reset`
takes `seed` (for the environment's generator) and `task`. Without a task, the seed is used to draw one of the service's
tasks. The reward of a step is the sum of its components. In the last step, it includes the components from `finish`.
`done` means `terminated` or `truncated`, which OpenEnv's protocol doesn't distinguish. One connection may play several
episodes in turn, each with a fresh environment.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, JsonValue, ValidationError
from pydantic_core import to_json

from ...tapes.records import Status, Task
from ...tapes.steps import Step
from .declared import Declared, brief
from .env_protocol import Answer, Call, Fault, FinishCall, Item, RandomState, ResetCall, Result, StepCall
from .openenv import ErrorMessage, Problem, Seen, SeenMessage


class _Reset(BaseModel):
    model_config = ConfigDict(extra="ignore")
    seed: int | None = Field(default=None, ge=0)
    episode_id: str | None = Field(default=None, max_length=255)
    task: JsonValue = None


class _Asked(BaseModel):
    model_config = ConfigDict(extra="ignore")
    type: str
    data: dict[str, JsonValue] = {}


class OpenEnvEpisodes:
    """The episodes on one connection, whose messages `reply` answers."""

    def __init__(
        self,
        declared: Declared,
        tasks: Sequence[JsonValue | Task] | None,
        carry_out: Callable[[Call], Awaitable[Answer]],
        release: Callable[[], Awaitable[None]],
    ) -> None:
        """`carry_out` answers a call. `release` closes the environment, so that the next call gets a new one."""
        self._declared, self._tasks = declared, tasks
        self._carry_out, self._release = carry_out, release
        self._turn = asyncio.Lock()
        self._begun = False
        self._steps = 0
        self._id: str | None = None

    async def reply(self, text: str) -> str | None:
        """Return the answer to one message, or None to end the connection. A lock keeps the messages in order."""
        async with self._turn:
            try:
                asked = _Asked.model_validate_json(text)
                if asked.type == "reset":
                    return await self._reset(_Reset.model_validate(asked.data))
                if asked.type == "step":
                    return await self._step(asked.data)
            except ValidationError as error:
                return problem("VALIDATION_ERROR", brief(error))
            if asked.type == "close":
                return None
            if asked.type == "state":
                return to_json({"type": "state", "data": {"episode_id": self._id, "step_count": self._steps}}).decode()
            return problem("UNKNOWN_TYPE", f"unknown message type {asked.type[:80]!r}")

    async def _reset(self, asked: _Reset) -> str:
        if self._begun:
            await self._release()
        self._begun, self._steps, self._id = True, 0, asked.episode_id
        rng = random.Random(asked.seed)
        task = asked.task if asked.task is not None or not self._tasks else rng.choice(self._tasks)
        answer = await self._carry_out(ResetCall(id=1, task=Task.of(task), rng=RandomState.of(rng)))
        return _fault(answer) if isinstance(answer, Fault) else self._seen(answer.observation, None, False)

    async def _step(self, data: dict[str, JsonValue]) -> str:
        actions = self._declared.actions
        fields = dict(data)
        kind = next(iter(actions)) if len(actions) == 1 else fields.pop("kind", None)
        if not isinstance(kind, str):
            return problem("VALIDATION_ERROR", f"an action needs a `kind`, one of {', '.join(sorted(actions))}")
        if kind in actions and "metadata" not in actions[kind].model_fields:
            fields.pop("metadata", None)  # OpenEnv's clients add it to every action
        answer = await self._carry_out(StepCall(id=1, action=Item(kind=kind, content=fields)))
        if isinstance(answer, Fault):
            return _fault(answer)
        self._steps += 1
        values = _parts(answer)
        done = answer.terminated or answer.truncated
        if done:
            status = Status.FINISHED if answer.terminated else Status.TRUNCATED
            last = await self._carry_out(FinishCall(id=1, status=status))
            if isinstance(last, Fault):
                return _fault(last)
            values += _parts(last)
        return self._seen(answer.observation, sum(values) if values else None, done)

    def _seen(self, item: Item | None, reward: float | None, done: bool) -> str:
        content: dict[str, Any] = {}
        if item is not None:
            if item.files:
                why = f"an observation of the kind {item.kind!r} holds pictures, which OpenEnv's protocol can't carry"
                return problem("EXECUTION_ERROR", why)
            content = dict(item.content)
            if len(self._declared.observations) > 1:
                content["kind"] = item.kind
        seen = Seen.model_construct(observation=content, reward=reward, done=done)
        return to_json(SeenMessage.model_construct(data=seen), inf_nan_mode="strings").decode()


def problem(code: str, message: str) -> str:
    """Return an error message in OpenEnv's protocol."""
    return ErrorMessage(data=Problem(message=message, code=code)).model_dump_json()


def openenv_schema(declared: Declared) -> dict[str, object]:
    """Return the JSON Schemas of the environment's steps in the form that OpenEnv's clients expect."""
    kinds = {"action": _schema(declared.actions), "observation": _schema(declared.observations)}
    return {**kinds, "state": {"type": "object"}}


def _parts(result: Result) -> list[float]:
    reward = result.reward
    return [] if reward is None else list(reward.values()) if isinstance(reward, dict) else [reward]


def _fault(fault: Fault) -> str:
    code = "VALIDATION_ERROR" if fault.code == "refused" else "EXECUTION_ERROR"
    return problem(code, f"{fault.error}: {fault.message}" if fault.error else fault.message)


def _schema(kinds: Mapping[str, type[Step]]) -> dict[str, Any]:
    schemas = [cls.model_json_schema() for cls in kinds.values()]
    return schemas[0] if len(schemas) == 1 else {"anyOf": schemas}
