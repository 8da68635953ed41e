"""Tools: a function's schema, calls that run at once, and errors that the agent reads instead of an end."""

from __future__ import annotations

import asyncio
import json
import re
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import pytest
from PIL import Image
from pydantic import BaseModel, Field

from tapereel.agents import ChatAgent, Limits, ReplayEngine, Request, ScriptedEngine, rollout
from tapereel.envs import Outcome, check_env
from tapereel.envs.adapters import ToolEnvironment, ToolFailed
from tapereel.envs.adapters.tools import Tool, ToolsLost, cut, tool, worst
from tapereel.envs.checks.reexec import reexec
from tapereel.tapes import (
    Answer,
    CauseType,
    Picture,
    Status,
    Tape,
    Task,
    ToolCall,
    ToolCalls,
    ToolOffer,
    ToolResult,
    ToolResults,
    Video,
)
from tapereel.tapes.errors import BadArgument


class Place(BaseModel):
    city: str
    floor: int = 0


def add(a: int, b: Annotated[int, Field(description="to add")] = 1) -> int:
    """Add two numbers.

    They may be negative.

    Args:
        a: the first number,
            whatever it is
        b: not this one

    Returns:
        a + b
    """
    return a + b


async def where(place: Place, unit: Literal["m", "ft"] = "m") -> dict[str, Any]:
    return {"city": place.city, "unit": unit}


class Sums(ToolEnvironment):
    """Asks for a sum, and wants it as text."""

    def __init__(self, *tools: Any) -> None:
        super().__init__([add, *tools])

    async def answered(self, text: str) -> Outcome:
        return Outcome(reward=float(text == self.task.private), terminated=True)


TASK = Task(public="2+3, please", private="5")
AGENT = ChatAgent(actions=[ToolCalls], plain=Answer)


def called(*calls: tuple[str, dict[str, Any]]) -> str:
    return "".join(
        f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>" for name, arguments in calls
    )


def play(env: ToolEnvironment, *answers: str, **options: Any) -> Tape:
    return asyncio.run(rollout(AGENT, env, TASK, engine=ScriptedEngine(list(answers)), **options))


def results(tape: Tape) -> list[tuple[str, str, bool]]:
    return [(r.name, r.content, r.error) for step in tape if isinstance(step, ToolResults) for r in step.results]


@pytest.mark.ledger("X11")
def test_a_functions_hints_and_docstring_are_its_schema():
    made = tool(add)
    assert (made.name, made.description) == ("add", "Add two numbers.\n\nThey may be negative.")
    assert made.parameters["required"] == ["a"]
    assert made.parameters["additionalProperties"] is False
    assert made.parameters["properties"] == {
        "a": {"type": "integer", "description": "the first number, whatever it is"},
        "b": {"type": "integer", "description": "to add", "default": 1},
    }
    assert tool(where, name="locate", description="").schema["function"]["name"] == "locate"  # type: ignore[index]


NUMPY = """Pay a bill.

It may be late.

Parameters
----------
amount : int
    What to pay,
    in cents: at least 1.

    Never twice.
to, by: {'a', 'b'}, optional
    A name.

Returns
-------
note : str
    Not a parameter.
"""
SPHINX = """Pay a bill.

It may be late.

:param amount: What to pay,
    in cents: at least 1.
    Never twice.
:type amount: int
:param str to: A name.
:param dict[str, int] by: A name.
:returns: Not a parameter.
:param note: Not of this function.
"""


@pytest.mark.parametrize("docstring", [NUMPY, SPHINX])
def test_docstrings_of_numpy_and_sphinx_describe_parameters_too(docstring: str):
    def pay(amount: int, to: str = "", by: str = "", silent: bool = False) -> None: ...

    pay.__doc__ = docstring
    made = tool(pay)
    assert made.description == "Pay a bill.\n\nIt may be late."
    properties: Any = made.parameters["properties"]
    assert {name: schema.get("description") for name, schema in properties.items()} == {
        "amount": "What to pay, in cents: at least 1. Never twice.",
        "to": "A name.",
        "by": "A name.",
        "silent": None,
    }


