"""The question of a task, for environments that show the task themselves: `ToolEnvironment` and `TRLEnvironment`.

A string is the question, and so are chat messages. In a mapping, one of the keys `QUESTIONS` holds it. Everything else
is refused, except in a public part: all of it may be read, so it is shown as JSON. `agents.setup` refuses tasks before
the first episode.
"""

from __future__ import annotations

from collections.abc import Sequence

from pydantic_core import to_json

from ..tapes import Message, Task
from ..tapes.errors import BadArgument
from ..tapes.records import answer_key
from ..tapes.steps import content_parts
from .taskset import SHOWN

QUESTIONS = ("prompt", "question", "problem", "input", "messages")
"""Keys under which a mapping may hold its question. The first one with a value counts."""
Question = str | list[Message]


def question_key(part: object) -> str | None:
    """Return the key that holds the question, or None."""
    return next((k for k in QUESTIONS if part.get(k) is not None), None) if isinstance(part, dict) else None


def question_part(task: Task) -> tuple[object, bool]:
    """Return (the part of the task in which the question is, whether it is the public part)."""
    public = not task.bare or task.public is not None
    return task.filled(task.public if public else task.private), public


def question(part: object, public: bool = False) -> Question:
    """Return the question in a part of a task. Raises BadArgument if there is none."""
    key, asked = question_key(part), part
    if isinstance(part, dict) and key is not None:
        more = part.keys() - {key, *SHOWN}
        # The user has made these values public, so the model reads them too.
        whole = public and more and isinstance(part[key], str) and not any(part.get(name) for name in SHOWN)
        asked = part if whole else part[key]
    if isinstance(asked, Sequence) and asked and all(is_message(one) for one in asked):
        return [dict(one) for one in asked]
    empty = asked in (None, []) or (isinstance(asked, dict) and all(value is None for value in asked.values()))
    if public and not empty and not isinstance(asked, str):
        return to_json(asked).decode()
    if isinstance(asked, str) and asked.strip():
        return asked
    what = "a task without a public part" if public and part is None else f"{asked!r:.80}"
    raise BadArgument(
        f"{what} has no question for the model: pass text, chat messages with `role` and `content`, a dict with one of "
        f"the keys {', '.join(QUESTIONS)}, or Task(public=...); or override `prompt`"
    )


def as_messages(asked: Question) -> list[Message]:
    """Return the question as chat messages."""
    return [{"role": "user", "content": asked}] if isinstance(asked, str) else list(asked)


def taken(part: object) -> str | None:
    """Return a sentence that says which key of a plain dict the model reads. None if the task has no keys."""
    key = question_key(part)
    if not isinstance(part, dict) or key is None:
        return None
    read = [key, *(name for name in SHOWN if part.get(name))]
    hidden = [f"{name!r}{' (the answer)' * (name == answer_key(part))}" for name in part if name not in read]
    never = f", and never {', '.join(hidden)}" if hidden else ""
    return f"the model reads {' and '.join(map(repr, read))} of each task{never}"


def is_message(message: object) -> bool:
    """Return whether a value is a chat message: a mapping with `role`, and text, parts or tool calls as its content."""
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        return False
    return isinstance(message.get("content"), str) or bool(content_parts(message) or message.get("tool_calls"))
