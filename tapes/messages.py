"""Converts the steps of a tape, incrementally, to the chat messages that a model reads.

A message's role depends on the agent that reads it. The agent's own answers have the role `assistant`, tool results
have the role `tool`, and everything else has the role `user`, whether it comes from the environment or from another
agent. A model's answer is shown as it was sampled, not as it was parsed. So the next prompt begins with the sampled
tokens, and the next call can continue the same training row.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import overload

from pydantic_core import to_json

from .errors import BadArgument, short_repr
from .pictures import RECORDED, Picture, Video, Visual
from .records import Call, Message
from .steps import PLACES, Prompt, Step, Thought, ToolCalls, ToolResults, content_parts, parts_of

ENV = "env"
FRAME_TIME = "<{:.1f} seconds>"
"""The text before each frame of a video, as Qwen3-VL's processor writes it."""


class Messages(Sequence[Message]):
    """The messages of a request: a fixed head, such as a system prompt, and the first n messages of a conversation.

    A conversation is one list, to which messages are only appended, and all views of it share this list. So creating a
    view, or comparing two views of one conversation, takes O(1). A conversation that grows to n messages costs O(n),
    not O(n²). `list(messages)` returns a plain list.
    """

    __slots__ = ("_items", "_n", "head")

    def __init__(self, head: tuple[Message, ...], items: list[Message], n: int) -> None:
        self.head = head
        self._items = items
        self._n = n

    def __len__(self) -> int:
        return len(self.head) + self._n

    @overload
    def __getitem__(self, index: int) -> Message: ...
    @overload
    def __getitem__(self, index: slice) -> list[Message]: ...
    def __getitem__(self, index: int | slice) -> Message | list[Message]:
        head = len(self.head)
        n = head + self._n
        if isinstance(index, slice):
            start, stop, step = index.indices(n)
            if step == 1 and head <= start <= stop:
                return self._items[start - head : stop - head]
            return [*self.head, *self._items[: self._n]][index]
        if index < 0:
            index += n
        if not 0 <= index < n:
            raise IndexError(f"message {index} of {n}")
        return self.head[index] if index < head else self._items[index - head]

    def __iter__(self) -> Iterator[Message]:
        yield from self.head
        for i in range(self._n):
            yield self._items[i]

    def __add__(self, more: Sequence[Message]) -> list[Message]:
        return [*self, *more]

    def __radd__(self, before: Sequence[Message]) -> list[Message]:
        return [*before, *self]

    def __eq__(self, other: object) -> bool:
        if isinstance(other, Messages) and self.grew_from(other):
            return len(self) == len(other)
        return isinstance(other, Sequence) and not isinstance(other, str) and list(self) == list(other)

    __hash__ = None  # type: ignore[assignment]

    def grew_from(self, other: Sequence[Message]) -> bool:
        """Return True if `other` is an earlier view of the same conversation with an equal head. Both views then share
        one list, so its messages aren't compared."""
        return (
            isinstance(other, Messages)
            and other._items is self._items
            and other._n <= self._n
            and (other.head is self.head or other.head == self.head)
        )


ROLES = ("system", "developer", "user", "assistant", "tool")
"""The roles of chat messages."""


def check_messages(messages: object) -> Sequence[Message]:
    """Return the messages of a request. Raises BadArgument for anything but chat messages, and names the message."""
    if isinstance(messages, Messages):
        return messages  # a tape made them
    if not isinstance(messages, list | tuple) or not messages:
        raise BadArgument(f"messages is {short_repr(messages)}: give a list with at least one chat message")
    for k, message in enumerate(messages):
        if not isinstance(message, dict):
            raise BadArgument(f"messages[{k}] is {short_repr(message)}: write {{'role': 'user', 'content': ...}}")
        role, content = message.get("role"), message.get("content")
        if role not in ROLES:
            raise BadArgument(f"messages[{k}]['role'] is {short_repr(role)}: it must be one of {', '.join(ROLES)}")
        parts = isinstance(content, list) and all(isinstance(part, dict) and "type" in part for part in content)
        if not (parts or isinstance(content, str) or (content is None and role == "assistant")):
            wanted = "a str, or a list of parts such as {'type': 'text', 'text': ...}"
            raise BadArgument(f"messages[{k}]['content'] is {short_repr(content)}: it must be {wanted}")
        try:
            to_json(message)
        except ValueError as error:
            raise BadArgument(f"messages[{k}] can't be recorded as JSON: {error}") from error
    return messages