def test_bound_methods_and_models_are_tools_too():
    class Shelf:
        def __init__(self) -> None:
            self.books = ["a"]

        def put(self, book: str) -> list[str]:
            """Add a book."""
            self.books.append(book)
            return self.books

    assert list(tool(Shelf().put).parameters["properties"]) == ["book"]  # type: ignore[arg-type]
    env = Sums(Shelf().put, where)
    tape = play(env, called(("put", {"book": "b"}), ("where", {"place": {"city": "Rome"}})), "5")
    assert results(tape) == [("put", '["a","b"]', False), ("where", '{"city":"Rome","unit":"m"}', False)]


def test_callable_objects_and_partials_are_tools_that_are_named_after_what_they_call():
    class Counter:
        """Count."""

        def __init__(self) -> None:
            self.count = 0

        async def __call__(self, by: int) -> int:
            self.count += by
            return self.count

    made = tool(Counter())
    assert (made.name, made.description, made.parallel) == ("Counter", "Count.", True)

    def repeat(text: str, times: int) -> str:
        """Repeat the text."""
        return text * times

    twice = tool(partial(repeat, times=2))
    assert (twice.name, twice.description) == ("repeat", "Repeat the text.")
    tape = play(Sums(Counter()), called(("Counter", {"by": 2}), ("Counter", {"by": 3})), "5")
    assert results(tape) == [("Counter", "2", False), ("Counter", "5", False)]


def test_what_can_be_no_tool_is_refused_with_the_reason():
    def bare(a, b):
        return a

    def many(*numbers: int) -> int:
        return sum(numbers)

    with pytest.raises(BadArgument, match=r"\bbare\b.*'a'"):
        tool(bare)
    with pytest.raises(BadArgument, match=r"\bmany\b.*\*numbers"):
        tool(many)
    with pytest.raises(BadArgument, match="'add'"):
        Sums(add)
    with pytest.raises(ValueError, match=r"parallel.*\b1\b.*\b0\b"):
        ToolEnvironment([], parallel=0)


@pytest.mark.ledger("X11")
def test_an_agent_calls_tools_and_answers():
    asked: list[Request] = []

    def model(request: Request) -> str:
        asked.append(request)
        return called(("add", {"a": 2, "b": 3})) if len(asked) == 1 else request.messages[-1]["content"]

    tape = asyncio.run(rollout(AGENT, Sums(), TASK, engine=ScriptedEngine(model)))
    assert (tape.status, tape.reward) == (Status.FINISHED, 1.0)
    assert [type(step) for step in tape] == [ToolOffer, ToolCalls, ToolResults, Answer]
    assert asked[0].messages[-1] == {"role": "user", "content": "2+3, please"}
    assert asked[0].tools == tuple(tape[0].tools)
    assert asked[1].messages[-1] == {"role": "tool", "tool_call_id": "call_0", "name": "add", "content": "5"}
    assert asked[1].tools == asked[0].tools


def test_the_tools_come_from_the_tape_so_a_replay_needs_no_environment():
    tape = play(Sums(), called(("add", {"a": 2, "b": 3})), "5")
    again = asyncio.run(rollout(AGENT, Sums(), TASK, engine=ReplayEngine(tape)))
    assert [str(step) for step in again] == [str(step) for step in tape]
    assert asyncio.run(reexec(tape, Sums)).outcome == "verified"


class Doors(ToolEnvironment):
    """`look` finds a tool, and the answer "more" gives another."""

    def __init__(self) -> None:
        super().__init__([self.look])

    def look(self) -> str:
        self.offer(self.open_door)
        return "a door"

    def open_door(self, key: int) -> str:
        return "open" if key == 7 else "no"

    async def shout(self) -> str:
        return "echo"

    async def answered(self, text: str) -> Outcome:
        if text == "more":
            self.offer(tool(self.shout, effect="irreversible"))
            return Outcome("Shout!", reward=0.0)
        return Outcome(reward=1.0, terminated=True)


