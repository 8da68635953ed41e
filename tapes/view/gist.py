"""The question, the expected answer and the given answer of an episode, for lists of tapes.

A gist is read from a few records of a tape, so a list reads only the tapes that it shows.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from pydantic import JsonValue

from ..records import Begin, StepRecord
from ..schema import parse_record
from ..steps import Step, Unknown
from ..store.index import Place
from ..store.store import Store
from ..transcript import plain, shown
from ..value import Value

LONGEST = 400
"""Maximum number of characters of each part of a gist."""
LOOKED_AT = 4
"""Number of steps, from the end of a tape, among which its last action is looked for."""


class Gist(Value):
    """What an episode was about, in three short strings. A string is None if the tape doesn't have it."""

    question: str | None = None
    """The first observation, or its field `question` or `text`. If there is no observation, this is the public part of
    the task."""
    expected: str | None = None
    """The right answer, which the agent never saw (see `Task.expected`)."""
    given: str | None = None
    """The agent's last action."""


def gist_of(store: Store, tape: str) -> Gist:
    """Return the gist of one tape. Records that can't be read count as missing."""
    begin = next((read for read in _read(store, store.index.places(tape, limit=1)) if isinstance(read, Begin)), None)
    steps = store.index.places(tape, t="step")
    first = next((read for read in _read(store, steps[:1]) if isinstance(read, StepRecord)), None)
    acted = (read for read in _read(store, steps[: -LOOKED_AT - 1 : -1]) if isinstance(read, StepRecord))
    last = next((read for read in acted if read.role == "action"), None)
    task = begin.task if begin is not None else None
    asked = _asked(first.content) if first is not None and first.role == "observation" else None
    return Gist(
        question=_cut(asked if asked is not None or task is None else _text(_question(task.public))),
        expected=_cut(_text(task.expected)) if task is not None else None,
        given=_cut(shown(last.content)) if last is not None else None,
    )


def _read(store: Store, places: Sequence[Place]) -> Iterator[object]:
    for place in places:
        try:
            (body,) = store.bodies([place])
            yield parse_record(body)
        except (ValueError, LookupError, OSError):
            continue  # the transcript shows the record as a hole, with the reason


def _asked(step: Step) -> str:
    """Return the question in an observation: its field `question` or `text` if it has one, or all of it."""
    fields = step.content if isinstance(step, Unknown) else step.__dict__
    named = (fields.get(name) for name in ("question", "text"))
    return next((text for text in named if isinstance(text, str) and text), shown(step))


def _question(public: JsonValue) -> JsonValue:
    return public.get("question", public) if isinstance(public, dict) else public


def _text(value: JsonValue) -> str | None:
    return None if value is None else plain(value)


def _cut(text: str | None) -> str | None:
    return text if text is None or len(text) <= LONGEST else text[: LONGEST - 1] + "\N{HORIZONTAL ELLIPSIS}"
