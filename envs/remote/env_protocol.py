"""The messages between an environment and its remote clients. Each is one JSON object, whose field `t` names its type.

An answer has the same number as its call. A step is sent as its kind and its pydantic dump. The messages travel over a
WebSocket (`env_service.py`) or a pipe (`host.py`). Most of them can also be translated to OpenEnv's protocol
(`openenv_service.py`).

Call     reset | step | finish | restore | close
Answer   result | fault
Greeting welcome, before anything else
"""

from __future__ import annotations

import base64
import operator
import random
import struct
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, JsonValue, TypeAdapter, ValidationError, model_validator
from pydantic_core import to_json

from ...tapes.errors import BadPicture
from ...tapes.pictures import Received, pictures_of
from ...tapes.records import Status, Task
from ...tapes.steps import Action, Observation, Step
from ..environment import Effect, Outcome
from .declared import Declared, brief
from .remote_errors import BadAnswer

PROTOCOL = "tapereel-env.1"
"""The protocol version. Both sides send it, and the versions must be equal."""
ROUTE = "/env"
SESSION = "Tapereel-Session"
"""The header that holds the id of the session to resume."""
Number = Annotated[int, Field(ge=1, le=1 << 53)]
Finite = Annotated[float, Field(strict=True, allow_inf_nan=False)]
_WORDS = 624
_LAYOUT = struct.Struct(f"<{_WORDS}I")  # fixed byte order: otherwise two machines would draw different numbers
MessageT = TypeVar("MessageT")


class Message(BaseModel):
    """Base of all messages, which are frozen and allow no extra fields."""

    model_config = ConfigDict(frozen=True, extra="forbid", ser_json_inf_nan="strings")

    def encoded(self) -> str:
        """Return the message as one line of JSON."""
        return to_json(self, inf_nan_mode="strings").decode()


class Item(Message):
    """One step."""

    kind: str
    content: dict[str, JsonValue]
    files: dict[str, str] = Field(default={}, exclude_if=operator.not_)
    """The PNG of each picture in the step, in base64, by the picture's name. The files count towards the size limit of
    a message. The steps in a `restore` have no files."""

    @classmethod
    def of(cls, step: Action | Observation, *, files: bool = True) -> Item:
        """Convert a step to plain values. Raises BadPicture if the bytes of a picture are missing."""
        sent = files_of(step) if files else {}
        return cls.model_construct(kind=step.kind, content=step.model_dump(mode="json"), files=sent)

    def received(self) -> Received | None:
        """Return the checked files, or None if there are none. Raises BadAnswer if a file doesn't match its name."""
        try:
            return _received(self.files) if self.files else None
        except ValueError as error:
            raise BadAnswer(f"invalid picture in a step of the kind {self.kind[:80]!r}: {error}") from error

    def action(self, declared: Declared) -> Action:
        """Return the step as an action. Raises BadAnswer if it is undeclared or invalid."""
        return declared.action(self.kind, self.content, self.received())

    def observation(self, declared: Declared) -> Observation:
        """Return the step as an observation. Raises BadAnswer if it is undeclared or invalid."""
        return declared.observation(self.kind, self.content, self.received())


def files_of(value: Step | Task) -> dict[str, str]:
    """Return the PNGs of the pictures in `value`, in base64, by name. Raises BadPicture if a picture has no bytes."""
    sent: dict[str, str] = {}
    for picture in pictures_of(value):
        if picture.data is None:
            raise BadPicture(f"{picture} has no bytes: make it again with Picture.of")
        sent[picture.name] = base64.b64encode(picture.data).decode()
    return sent


def _received(files: dict[str, str]) -> Received:
    return Received({name: base64.b64decode(data, validate=True) for name, data in files.items()})


class RandomState(Message):
    """The state of a `random.Random`, so that the remote environment draws the same numbers as a local one."""

    words: str
    """624 unsigned 32-bit words, little-endian, in base64."""
    position: Annotated[int, Field(ge=0, le=_WORDS)]
    gauss: Finite | None = None

    @classmethod
    def of(cls, rng: random.Random) -> RandomState:
        _, (*words, position), gauss = rng.getstate()
        return cls(words=base64.b64encode(_LAYOUT.pack(*words)).decode(), position=position, gauss=gauss)

    def made(self) -> random.Random:
        """Return a generator in this state. Raises ValueError if the state is invalid."""
        rng = random.Random()
        try:
            words = _LAYOUT.unpack(base64.b64decode(self.words, validate=True))
        except struct.error as error:
            raise ValueError(f"the state of a generator has {_WORDS} words: {error}") from error
        rng.setstate((3, (*words, self.position), self.gauss))
        return rng


class Numbered(Message):
    """Base of calls and answers."""

    id: Number
    """The number of the call. Its answer has the same number."""


class _Begins(Numbered):
    """A call that begins an episode. Make it with `files=files_of(task)`."""

    task: Task
    files: dict[str, str] = Field(default={}, exclude_if=operator.not_)
    """The PNG of each picture in the task, in base64, by the picture's name."""

    @model_validator(mode="before")
    @classmethod
    def _read(cls, data: Any) -> Any:
        """Read the task with the bytes of its pictures. Raises ValueError if a file doesn't match its name."""
        if not isinstance(data, dict) or not isinstance(data.get("task"), dict) or not data.get("files"):
            return data
        files = TypeAdapter(dict[str, str]).validate_python(data["files"])
        return {**data, "task": Task.model_validate(data["task"], context=_received(files))}