def test_a_tool_that_is_offered_in_the_episode_can_be_called_from_then_on():
    key = ("open_door", {"key": 7})
    said = [called(key), called(("look", {})), called(key), "more", called(("shout", {})), "done"]
    env = Doors()
    tape = play(env, *said)
    assert [step.kind for step in tape][:4] == ["tool_offer", "misread", "tool_calls", "tool_results"]
    assert results(tape) == [("look", "a door", False), ("open_door", "open", False), ("shout", "echo", False)]
    offered = [[t["function"]["name"] for t in step.tools] for step in tape if hasattr(step, "tools")]
    assert offered == [["look"], ["open_door"], [], ["shout"], []]
    assert env.effect == "irreversible"
    assert Tape.model_validate_json(tape.model_dump_json()) == tape
    again = asyncio.run(rollout(AGENT, Doors(), TASK, engine=ReplayEngine(tape)))
    assert [str(step) for step in again] == [str(step) for step in tape]
    assert asyncio.run(reexec(tape, Doors)).outcome == "verified"


def test_an_offered_tool_needs_a_name_of_its_own():
    class Twice(Doors):
        def look(self) -> str:
            self.offer(self.open_door)
            self.offer(self.open_door)
            return ""

    assert "two tools have the name 'open_door'" in results(play(Twice(), called(("look", {})), "done"))[0][1]


class Till(ToolEnvironment):
    def __init__(self) -> None:
        super().__init__([self.buy, self.pause])
        self.money = 10

    def buy(self, price: int) -> str:
        if self.money < price:
            return "too poor"
        time.sleep(0.01)
        self.money -= price
        return "bought"

    def pause(self) -> str:
        time.sleep(0.05)
        return threading.current_thread().name


def test_sync_tools_of_one_action_run_one_after_the_other_in_their_order():
    buy = ("buy", {"price": 8})
    tape = play(Till(), called(("pause", {}), buy, buy, ("pause", {})), "5")
    found = [content for _, content, _ in results(tape)]
    assert found[1:3] == ["bought", "too poor"]
    assert found[0] == found[3] != threading.current_thread().name


def test_time_that_a_sync_tool_waits_for_another_is_not_its_own():
    def slow() -> str:
        time.sleep(0.2)
        return "done"

    tape = play(Sums(tool(slow, timeout=0.35)), called(*[("slow", {})] * 3), "5")
    assert [content for _, content, _ in results(tape)] == ["done"] * 3


class Rows(ToolEnvironment):
    """Keeps its rows in a sqlite connection, which belongs to the thread that made it."""

    def __init__(self, *tools: Any) -> None:
        super().__init__([self.query, *tools])

    def connected(self) -> str:
        self.db = sqlite3.connect(":memory:")
        self.db.execute("create table t (x)")
        return "Add a row."

    def query(self, sql: str) -> str:
        return str(self.db.execute(sql).fetchall())

    def rows(self) -> Outcome:
        count = self.db.execute("select count(*) from t").fetchone()[0]
        self.db.close()
        return Outcome(reward=count, terminated=True)


class SyncRows(Rows):
    def prompt(self, task: Task) -> str:  # type: ignore[override]
        return self.connected()

    def answered(self, text: str) -> Outcome:  # type: ignore[override]
        return self.rows()


class BlockingRows(Rows):
    blocking = True

    async def reset(self, task: object) -> ToolOffer:
        self.connected()
        return await super().reset(task)

    async def answered(self, text: str) -> Outcome:
        return self.rows()


class AsyncRows(Rows):
    async def prompt(self, task: Task) -> str:
        return self.connected()

    async def close(self) -> None:
        self.db.close()


INSERT = called(*[("query", {"sql": "insert into t values (1)"})] * 2)


@pytest.mark.parametrize("env", [SyncRows, BlockingRows])
def test_sync_methods_and_sync_tools_share_a_thread(env: type[Rows]):
    tape = play(env(), INSERT, INSERT, "5")
    assert (tape.status, tape.reward, tape.cause) == (Status.FINISHED, 4.0, None)
    assert asyncio.run(reexec(tape, env)).outcome == "verified"


def test_a_connection_of_the_event_loops_thread_is_an_error_of_the_environment_with_its_remedy():
    tape = play(AsyncRows(), INSERT, "5")
    assert tape.cause is not None
    assert (tape.status, tape.cause.type) == (Status.ERROR, CauseType.ENVIRONMENT)
    assert "blocking = True" in tape.cause.message