def shared_prefix(a: Sequence[Message], b: Sequence[Message]) -> int:
    """Return the number of leading messages that two conversations share."""
    if isinstance(a, Messages) and a.grew_from(b):
        return len(b)
    if isinstance(b, Messages) and b.grew_from(a):
        return len(a)
    n = 0
    for x, y in zip(a, b, strict=False):
        if x is not y and x != y:
            break
        n += 1
    return n


CONVERSATION = "2"
"""The version of the rule by which a conversation follows from the steps of a tape. Tapes record it in `begin`. On a
tape without it, each turn shows its newest call as the agent's answer, whatever the steps were made of."""


class Conversation:
    """The messages that the agent at one path reads. They are extended with each step: after n steps of the tape, there
    are `counts[n]` messages, or -1 if a later step was shown in front of some of them.

    A step that was made of a call is shown as the call's answer, once for all steps of the call. The answer stands
    behind the steps that the call could read. Steps that the agent yielded between the call and the step made of it
    follow the answer, or the results if it called tools.
    """

    __slots__ = ("_answer", "_shown", "counts", "items", "path")

    def __init__(self, path: str) -> None:
        self.path = path
        self.items: list[Message] = []
        self.counts: list[int] = [0]
        self._answer = 0
        """The index behind the newest answer."""
        self._shown: set[str] = set()
        """The calls whose answers are shown."""

    def add(self, step: Step, by: str, made_of: tuple[Call, int] | None) -> None:
        """Add the messages of `step`. `made_of` is the call that the agent made the step of, and the number of steps
        that the call could read. None if the agent wrote the step itself, or if it isn't the agent's."""
        said_back = by == self.path and isinstance(step, Thought) and step.said_back
        if by != self.path:
            # Nothing may stand between an answer with tool calls and the results.
            called = isinstance(step, ToolResults) or (self._answer and "tool_calls" in self.items[self._answer - 1])
            self._put(heard(step), self._answer if by == ENV and called else len(self.items))
        elif made_of is not None:
            call, read = made_of
            if call.call not in self._shown:
                self._shown.add(call.call)
                at = max(self._answer, self.counts[read]) if self.counts[read] >= 0 else len(self.items)
                self._put([call.reply], at)
                self._answer = at + 1
        elif not said_back:
            self.items.append(said(step))
            if isinstance(step, ToolCalls):
                self._answer = len(self.items)
        if said_back:
            self.items.append({"role": "user", "content": content_of(parts_of(step))})
        self.counts.append(len(self.items))

    def _put(self, messages: list[Message], at: int) -> None:
        """Insert messages at an index. Views of the conversation so far keep the old list."""
        if at == len(self.items):
            self.items.extend(messages)
        elif messages:
            self.items = [*self.items[:at], *messages, *self.items[at:]]
            self.counts = [n if n <= at else -1 for n in self.counts]


def heard(step: Step) -> list[Message]:
    """Return the messages in which a model reads a step that came from the environment or from another agent."""
    if isinstance(step, Prompt):
        return _with_pictures(step.messages, step.pictures)
    if isinstance(step, ToolResults):
        return [
            {
                "role": "tool",
                "tool_call_id": result.id,
                "name": result.name,
                "content": content_of((result.content, *result.pictures)),
            }
            for result in step.results
        ]
    return [{"role": "user", "content": content_of(parts_of(step))}]


