"""OpenEnvironment: a client of OpenEnv's WebSocket protocol that doesn't need OpenEnv's package.

OpenEnv (https://github.com/meta-pytorch/OpenEnv) serves environments at `/ws`: `reset`, `step`, `state` and `close`
with plain objects, answered by an observation, a reward and `done`. Its messages have no numbers, so a broken
connection ends the episode. It has no flag for truncation, so `done` is always `terminated`.
"""

from __future__ import annotations

import contextlib
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, JsonValue, TypeAdapter, ValidationError
from pydantic_core import to_json

from ...tapes.records import Task
from ...tapes.steps import Action, Observation
from ..environment import Environment, Outcome
from .channel import Channel, Dropped, Full, Line
from .declared import brief
from .remote_errors import BadAnswer, Refused, RemoteFault, SessionLost

ROUTE = "/ws"


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

    type: Literal["observation"]
    data: Seen


class ErrorMessage(BaseModel):
    """An error, as the answer to any message."""

    type: Literal["error"]
    data: Problem


_answers: TypeAdapter[SeenMessage | ErrorMessage] = TypeAdapter(
    Annotated[SeenMessage | ErrorMessage, Field(discriminator="type")]
)


class OpenEnvironment(Environment[Action]):
    """`OpenEnvironment("http://host:port", action=Echo, observation=Echoed)`: one episode on that server.

    Without your own classes, actions are `OpenEnvAction(data={...})` and observations `OpenEnvObservation`. A task is
    None, an int (the seed) or a dict (arguments of `reset`); public and private parts of a `Task` are merged. If the
    task has no seed, it is drawn from `self.rng`. Set `effect` to the effect of its actions on the outside world.
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
        """action, observation: your classes, with the environment's fields. The other parameters are as in
        `RemoteEnvironment`."""
        self._line = Line(url, key_variable=key_variable, seconds=seconds, patience=patience, largest=largest)
        self.url = self._line.url
        self.action, self.observation = action, observation

    async def reset(self, task: JsonValue | Task) -> Observation:
        """Connect, and begin an episode."""
        data = _arguments(task)
        if "seed" not in data and getattr(self, "rng", None) is not None:
            data["seed"] = self.rng.getrandbits(31)
        message = to_json({"type": "reset", "data": data}).decode()
        self._line.channel, seen = await self._line.patiently(lambda: self._begun(message))
        return self._shown(seen)

    async def step(self, action: Action) -> Outcome:
        """Send the action."""
        if type(action) is not self.action:
            raise TypeError(f"{self.url} accepts {self.action.__qualname__}, not {type(action).__qualname__}")
        if self._line.channel is None:
            raise SessionLost(f"{self.url}: there is no episode; call `reset` first")
        data = action.data if isinstance(action, OpenEnvAction) else action.model_dump(mode="json")
        try:
            await self._line.channel.send(to_json({"type": "step", "data": data}, inf_nan_mode="strings").decode())
            seen = await self._answer(self._line.channel, "step")
        except BaseException as error:
            await self._line.hang_up(goodbye=False)  # without numbers, a late answer would be read as the next call's
            if isinstance(error, Dropped):
                raise SessionLost(f"{error}; OpenEnv's protocol can't resume an episode") from error
            raise
        reward = float(seen.reward) if seen.reward is not None else None
        # An empty object at the end stands for no observation.
        observation = self._shown(seen) if seen.observation or not seen.done else None
        return Outcome(observation, reward=reward, terminated=seen.done)

    async def close(self) -> None:
        """Send `close` and disconnect. A lost connection is no error here: the server closes the episode itself."""
        if self._line.channel is not None:
            with contextlib.suppress(Dropped):
                await self._line.channel.send('{"type":"close"}')
        await self._line.hang_up()

    async def _begun(self, message: str) -> tuple[Channel, Seen]:
        channel = await self._line.open(ROUTE)
        try:
            with contextlib.suppress(Dropped):  # a full server sends its error before any call and disconnects
                await channel.send(message)
            return channel, await self._answer(channel, "reset")
        except BaseException:
            await channel.close(goodbye=False)
            raise

    async def _answer(self, channel: Channel, method: str) -> Seen:
        text = await self._line.answer(channel, method)
        try:
            answer = _answers.validate_json(text)
        except ValidationError as error:
            raise BadAnswer(f"{self.url}: not a valid OpenEnv answer to `{method}`: {brief(error)}") from error
        if isinstance(answer, ErrorMessage):
            raise self._error(answer.data)
        return answer.data

    def _error(self, problem: Problem) -> Exception:
        message = f"{self.url}: {problem.message[:2000]} ({problem.code[:80]})"
        if problem.code == "CAPACITY_REACHED":
            return Full(message, None)
        if problem.code in ("VALIDATION_ERROR", "UNKNOWN_TYPE", "INVALID_JSON"):
            return Refused(message)
        return RemoteFault(message)

    def _shown(self, seen: Seen) -> Observation:
        content = {"data": seen.observation} if self.observation is OpenEnvObservation else seen.observation
        try:
            return self.observation.model_validate(content)
        except ValidationError as error:
            raise BadAnswer(f"{self.url}: invalid {self.observation.__qualname__}: {brief(error)}") from error


def _arguments(task: Any) -> dict[str, Any]:
    """The arguments of the remote `reset`. TypeError if the task has another form."""
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