def test_a_sync_tool_that_hangs_does_not_occupy_the_thread_of_later_ones():
    hung = threading.Event()
    try:
        tape = play(
            Sums(tool(lambda: hung.wait(), name="hang", timeout=0.05)), called(("hang", {}), ("add", {"a": 4})), "5"
        )
        assert [error for _, _, error in results(tape)] == [True, False]
    finally:
        hung.set()


def test_calls_of_one_turn_run_at_once_and_answer_in_their_order():
    inside = threading.Barrier(2, timeout=60)
    first = asyncio.Event()

    def meet(name: str) -> str:
        inside.wait()
        return name

    async def late() -> str:
        await first.wait()
        return "late"

    async def early() -> str:
        first.set()
        return "early"

    tape = play(
        Sums(tool(meet, parallel=True), late, early),
        called(("meet", {"name": "x"}), ("late", {}), ("early", {}), ("meet", {"name": "y"})),
        "5",
    )
    assert [content for _, content, _ in results(tape)] == ["x", "late", "early", "y"]


def test_no_more_calls_run_at_once_than_allowed():
    running, most = 0, 0

    async def busy() -> None:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0)
        running -= 1

    env = ToolEnvironment([busy], parallel=2)
    tape = play(env, called(*[("busy", {})] * 9), "5")
    assert most == 2
    assert len(results(tape)) == 9


def broken(a: int) -> int:
    """Fails."""
    raise KeyError("no such column")


def sorry() -> None:
    raise ToolFailed("The shop is closed.")


async def forever() -> None:
    await asyncio.Event().wait()


def late() -> None:
    raise TimeoutError


@dataclass
class Box:
    width: int


def put(box: Box) -> int:
    return box.width


def quits() -> None:
    raise SystemExit(3)


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (
            ("add", {"a": "two"}),
            r"^add\b.* a: Input should be a valid integer",
        ),
        (("add", {"a": 1, "c": 2}), r"^add\b.* c: Unexpected keyword argument"),
        (("broken", {"a": 1}), "KeyError: 'no such column'"),
        (("sorry", {}), r"^The shop is closed\.$"),
        (("late", {}), "^TimeoutError$"),
        (("put", {"box": {"width": 1, "height": 2}}), r"^put\b.* box.height: Unexpected keyword argument"),
        (("quits", {}), "RuntimeError: .*SystemExit: 3"),
        (("forever", {}), r"\bforever\b.*\b0\.01 s"),
    ],
)
def test_what_goes_wrong_in_a_tool_is_for_the_agent_to_read(call: tuple[str, dict[str, Any]], says: str):
    tape = play(Sums(broken, sorry, late, put, quits, tool(forever, timeout=0.01)), called(call), "5")
    ((name, content, error),) = results(tape)
    assert (name, error) == (call[0], True)
    assert re.search(says, content)
    assert (tape.status, tape.reward) == (Status.FINISHED, 1.0)


def test_a_call_of_a_tool_that_is_not_offered_is_for_the_agent_to_write_again():
    tape = play(Sums(), called(("nothing", {})), called(("add", {"a": 4})), "5")
    assert [step.kind for step in tape] == ["tool_offer", "misread", "tool_calls", "tool_results", "answer"]
    assert "'nothing'" in tape[1].problem
    assert tape.reward == 1.0


def test_a_blocking_tool_that_outlasts_its_time_holds_up_nobody():
    release = threading.Event()

    def hang() -> bool:
        return release.wait(600)

    try:
        tape = play(Sums(tool(hang, timeout=0.01)), called(("hang", {}), ("add", {"a": 4})), "5")
    finally:
        release.set()
    (name, content, error), other = results(tape)
    assert (name, error, other) == ("hang", True, ("add", "5", False))
    assert "0.01 s" in content


def test_a_lost_source_is_the_environments_fault():
    async def lost(arguments: dict[str, Any]) -> str:
        raise ToolsLost("the server is gone")

    gone = Tool(name="gone", description="", parameters={"type": "object"}, call=lost)
    tape = play(Sums(gone), called(("add", {"a": 1}), ("gone", {})), "5")
    assert (tape.status, tape.cause.type, tape.cause.error) == (Status.ERROR, CauseType.ENVIRONMENT, "ToolsLost")  # type: ignore[union-attr]
    assert not tape.trains