class ResetCall(_Begins):
    """Begin the episode."""

    t: Literal["reset"] = "reset"
    rng: RandomState | None = None
    """The state of the caller's generator, or None if the caller has no generator."""


class StepCall(Numbered):
    """Carry out an action."""

    t: Literal["step"] = "step"
    action: Item


class FinishCall(Numbered):
    """Compute the final score."""

    t: Literal["finish"] = "finish"
    status: Status


class RestoreCall(_Begins):
    """Bring a fresh environment to the state at the end of a tape."""

    t: Literal["restore"] = "restore"
    rng: RandomState | None = None
    tape: str
    """The id of the tape, for error messages."""
    env_seed: int
    steps: tuple[Item, ...]
    """The observations and actions on the tape, in order. Thoughts, calls and rewards are not sent."""


class CloseCall(Numbered):
    """Release the environment. If another call is running, it is cancelled."""

    t: Literal["close"] = "close"


Call = ResetCall | StepCall | FinishCall | RestoreCall | CloseCall


class Result(Numbered):
    """The call succeeded. The result holds the observation after `reset`, the outcome after `step` or `finish`, and
    nothing after other calls."""

    t: Literal["result"] = "result"
    observation: Item | None = None
    reward: Finite | dict[str, Finite] | None = None
    terminated: bool = False
    truncated: bool = False
    metrics: dict[str, Finite] = {}

    @classmethod
    def of(cls, number: int, outcome: Outcome) -> Result:
        fields = {name: getattr(outcome, name) for name in ("reward", "terminated", "truncated", "metrics")}
        seen = Item.of(outcome.observation) if outcome.observation is not None else None
        return cls.model_construct(id=number, observation=seen, **fields)

    def outcome(self, declared: Declared) -> Outcome:
        """Return the environment's outcome. Raises BadAnswer if its observation is undeclared or invalid."""
        shown = self.observation.observation(declared) if self.observation is not None else None
        return Outcome(shown, self.reward, self.terminated, self.truncated, self.metrics)


class Fault(Message):
    """The call failed."""

    t: Literal["fault"] = "fault"
    id: Annotated[int, Field(ge=0, le=1 << 53)]
    """The number of the call, or 0 if the call could not be read and therefore has no number."""
    code: Literal["raised", "mismatch", "hung", "refused", "lost"]
    """`raised`: the environment raised an exception. `mismatch`: it did not return to the recorded state. `hung`: it
    did not answer in time. `refused`: the call is invalid. `lost`: the environment is gone."""
    error: str = ""
    """The class name of the exception."""
    message: str
    frame: str | None = None
    """Where the exception was raised, as `file:line in function`."""


Answer = Result | Fault


class Welcome(Message):
    """The first message from the serving side."""

    t: Literal["welcome"] = "welcome"
    protocol: str
    session: str
    """The id for resuming the episode after a lost connection. It is the client's secret. Over pipes, it is empty."""
    resumed: bool = False
    name: str
    kinds: dict[str, str]
    """The digests of the declared kinds, as in `Declared.digests`."""
    effect: Effect
    message_bytes: int
    """The longest message that the server accepts, in bytes."""

    @classmethod
    def to(cls, declared: Declared, session: str = "", *, resumed: bool = False, message_bytes: int) -> Welcome:
        """Return the greeting from a server that serves the environment `declared`."""
        return cls(
            protocol=PROTOCOL,
            session=session,
            resumed=resumed,
            name=declared.name,
            kinds=declared.digests,
            effect=declared.effect,
            message_bytes=message_bytes,
        )


_calls: TypeAdapter[Call] = TypeAdapter(Annotated[Call, Field(discriminator="t")])
_answers: TypeAdapter[Answer] = TypeAdapter(Annotated[Answer, Field(discriminator="t")])
_welcome: TypeAdapter[Welcome] = TypeAdapter(Welcome)


def read_call(text: str | bytes) -> Call:
    """Parse a call. Raises BadAnswer if it is invalid."""
    return _parsed(_calls, text, "call")


def read_answer(text: str | bytes) -> Answer:
    """Parse an answer. Raises BadAnswer if it is invalid."""
    return _parsed(_answers, text, "answer")


def read_welcome(text: str | bytes) -> Welcome:
    """Parse a greeting. Raises BadAnswer if it is invalid."""
    return _parsed(_welcome, text, "greeting")


def check_length(call: Call, text: str, most: int, remedy: str) -> None:
    """Raise BadAnswer if `text`, the encoded call, has more than `most` bytes. The error message ends with `remedy`."""
    if len(text) * 4 > most and (size := len(text.encode())) > most:
        raise BadAnswer(f"this `{call.t}` has {size} bytes, and at most {most} are accepted; {remedy}")


def _parsed(adapter: TypeAdapter[MessageT], text: str | bytes, what: str) -> MessageT:
    try:
        return adapter.validate_json(text)
    except ValidationError as error:
        raise BadAnswer(f"the message is not a valid {what} of the protocol {PROTOCOL}: {brief(error)}") from error
