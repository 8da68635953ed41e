"""What our own records carry beside a format's fields, under the name `tapereel`, and what chat messages must be. Both
are read back as carefully as the rest.
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
    """Of `Story.facts`."""

    tape: str = Field(default="", max_length=200)
    task: Task = Task()
    group: str | None = Field(default=None, max_length=500)
    attempt: int = 0
    split: str = Field(default="train", max_length=200)
    status: Status = Status.FINISHED
    cause: Cause | None = None
    scores: tuple[tuple[str, float, float], ...] = ()

    def known(self) -> dict[str, Any]:
        """As arguments of a `Story`."""
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
    """The inside of a function call."""

    model_config = ConfigDict(extra="allow")
    name: str
    arguments: Any = None


class FunctionCall(BaseModel):
    """One function call in a message."""

    model_config = ConfigDict(extra="allow")
    function: Function


class ChatMessage(BaseModel):
    """What of a chat message has to be so for a tape to hold it."""

    model_config = ConfigDict(extra="allow")
    role: str
    content: _Text | list[dict[str, Any]] = None
    tool_calls: list[FunctionCall] | None = None


_conversation: TypeAdapter[list[ChatMessage]] = TypeAdapter(list[ChatMessage])


def conversation(messages: Any) -> list[Message]:
    """Chat messages as they are, once they have been looked at. A pydantic ValidationError says which isn't one."""
    _conversation.validate_python(messages)
    return [
        {key: value for key, value in message.items() if value is not None or key == "content"} for message in messages
    ]