def test_long_and_unwritable_results_are_cut_with_a_note():
    def huge() -> str:
        return "x" * 5000 + "\ud800"

    tape = play(Sums(tool(huge, limit=100)), called(("huge", {})), "5")
    ((_, content, error),) = results(tape)
    assert not error
    assert content == "x" * 100 + "\n[cut here: 4,901 of 5,001 characters left out]"
    assert cut("a\udcffb", 10) == r"a\udcffb"


def test_a_tool_that_is_cancelled_with_its_episode_ends():
    started = asyncio.Event()
    ended: list[str] = []

    async def waits() -> None:
        started.set()
        try:
            await asyncio.Event().wait()
        finally:
            ended.append("cancelled")

    async def cancel() -> None:
        script = ScriptedEngine([called(("waits", {}))])
        episode = asyncio.ensure_future(rollout(AGENT, Sums(waits), TASK, engine=script))
        await started.wait()
        episode.cancel()
        with pytest.raises(asyncio.CancelledError):
            await episode

    asyncio.run(cancel())
    assert ended == ["cancelled"]


class Shop:
    """A source of one tool, which counts how often it is opened and closed."""

    effect = "irreversible"

    def __init__(self) -> None:
        self.open_now = 0

    async def open(self) -> list[Tool]:
        self.open_now += 1
        return [tool(self.buy, effect="idempotent")]

    async def close(self) -> None:
        self.open_now -= 1

    async def buy(self, what: str) -> str:
        return f"bought {what}"


def test_a_source_is_opened_for_the_episode_and_its_tools_say_what_they_do():
    shop = Shop()
    env = Sums(shop)
    tape = play(env, called(("buy", {"what": "bread"})), "5")
    assert results(tape) == [("buy", "bought bread", False)]
    assert shop.open_now == 0
    assert tape.begin.env.effect == "irreversible", "what was known before it was opened"
    assert env.effect == "idempotent"
    assert (worst([]), worst(["pure", "idempotent"])) == ("pure", "idempotent")


def test_an_answer_without_a_call_is_misread_unless_it_may_be_plain():
    strict = ChatAgent(actions=[ToolCalls], misreads=0)
    tape = asyncio.run(rollout(strict, Sums(), TASK, engine=ScriptedEngine(["5"])))
    assert tape.cause is not None
    assert tape.cause.error == "TooManyParseErrors"
    with pytest.raises(ValueError, match="`text`"):
        ChatAgent(actions=[ToolCalls], plain=ToolCalls)


def test_the_environment_keeps_the_contract():
    def policy(seen: Any, rng: Any) -> Any:
        if isinstance(seen, ToolOffer):
            return ToolCalls(calls=(ToolCall(id="1", name="add", arguments={"a": rng.randrange(9), "b": 1}),))
        return Answer(text="5")

    report = check_env(Sums, tasks=[TASK], actions=policy)
    assert report.ok, report


def test_limits_of_the_rollout_hold_for_tools():
    tape = play(Sums(tool(forever, timeout=600.0)), called(("forever", {})), limits=Limits(environment_seconds=0.01))
    assert (tape.status, tape.cause.type) == (Status.ERROR, CauseType.ENVIRONMENT)  # type: ignore[union-attr]


SUM = Task(public="1+2?", private="3")


@pytest.mark.parametrize(
    ("said", "limits", "how"),
    [
        ('{"name": "add", "arguments": {"a": 1}}', Limits(turns=3), "turns"),
        ('{"name": "add", "arguments": {"a": 1}}', Limits(calls=3), "turns"),
        ('<tool_call>{"name": "add", </tool_call>', Limits(), "agent"),
    ],
)
def test_an_episode_that_never_answers_is_scored_as_the_empty_answer(said: str, limits: Limits, how: str) -> None:
    """Unscored it would leave its group, and calling tools for ever would never be punished."""
    tape = asyncio.run(rollout(ChatAgent(), Sums, SUM, engine=ScriptedEngine([said] * 9), limits=limits))
    assert tape.status in (Status.LIMIT, Status.ERROR)
    assert tape.cause is not None
    assert (tape.cause.type, tape.reward, tape.trains) == (how, 0.0, True)


