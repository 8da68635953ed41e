"""A client for OpenEnv's WebSocket protocol that doesn't need OpenEnv's package.

OpenEnv (https://github.com/meta-pytorch/OpenEnv) serves environments at `/ws`. It accepts `reset`, `step`, `state` and
`close` with plain objects, and answers with an observation, a reward and `done`. Its messages have no numbers, so a
broken connection ends the episode. The protocol has no flag for truncation, so `done` always means `terminated`. It
also lacks `finish`, `restore` and pictures.
"""

from __future__ import annotations

import contextlib
import dataclasses
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, JsonValue, TypeAdapter, ValidationError
from pydantic_core import to_json

from ...tapes import Tape
from ...tapes.records import Status, Task
from ...tapes.steps import Action, Observation
from ..environment import Environment
from .channel import Channel, Dropped, Full
from .declared import Declared, brief
from .env_protocol import Answer, Call, Fault, Item, ResetCall, Result, StepCall
from .remote_environment import RemoteEnvironment
from .remote_errors import BadAnswer, SessionLost

OPENENV_ROUTE = "/ws"


class OpenEnvObservation(Observation, kind="openenv_observation"):
    """An observation of an OpenEnv environment, unchanged."""

    data: dict[str, JsonValue]

    def __str__(self) -> str:
        values = list(self.data.values())
        return values[0] if len(values) == 1 and isinstance(values[0], str) else to_json(self.data).decode()


class OpenEnvAction(Action, kind="openenv_action"):
    """An action of an OpenEnv environment, sent unchanged."""

    data: dict[str, JsonValue]


class Seen(BaseModel):
    """The `data` of an observation message."""

    model_config = ConfigDict(frozen=True)
    observation: dict[str, JsonValue]
    reward: Annotated[float, Field(allow_inf_nan=False)] | bool | None = None
    done: bool = False


class Problem(BaseModel):
    """The `data` of an error message."""

    model_config = ConfigDict(frozen=True)
    message: str = ""
    code: str = ""


class SeenMessage(BaseModel):
    """The answer to `reset` and `step`."""

    type: Literal["observation"] = "observation"
    data: Seen


class ErrorMessage(BaseModel):
    """An error, which can be the answer to any message."""

    type: Literal["error"] = "error"
    data: Problem


_answers: TypeAdapter[SeenMessage | ErrorMessage] = TypeAdapter(
    Annotated[SeenMessage | ErrorMessage, Field(discriminator="type")]
)


