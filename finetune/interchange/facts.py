"""Validation of the extra object `tapereel` in exported records, and of chat messages.

A record that Tapereel wrote holds the object `tapereel` besides the format's fields. An import doesn't trust that
object: it is validated like every other field.
"""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter

from ...tapes import Cause, Message, Status, Task
from ...tapes.value import Value
from .story import Score

OURS = "tapereel"

_Text = str | None


class Facts(Value):
    """The facts of an episode, as `Story.facts` writes them."""

    tape: str = Field(default="", max_length=200)
    task: Task = Task()
    group: str | None = Field(default=None, max_length=500)
    attempt: int = 0
    split: str = Field(default="train", max_length=200)
    status: Status = Status.FINISHED
    cause: Cause | None = None
    scores: tuple[tuple[str, float, float], ...] = ()

    def known(self) -> dict[str, Any]:
        """The facts as keyword arguments of `Story`."""
        return {
            "id": self.tape,
            "task": self.task,
            "group": self.group,
            "attempt": self.attempt,
            "split": self.split,
            "status": self.status,
            "cause": self.cause,
            "scores": tuple(Score(name=n, value=v, weight=w) for n, v, w in self.scores),
        }


class Function(BaseModel):
    """Name and arguments of a function call."""

    model_config = ConfigDict(extra="allow")
    name: str
    arguments: Any = None


class FunctionCall(BaseModel):
    """One function call in a message."""

    model_config = ConfigDict(extra="allow")
    function: Function


class ChatMessage(BaseModel):
    """The fields of a chat message that a tape requires. Other keys are allowed."""

    model_config = ConfigDict(extra="allow")
    role: str
    content: _Text | list[dict[str, Any]] = None
    tool_calls: list[FunctionCall] | None = None


_conversation: TypeAdapter[list[ChatMessage]] = TypeAdapter(list[ChatMessage])


def conversation(messages: Any) -> list[Message]:
    """Validated chat messages, without their None values except `content`. ValidationError names the wrong message."""
    _conversation.validate_python(messages)
    return [
        {key: value for key, value in message.items() if value is not None or key == "content"} for message in messages
    ]