def test_an_answer_is_scored_once() -> None:
    tape = asyncio.run(rollout(ChatAgent(), Sums, SUM, engine=ScriptedEngine(["3"])))
    assert [(reward.step, reward.value) for reward in tape.rewards] == [(1, 1.0)]


def test_pictures_of_a_tool_are_shown_and_paths_are_text(tmp_path: Path):
    async def stream() -> AsyncIterator[int]:
        yield 1

    pixels = np.full((2, 3, 3), 200, "uint8")
    image, path = Image.fromarray(pixels), tmp_path / "secret.png"
    image.save(path)
    answers: dict[str, Any] = {
        "picture": Picture.of(pixels),
        "video": [Video.of(pixels[None], fps=1), "after"],
        "list": ["before", Picture.of(pixels), {"n": 1}],
        "parts": [{"type": "text", "text": "before"}, {"type": "image", "image": image}],
        "array": [{"type": "image", "image": pixels}],
        "bytes": [{"type": "image", "image": path.read_bytes()}],
        "pillow": image,
        "pillows": ["before", image],
        "file": path.read_bytes(),
        "torn": path.read_bytes()[:20],
        "object": object(),
        "objects": {"found": [object()]},
        "stream": stream(),
        "bad": [{"type": "image", "image": b"no picture"}],
        "path": [{"type": "image", "image": str(path)}],
        "url": [{"type": "image", "image": "http://127.0.0.1:1/a.png"}],
        "none": [{"type": "image"}],
    }

    def look(kind: str) -> Any:
        return answers[kind]

    async def asked() -> dict[str, ToolResult]:
        env = ToolEnvironment([look])
        await env.reset(Task(public="?"))
        calls = tuple(ToolCall(id=kind, name="look", arguments={"kind": kind}) for kind in answers)
        step = (await env.step(ToolCalls(calls=calls))).observation
        assert isinstance(step, ToolResults)
        return {result.id: result for result in step.results}

    found = asyncio.run(asked())
    shown = {name: (result.content, result.pictures == (answers["picture"],)) for name, result in found.items()}
    assert shown["picture"] == shown["array"] == shown["bytes"] == shown["pillow"] == shown["file"] == ("", True)
    assert shown["pillows"] == ("before", True)
    for name, remedy in {
        "torn": "BadPicture",
        "object": "Picture.of",
        "objects": "Picture.of",
        "stream": "list",
    }.items():
        assert found[name].error, name
        assert remedy in found[name].content
    assert found["video"].pictures == (answers["video"][0],)
    assert found["video"].content == "after"
    assert shown["list"] == ('before\n{"n":1}', True)
    assert shown["parts"] == ("before", True)
    assert (found["bad"].error, found["bad"].pictures) == (True, ())
    assert "WebP" in found["bad"].content
    for name in ("path", "url", "none"):
        assert (found[name].error, found[name].pictures) == (False, ())
    assert found["path"].content == json.dumps(answers["path"], separators=(",", ":"))


AT_THE_END = """
import asyncio, os, sys, time
import tapereel as tr
from tapereel.envs.adapters.tools import ToolEnvironment, tool

reads, writes = os.pipe()

class Late:
    def __del__(self, write=os.write, to=writes, sleep=time.sleep):
        write(to, b"wake up")
        sleep(1)

def slow(x: int) -> str:
    return os.read(reads, 7).decode()

class Slow(ToolEnvironment):
    def __init__(self):
        super().__init__([tool(slow, timeout=0.1)])
    async def answered(self, text):
        sys.late = Late()  # the interpreter clears it when the threads can't go on any more
        return tr.Outcome(reward=1.0, terminated=True)

call = '{"name": "slow", "arguments": {"x": 1}}'
tape = asyncio.run(tr.rollout(tr.ChatAgent(), Slow(), task="q", engine=tr.ScriptedEngine([call, "ok"])))
print(tape.reward)
"""


def test_a_tool_that_still_runs_when_the_process_ends_does_not_abort_it() -> None:
    done = subprocess.run([sys.executable, "-c", AT_THE_END], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "1.0\n"), done.stderr