class OpenEnvironment(RemoteEnvironment):
    """One episode on an OpenEnv server: `OpenEnvironment("http://host:port", action=Echo, observation=Echoed)`.

    Without your own classes, actions are `OpenEnvAction(data={...})` and observations are `OpenEnvObservation`. A task
    is None, an int (the seed) or a dict (arguments of `reset`). The public and private parts of a `Task` are merged. If
    the task has no seed, a seed is drawn from `self.rng`. A subclass sets `effect` to the effect of its actions on the
    outside world. Tasks and actions with pictures are refused.
    """

    kinds = (OpenEnvAction, OpenEnvObservation)

    def __init__(
        self,
        url: str,
        *,
        action: type[Action] = OpenEnvAction,
        observation: type[Observation] = OpenEnvObservation,
        key_variable: str | None = None,
        seconds: float = 60.0,
        patience: float = 30.0,
        largest: int = 4 << 20,
    ) -> None:
        """`action` and `observation` are your classes, with the environment's fields. The other parameters are the same
        as in `RemoteEnvironment`."""
        declared = dataclasses.replace(
            Declared.of(type(self)), actions={action.kind: action}, observations={observation.kind: observation}
        )
        super().__init__(url, declared, key_variable=key_variable, seconds=seconds, patience=patience, largest=largest)
        self.action, self.observation = action, observation

    async def finish(self, status: Status) -> None:
        """Do nothing, because OpenEnv's protocol has no final scoring."""

    async def restore(self, task: JsonValue | Task, tape: Tape) -> None:
        """Reset, carry out the tape's actions again and compare each observation."""
        await Environment.restore(self, task, tape)

    async def close(self) -> None:
        """Send `close` and disconnect. A lost connection isn't an error, because the server then closes the episode."""
        self._over = self._over or "it is closed"
        if self._channel is not None:
            with contextlib.suppress(Dropped):
                await self._channel.send('{"type":"close"}')
        await self._hang_up()

    async def _exchange(self, call: Call, text: str) -> Answer:
        if isinstance(call, ResetCall):
            return await super()._exchange(call, text)
        if self._channel is None:
            raise SessionLost(f"{self.url}: there is no episode; call `reset` first")
        try:
            return await self._exchange_once(self._channel, call, text)
        except Dropped as error:
            raise SessionLost(f"{error}; OpenEnv's protocol can't resume an episode") from error

    async def _connected(self) -> Channel:
        return await self._opened(OPENENV_ROUTE, {})

    async def _exchange_once(self, channel: Channel, call: Call, text: str) -> Answer:
        with contextlib.suppress(Dropped):  # a full server sends its error before any call and disconnects
            await channel.send(text)
        received = await self._received(channel, call)
        try:
            answer = _answers.validate_json(received)
        except ValidationError as error:
            raise BadAnswer(f"{self.url}: not a valid OpenEnv answer to `{call.t}`: {brief(error)}") from error
        if isinstance(answer, ErrorMessage):
            return self._fault(call, answer.data)
        seen = answer.data
        # An empty object at the end of an episode means that there is no observation.
        item = self._item(seen.observation) if seen.observation or not seen.done else None
        if isinstance(call, ResetCall):
            return Result(id=call.id, observation=self._item(seen.observation))
        reward = float(seen.reward) if seen.reward is not None else None
        return Result(id=call.id, observation=item, reward=reward, terminated=seen.done)

    def _encoded(self, call: Call) -> str:
        """Return the message for a `reset` or `step`. Raises TypeError if OpenEnv's protocol can't carry the call."""
        if isinstance(call, ResetCall):
            files, data = call.files, _arguments(call.task)
            if "seed" not in data and call.rng is not None:
                data["seed"] = call.rng.made().getrandbits(31)
        elif isinstance(call, StepCall):
            files, content = call.action.files, call.action.content
            data = content["data"] if issubclass(self.action, OpenEnvAction) else content
        else:
            raise TypeError(f"{self.url}: OpenEnv's protocol has no `{call.t}`; use RemoteEnvironment")
        if files:
            raise TypeError(
                f"{self.url}: OpenEnv's protocol can't carry the picture {min(files)}; use RemoteEnvironment"
            )
        return to_json({"type": call.t, "data": data}, inf_nan_mode="strings").decode()

    def _item(self, data: dict[str, JsonValue]) -> Item:
        content: dict[str, JsonValue] = {"data": data} if self.observation is OpenEnvObservation else data
        return Item.model_construct(kind=self.observation.kind, content=content)

    def _fault(self, call: Call, problem: Problem) -> Fault:
        message = f"{problem.message[:2000]} ({problem.code[:80]})"
        if problem.code == "CAPACITY_REACHED":
            raise Full(f"{self.url}: {message}", None)
        if problem.code in ("VALIDATION_ERROR", "UNKNOWN_TYPE", "INVALID_JSON"):
            return Fault(id=call.id, code="refused", message=message)
        return Fault(id=call.id, code="raised", message=f"{self.url}: {message}")


def _arguments(task: Any) -> dict[str, Any]:
    """Return the arguments for the remote `reset`. Raises TypeError if the task has another form."""
    parts = [task.public, task.private] if isinstance(task, Task) else [task]
    data: dict[str, Any] = {}
    for part in parts:
        if isinstance(part, dict):
            data |= part
        elif isinstance(part, int) and not isinstance(part, bool):
            data["seed"] = part
        elif part is not None:
            raise TypeError(
                f"an OpenEnvironment task must be None, an int (seed) or a dict (arguments of reset), not {part!r:.80}"
            )
    return data