def content_of(parts: Sequence[str | Visual]) -> str | list[Message]:
    """Return strings, pictures and videos as the content of a message. The content is a string if the only part is a
    string, and otherwise a list of content parts. The content part for a picture names the picture's file."""
    if len(parts) == 1 and isinstance(parts[0], str):
        return parts[0]
    return [{"type": "text", "text": part} if isinstance(part, str) else part_of(part) for part in parts if part != ""]


def text_of(message: Message) -> str:
    """Return the content of a message as one string, with each picture written as `[picture 80x60 a1bb0e2e75a7]`."""
    content = message.get("content")
    if isinstance(content, str):
        return content
    return "\n".join(
        str(video_in(part) or part.get("text", f"[{part.get('type')}]"))
        if "media" not in part
        else f"[picture {part.get('width')}x{part.get('height')} {str(part['media'])[:12]}]"
        for part in content_parts(message)
    )


def frames_of(messages: Sequence[Message]) -> list[Message]:
    """Return the messages for a model that reads pictures but no videos. Each frame of a video becomes a text with its
    time, then a picture."""
    return [
        {**message, "content": [one for part in content_parts(message) for one in _unfolded(part)]}
        if any(part.get("type") == "video" for part in content_parts(message))
        else message
        for message in messages
    ]


def visual_parts(messages: Sequence[Message]) -> list[Message]:
    """Return the content parts that show a picture or video, in the order of the messages."""
    parts = (part for message in messages for part in content_parts(message))
    return [part for part in parts if part.get("type") == "image" or video_in(part) is not None]


def image_parts(messages: Sequence[Message]) -> list[Message]:
    """Return the content parts that show a picture or a frame of a video, in the order of the messages."""
    return visual_parts(frames_of(messages))


def image_of(picture: Picture) -> Message:
    """Return the content part that shows the picture. It names the picture's file."""
    return {"type": "image", "media": picture.name, "width": picture.width, "height": picture.height}


def part_of(shown: Visual) -> Message:
    """Return the content part that shows the picture or video."""
    if isinstance(shown, Picture):
        return image_of(shown)
    frames = [{"media": frame.name, "width": frame.width, "height": frame.height} for frame in shown.frames]
    return {"type": "video", "frames": frames, "fps": shown.fps, "indices": list(shown.indices)}


def video_in(part: Message) -> Video | None:
    """Return the video that a content part shows, without its bytes, or None if the part shows no video."""
    if part.get("type") != "video" or "frames" not in part:
        return None
    try:
        frames = [{**frame, "media": f"media:{frame['media']}"} for frame in part["frames"]]
        video = {name: value for name, value in part.items() if name != "type"}
        return Video.model_validate({**video, "frames": frames}, context=RECORDED)
    except (TypeError, KeyError, ValueError):  # a part that only looks like a video
        return None


def _unfolded(part: Message) -> list[Message]:
    """Return the text and image parts that replace a video's part. Any other part is returned unchanged in a list."""
    video = video_in(part)
    if video is None:
        return [part]
    shown = zip(video.times, video.frames, strict=True)
    return [one for s, frame in shown for one in ({"type": "text", "text": FRAME_TIME.format(s)}, image_of(frame))]


def _with_pictures(messages: Sequence[Message], pictures: Sequence[Visual]) -> list[Message]:
    """Return the messages with each placeholder, such as `{"type": "image"}`, replaced by the next picture or video."""
    left = iter(pictures)
    return [
        {**message, "content": [part_of(next(left)) if part in PLACES else part for part in message["content"]]}
        if pictures and content_parts(message)
        else dict(message)
        for message in messages
    ]


def said(step: Step) -> Message:
    """Return the message for a step that the agent made without a model call, as if a model had written the step."""
    if isinstance(step, ToolCalls):
        return {
            "role": "assistant",
            "content": "",
            "tool_calls": [
                {"id": c.id, "type": "function", "function": {"name": c.name, "arguments": json.dumps(c.arguments)}}
                for c in step.calls
            ],
        }
    return {"role": "assistant", "content": str(step)}
