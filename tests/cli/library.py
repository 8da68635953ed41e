"""A run of an agent that asks a library's tools for a number of copies. It is written by hand, so its ids and times
never change. Its episodes end in every way: right, wrong, at a limit, with an error, cancelled, unscored, running."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import numpy as np
from pydantic import JsonValue

import tapereel as tr
from tapereel.tapes import (
    Answer,
    Call,
    Cause,
    CauseType,
    ParseError,
    Status,
    Step,
    Task,
    Text,
    ToolCall,
    ToolCalls,
    ToolOffer,
    ToolResult,
    ToolResults,
)
from tapereel.tapes.arrays import floats, ints
from tapereel.tapes.pictures import pictures_of
from tapereel.tapes.records import Begin, End, Identity, Record, Reward
from tapereel.tapes.steps import role_of
from tapereel.tapes.store import Store
from tapereel.tapes.tape import step_record

BEGAN = 1_795_000_000.0
QUESTION = "How many copies does the library have of {}? Look up the shelf first, then count the copies on it."
HOSTILE = "\x1b[2J\x1b]0;owned\x07[red]</pre><script>alert(1)</script>\u202e漢字\ttab"
RECORDS = [{"title": f"Volume {k}", "shelf": 90 + k, "copies": [k, k + 1]} for k in range(12)]


def ids(n: int) -> list[str]:
    """Ids as `new_tape_id` makes them: several of them begin in the same millisecond."""
    dice = random.Random(7)
    return [f"01a20da95e{0x60 + k // 3:02x}{dice.getrandbits(40):010x}" for k in range(n)]


def calls(*parts: tuple[str, Mapping[str, JsonValue]]) -> ToolCalls:
    """A step with these (name, arguments)."""
    return ToolCalls(calls=tuple(ToolCall(id=str(k), name=n, arguments=dict(a)) for k, (n, a) in enumerate(parts)))


def results(*parts: tuple[str, str], error: bool = False, pictures: Sequence[tr.Picture] = ()) -> ToolResults:
    """A step with these (name, content)."""
    return ToolResults(
        results=tuple(
            ToolResult(id=str(k), name=name, content=text, error=error, pictures=tuple(pictures))
            for k, (name, text) in enumerate(parts)
        )
    )


def picture() -> tr.Picture:
    """A picture of 16 x 12 pixels."""
    return tr.Picture.of(np.arange(16 * 12 * 3, dtype="uint8").reshape(12, 16, 3))


FOUND = (calls(("lookup", {"title": "Dune"})), results(("lookup", "92")))
FRAMES = "Traceback (most recent call last):\n" + "".join(f'  File "library.py", line {k}\n' for k in range(60))


@dataclass(frozen=True)
class Episode:
    """One episode of the run."""

    book: str
    expected: str | None
    steps: Sequence[Step]
    """The steps after the question."""
    reward: float | None = None
    status: Status | None = None
    cause: Cause | None = None


EPISODES = (
    Episode(
        "Dune",
        "86",
        (*FOUND, calls(("count", {"shelf": 92})), results(("count", "86")), Answer(text="86")),
        1.0,
        Status.FINISHED,
    ),
    Episode(
        "Emma",
        "12",
        (
            calls(("count", {"shelf": 166})),
            results(("count", "KeyError: '166'"), error=True),
            ParseError(problem="Your answer has neither a number nor a tool call."),
            Answer(text="I could not find the shelf, so my best guess is that the library has 3 copies of the book."),
        ),
        0.0,
        Status.FINISHED,
    ),
    Episode(
        "Ulysses",
        "7",
        (
            calls(("lookup", {"title": "Ulysses"}), ("lookup", {"title": "Dubliners", "author": "James Joyce"})),
            results(("lookup", "12"), ("lookup", "17")),
            calls(("search", {"text": "Ulysses " * 40})),
            results(("search", json.dumps(RECORDS))),
        ),
        0.25,
        Status.LIMIT,
        Cause(type=CauseType.TURNS, message="the limit is 2 turns"),
    ),
    Episode(
        "Middlemarch",
        "4",
        (calls(("lookup", {"title": "Middlemarch"})), results(("lookup", f"{FRAMES}KeyError: 'shelf 4'"), error=True)),
        None,
        Status.ERROR,
        Cause(type=CauseType.ENVIRONMENT, error="KeyError", message="'shelf 4'", frame="library.py:61 in step"),
    ),
    Episode("Walden", "31", FOUND, None, Status.CANCELLED),
    Episode(
        "the picture",
        None,
        (calls(("look", {})), results(("look", "a shelf"), pictures=[picture()]), Answer(text="9")),
        -0.5,
        Status.FINISHED,
    ),
    Episode(HOSTILE, HOSTILE, (calls((HOSTILE, {HOSTILE: HOSTILE})), Answer(text=HOSTILE)), 1.0, Status.FINISHED),
    Episode("Beowulf", "5", (calls(("lookup", {"title": "Beowulf"})),)),
)


def write_library(path: Path, *, lost: float = 0.0) -> list[str]:
    """Write the run to `path` and return the ids of its tapes. Right answers earn 1 - `lost`."""
    names = ids(len(EPISODES))
    with Store.create(path) as store:
        for k, (name, one) in enumerate(zip(names, EPISODES, strict=True)):
            task = Task(
                id=f"book-{k}",
                public={"book": one.book},
                private=None if one.expected is None else {"answer": one.expected},
            )
            records: list[Record] = [
                Begin(
                    tape=name,
                    task=task,
                    task_hash=task.hash,
                    agent=Identity(name="reader"),
                    env=Identity(name="Library"),
                    env_seed=0,
                    seed=0,
                    group=f"a53ddb2e/rl/{k // 2:06d}",
                    attempt=k % 2,
                    split="eval" if k < 2 else "train",
                    at=BEGAN + k,
                )
            ]
            question = QUESTION.format(one.book)
            asked = Text(text=question) if k % 2 else ToolOffer(text=question, tools=())
            for n, step in enumerate((asked, *one.steps)):
                sampled = role_of(step) != "observation"
                if sampled:
                    records.append(_call(name, n, BEGAN + k))
                used = ((f"{name}.{n}", 0, 4),) if sampled else ()
                records.append(step_record(name, step, by="reader" if sampled else "env", calls=used))
                for shown in pictures_of(step):
                    store.media.put(cast(bytes, shown.data), ".png")
            if one.reward is not None:
                value = one.reward - lost if one.reward == 1 else one.reward
                records.append(Reward(tape=name, step=len(one.steps), name="right", value=value))
            if one.status is not None:
                records.append(End(tape=name, status=one.status, cause=one.cause, seconds=1.5, at=BEGAN + k + 2))
            for record in records:
                store.writer.append(record.body())
    return names


def _call(tape: str, n: int, at: float) -> Call:
    return Call(
        tape=tape,
        call=f"{tape}.{n}",
        by="reader",
        new_prompt=ints(range(20)),
        completion=ints([5, 6, 7, 3]),
        logprobs=floats([-0.5, -0.25, -1.0, -0.125]),
        spans=(("a53ddb2e:1", 0, 4),),
        finish="stop",
        engine="embedded",
        at=at,
    )
