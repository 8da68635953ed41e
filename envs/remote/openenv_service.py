"""Serves Tapereel environments to OpenEnv clients, at `/ws`, `/schema` and `/metadata`.

An action is sent as its fields, plus its `kind` if the environment accepts several kinds; observations likewise.
`reset` takes `seed` (of the environment's generator) and `task`; without a task, the seed draws one of the service's
tasks. The reward is the sum of an outcome's components; the reward of `finish` is added to the last step. `done` is
`terminated` or `truncated`, which OpenEnv's protocol doesn't distinguish. One connection may play several episodes in
turn; each has a fresh environment.
"""

from __future__ import annotations

import asyncio
import functools
import json
import random
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, JsonValue, ValidationError
from pydantic_core import to_json

from ...tapes.common.http_service import web
from ...tapes.records import Status, Task
from ...tapes.steps import Step
from .declared import Declared, brief
from .env_protocol import (
    Call,
    Fault,
    FinishCall,
    Item,
    Led,
    RandomState,
    ResetCall,
    Shown,
    StepCall,
    read_answer,
)
from .env_service import Service, Session
from .openenv import ROUTE
from .remote_errors import BadAnswer


class _Reset(BaseModel):
    model_config = ConfigDict(extra="ignore")
    seed: int | None = Field(default=None, ge=0)
    episode_id: str | None = Field(default=None, max_length=255)
    task: JsonValue = None


class _Asked(BaseModel):
    model_config = ConfigDict(extra="ignore")
    type: str
    data: dict[str, JsonValue] = {}


def add_openenv(service: Service, tasks: Sequence[JsonValue | Task] | None = None) -> Service:
    """Add OpenEnv's routes to a service that does not serve yet, and return it. `tasks`: tasks for a `reset` without
    one."""
    declared = service.declared

    async def schema(request: web.Request) -> web.StreamResponse:
        kinds = {"action": _schema(declared.actions), "observation": _schema(declared.observations)}
        return web.json_response({**kinds, "state": {"type": "object"}})

    async def metadata(request: web.Request) -> web.StreamResponse:
        return web.json_response({"name": declared.name, "description": f"{declared.name}, served by Tapereel"})

    async def serve(request: web.Request) -> web.StreamResponse:
        if service.place() is not None:
            socket = await service.open(request)
            most = service.limits.sessions
            await socket.send_str(_problem("CAPACITY_REACHED", f"all {most} places are taken"))
            await socket.close()
            return socket
        session = service.begin()
        try:
            socket = await service.open(request)
            episodes = _Episodes(service, session, tasks)
            await service.converse(socket, session, functools.partial(episodes.reply, socket))
            return socket
        finally:
            service.end(session)

    service.more_routes += [(ROUTE, serve), ("/schema", schema), ("/metadata", metadata)]
    return service


class _Episodes:
    """The episodes of one connection."""

    def __init__(self, service: Service, session: Session, tasks: Sequence[JsonValue | Task] | None) -> None:
        self._service, self._session, self._tasks = service, session, tasks
        self._declared: Declared = service.declared
        self._turn = asyncio.Lock()
        self._begun = False
        self._steps = 0
        self._id: str | None = None

    async def reply(self, socket: web.WebSocketResponse, text: str) -> None:
        """Answer one message; the lock keeps the order of messages."""
        async with self._turn:
            try:
                asked = _Asked.model_validate_json(text)
                if asked.type == "close":
                    await socket.close()
                    return
                answer = await self._answer(asked)
            except ValidationError as error:
                answer = _problem("VALIDATION_ERROR", brief(error))
            except BadAnswer as error:
                answer = _problem("VALIDATION_ERROR", str(error))
            await socket.send_str(answer)

    async def _answer(self, asked: _Asked) -> str:
        if asked.type == "reset":
            return await self._reset(_Reset.model_validate(asked.data))
        if asked.type == "step":
            return await self._step(asked.data)
        if asked.type == "state":
            return to_json({"type": "state", "data": {"episode_id": self._id, "step_count": self._steps}}).decode()
        return _problem("UNKNOWN_TYPE", f"unknown message type {asked.type[:80]!r}")

    async def _reset(self, asked: _Reset) -> str:
        if self._begun:
            await self._session.again(self._service.host_environment())
        self._begun, self._steps, self._id = True, 0, asked.episode_id
        rng = random.Random(asked.seed)
        task = asked.task if asked.task is not None or not self._tasks else rng.choice(self._tasks)
        call = ResetCall(id=1, task=Task.of(task), rng=RandomState.of(rng))
        answer = await self._carried_out(call)
        return _seen(self._declared, answer.observation, None, False) if isinstance(answer, Shown) else _fault(answer)

    async def _step(self, data: dict[str, JsonValue]) -> str:
        actions = self._declared.actions
        fields = dict(data)
        kind = next(iter(actions)) if len(actions) == 1 else fields.pop("kind", None)
        if not isinstance(kind, str):
            return _problem("VALIDATION_ERROR", f"an action needs a `kind`, one of {', '.join(sorted(actions))}")
        if kind in actions and "metadata" not in actions[kind].model_fields:
            fields.pop("metadata", None)  # OpenEnv's clients add it to every action
        answer = await self._carried_out(StepCall(id=1, action=Item(kind=kind, content=fields)))
        if not isinstance(answer, Led):
            return _fault(answer)
        self._steps += 1
        values = _parts(answer)
        done = answer.terminated or answer.truncated
        if done:
            status = Status.FINISHED if answer.terminated else Status.TRUNCATED
            last = await self._carried_out(FinishCall(id=1, status=status))
            if isinstance(last, Fault):
                return _fault(last)
            values += _parts(last) if isinstance(last, Led) else []
        return _seen(self._declared, answer.observation, sum(values) if values else None, done)

    async def _carried_out(self, call: Call) -> Any:
        # OpenEnv's messages have no numbers, and the connection is not resumed.
        answer = read_answer(await self._session.carry_out(call))
        if self._session.dead:
            self._service.end(self._session)
        return answer


def _parts(led: Led) -> list[float]:
    reward = led.reward
    return [] if reward is None else list(reward.values()) if isinstance(reward, dict) else [reward]


def _seen(declared: Declared, item: Item | None, reward: float | None, done: bool) -> str:
    if item is not None and item.files:
        return _problem("EXECUTION_ERROR", f"an observation of the kind {item.kind!r} holds pictures: OpenEnv has none")
    content: dict[str, Any] = dict(item.content) if item is not None else {}
    if item is not None and len(declared.observations) > 1:
        content["kind"] = item.kind
    data = {"observation": content, "reward": reward, "done": done}
    return to_json({"type": "observation", "data": data}, inf_nan_mode="strings").decode()


def _fault(fault: Any) -> str:
    return _problem(
        "VALIDATION_ERROR" if fault.code == "refused" else "EXECUTION_ERROR",
        f"{fault.error}: {fault.message}" if fault.error else fault.message,
    )


def _problem(code: str, message: str) -> str:
    return json.dumps({"type": "error", "data": {"message": message, "code": code}})


def _schema(kinds: Mapping[str, type[Step]]) -> dict[str, Any]:
    schemas = [cls.model_json_schema() for cls in kinds.values()]
    return schemas[0] if len(schemas) == 1 else {"anyOf": schemas}
