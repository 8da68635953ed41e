"""Which of a program's calls are the agent's, and which go on from which, whatever came first."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from tapereel.agents.gateway import label_calls
from tapereel.finetune import rows
from tapereel.tapes import Tape
from tapereel.tapes.steps import Exchange
from tapereel.tapes.store import Store, verify
from tapereel.tapes.store.books import spent

from .lab import Client, Told, books_close, served, until


def said(answer: Any) -> Any:
    status, body = answer
    assert status == 200, body
    return body["choices"][0]["message"]


def play(path: Path, program: Callable[[Client], Awaitable[None]], engine: Any = None) -> Tape:
    """The tape of a program, read back from the run that it was recorded in."""

    async def scene() -> str:
        async with served(path, engine or Told(lambda messages: f"re {messages[-1]['content']}")) as there:
            tape, client = await there.begin(task="t")
            await program(client)
            await there.score(tape, right=1.0)
            await there.end(tape)
            return tape

    name = asyncio.run(scene())
    books_close(path)
    assert verify(path).verdict == "holds"
    with Store.open(path) as store:
        return store.tape(name)


def uses(tape: Tape) -> dict[str, str]:
    """What each call asked last -> agent, auxiliary or discarded."""
    told = {label.call: label.use for label in tape.layers}  # type: ignore[attr-defined]
    return {f"{k} {call.messages[-1]['content']}": told.get(call.call, "agent") for k, call in enumerate(tape.calls)}


def trained(tape: Tape) -> list[list[str]]:
    """The texts of the calls that each row trains on."""
    return [[tape.call(call).text or "" for call in row.calls] for row in rows(tape)]


@pytest.mark.parametrize("ids", [True, False])
def test_equal_prompts_are_samples_and_each_answer_is_trained_once(tmp_path: Path, ids: bool):
    """One of three equal answers goes on, as in best of n, and its continuation is asked twice."""

    async def program(ask: Client) -> None:
        answers = [said(await ask.ask("a")) for _ in range(3)]
        await ask.ask("a", answers[0], "b")
        await ask.ask("a", answers[0], "b")

    tape = play(tmp_path, program, Told(lambda messages: f"re {messages[-1]['content']}", ids=ids))
    assert tape.layers == []
    shown = [step.asked for step in tape if isinstance(step, Exchange)]
    assert shown == ["user: a"] * 3 + ["user: b"] * 2
    if ids:
        assert sorted(trained(tape)) == [["re a"], ["re a", "re b"], ["re a", "re b"]]


def test_equal_answers_that_all_go_on_are_no_abandoned_branches(tmp_path: Path):
    async def program(ask: Client) -> None:
        answers = [said(await ask.ask("a")) for _ in range(3)]
        for k, answer in enumerate(answers):
            await ask.ask("a", answer, f"b{k}")

    tape = play(tmp_path, program, Told())
    assert set(uses(tape).values()) == {"agent"}
    assert sorted(map(len, trained(tape))) == [2, 2, 2]


def test_an_answer_that_no_client_received_is_discarded_unless_it_goes_on(tmp_path: Path):
    async def program(ask: Client) -> None:
        first = said(await ask.ask("a"))
        await ask.ask("a")
        await ask.ask("a", first, "b")
        await ask.ask("a", first, "c")

    tape = play(tmp_path, program, Told(lambda messages: f"re {messages[-1]['content']}"))
    first, second, b, c = (call.call for call in tape.calls)

    def labels(*lost: str, **own: Any) -> dict[str, tuple[Any, ...]]:
        found = label_calls(tape, own, undelivered=lost)
        return {label.call: (label.use, label.reason, label.after) for label in found}

    assert labels() == {}
    assert labels(b) == labels(b, **{b: "agent"}) == {b: ("discarded", "undelivered", None)}
    bases = {tape.call(call).base for call in (b, c)}
    assert bases == {first, second}
    # Of the two equal answers, the program continued the one that arrived, twice.
    lost = labels(first)
    assert lost[first] == ("discarded", "undelivered", None)
    assert sorted(after for _, _, after in lost.values() if after) == [second]
    # If neither arrived, the program got their text in another way, perhaps in the part that did.
    assert labels(first, second) == {}


def test_a_request_that_was_given_up_abandons_no_branch(tmp_path: Path):
    engine = Told()

    async def program(ask: Client) -> None:
        root = said(await ask.ask("a"))
        await ask.ask("a", root, "b")
        engine.gate.clear()
        asking = asyncio.ensure_future(ask.ask("a", root, "c"))
        await until(lambda: len(engine.requests) == 3)
        asking.cancel()
        await asyncio.wait([asking])

    assert uses(play(tmp_path, program, engine)) == {"0 a": "agent", "1 b": "agent", "2 c": "discarded"}


def test_the_books_say_how_many_tokens_are_left_out_and_why(tmp_path: Path):
    async def program(ask: Client) -> None:
        body = {"model": "m", "messages": [{"role": "user", "content": "draft"}]}
        await ask("POST", "/v1/chat/completions", body, X_Tapereel_Use="discarded")
        root = said(await ask.ask("a"))
        await ask.ask("a", root, "wrong")
        await ask.ask("a", root, "right")
        await ask.ask({"role": "system", "content": "make a title"}, "title")

    tape = play(tmp_path, program)
    tokens = [len(call.completion or ()) for call in tape.calls]
    counts = books_close(tmp_path).counts
    left = {name.removeprefix("left_out/"): n for name, n in counts.items() if name.startswith("left_out/")}
    assert left == {"declared": tokens[0], "abandoned": tokens[2], "auxiliary": tokens[4]}
    assert f"{sum(left.values())} of these" in spent(counts)


def test_answers_to_the_same_question_asked_at_once_are_all_the_agents(tmp_path: Path):
    engine = Told()

    async def program(ask: Client) -> None:
        engine.gate.clear()
        asked = [asyncio.ensure_future(ask.ask("vote")) for _ in range(3)]
        await until(lambda: len(engine.requests) >= 3)
        engine.gate.set()
        await asyncio.gather(*asked)

    assert set(uses(play(tmp_path, program, engine)).values()) == {"agent"}


def test_a_helper_with_other_instructions_is_auxiliary(tmp_path: Path):
    async def program(ask: Client) -> None:
        system = {"role": "system", "content": "you play"}
        await ask.ask({"role": "system", "content": "make a title"}, "title")
        first = said(await ask.ask(system, "a"))
        await ask.ask(system, "a", first, "b")
        await ask.ask(system, "what came before, in short: a b", "c")

    tape = play(tmp_path, program)
    assert uses(tape) == {"0 title": "auxiliary", "1 a": "agent", "2 b": "agent", "3 c": "agent"}
    assert trained(tape) == [["re a", "re b"], ["re c"]]


TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}


@pytest.mark.parametrize("ids", [True, False])
@pytest.mark.parametrize("after", [1, 2, 3])
def test_a_conversation_that_goes_on_without_its_tools_stays_the_agents(tmp_path: Path, after: int, ids: bool):
    """`after` calls without tools, which may outnumber those with them; then a helper that never had any."""

    async def program(ask: Client) -> None:
        system, asked = {"role": "system", "content": "you play"}, ["a"]
        for k in range(1 + after):
            answer = said(await ask.ask(system, *asked, **({"tools": [TOOL]} if k == 0 else {})))
            asked += [answer, f"b{k}"]
        await ask.ask({"role": "system", "content": "make a title"}, *asked)
        await ask.ask(system, "a, in other words")

    tape = play(tmp_path, program, Told(lambda messages: f"re {messages[-1]['content']}", ids=ids))
    *own, title, other = uses(tape).values()
    assert own == ["agent"] * (1 + after)
    assert (title, other) == ("auxiliary", "auxiliary")


def test_what_continues_a_helper_is_the_helpers(tmp_path: Path):
    async def program(ask: Client) -> None:
        system, helper = ({"role": "system", "content": text} for text in ("you play", "you help"))
        first = said(await ask.ask(system, "a", tools=[TOOL]))
        second = said(await ask.ask(system, "a", first, "b", tools=[TOOL]))
        await ask.ask(system, "a", first, "b", second, "c", tools=[TOOL])
        helped = said(await ask.ask(helper, "a", tools=[TOOL]))
        await ask.ask(helper, "a", helped, "b")

    assert list(uses(play(tmp_path, program)).values()) == ["agent"] * 3 + ["auxiliary"] * 2


def test_a_branch_that_was_left_is_discarded_with_all_that_followed(tmp_path: Path):
    async def program(ask: Client) -> None:
        root = said(await ask.ask("a"))
        wrong = said(await ask.ask("a", root, "wrong"))
        await ask.ask("a", root, "wrong", wrong, "deeper")
        right = said(await ask.ask("a", root, "right"))
        await ask.ask("a", root, "right", right, "on")

    tape = play(tmp_path, program)
    assert uses(tape) == {
        "0 a": "agent",
        "1 wrong": "discarded",
        "2 deeper": "discarded",
        "3 right": "agent",
        "4 on": "agent",
    }
    assert trained(tape) == [["re a", "re right", "re on"]]
    (row,) = rows(tape)
    own = sum(len(call.completion or ()) for k, call in enumerate(tape.calls) if k in (0, 3, 4))
    assert len(row.own) == own


def test_branches_asked_at_once_are_all_the_agents(tmp_path: Path):
    engine = Told(lambda messages: f"re {messages[-1]['content']}")

    async def program(ask: Client) -> None:
        root = said(await ask.ask("a"))
        engine.gate.clear()
        asked = [asyncio.ensure_future(ask.ask("a", root, which)) for which in ("b", "c")]
        await until(lambda: len(engine.requests) >= 3)
        engine.gate.set()
        await asyncio.gather(*asked)

    tape = play(tmp_path, program, engine)
    assert set(uses(tape).values()) == {"agent"}
    assert sorted(map(len, trained(tape))) == [1, 2]


def test_a_parent_that_is_recorded_late_is_adopted(tmp_path: Path):
    """A client stops reading an answer, asks on from what it has read, and only then hangs up."""

    class Held(Told):
        async def complete(self, request: Any) -> Any:
            if len(request.messages) > 1:
                self.gate.set()
            answer = await super().complete(request)
            return answer

    engine = Held(lambda messages: "yes it is")
    first_gate = engine.gate

    async def program(ask: Client) -> None:
        first_gate.clear()
        hanging = asyncio.ensure_future(ask.ask("a"))
        await engine.begun.wait()
        engine.gate = asyncio.Event()
        await ask.ask("a", {"role": "assistant", "content": "ye"}, "b")
        hanging.cancel()
        await asyncio.wait([hanging])

    tape = play(tmp_path, program, engine)
    later, parent = tape.calls
    assert (parent.finish, parent.text, later.base) == ("cancelled", "ye", None)
    (label,) = tape.layers
    assert (label.call, label.use, label.after) == (later.call, "agent", parent.call)  # type: ignore[attr-defined]
    (row,) = rows(tape)
    assert row.calls == (parent.call, later.call)
    whole = [*later.prompt, *(later.completion or ())]
    assert list(row.input_ids) == whole
    own = [*(parent.completion or ()), *(later.completion or ())]
    assert [whole[k] for k in row.own] == own
    assert rows(Tape.model_validate_json(tape.model_dump_json()))[0].calls == row.calls


def test_what_the_program_says_of_a_call_holds(tmp_path: Path):
    async def program(ask: Client) -> None:
        body = {"model": "m", "messages": [{"role": "user", "content": "draft"}]}
        status, _ = await ask("POST", "/v1/chat/completions", body, X_Tapereel_Use="discarded")
        assert status == 200
        assert (await ask("POST", "/v1/chat/completions", body, X_Tapereel_Use="thrown"))[0] == 400
        await ask.ask("a")

    tape = play(tmp_path, program)
    assert uses(tape) == {"0 draft": "discarded", "1 a": "agent"}


def test_a_long_tape_is_linked(tmp_path: Path):
    async def program(ask: Client) -> None:
        messages: list[Any] = []
        for _ in range(40):
            messages += ["x"]
            messages += [said(await ask.ask(*messages))]
        await ask.ask("another", temperature=0.5)

    tape = play(tmp_path, program, Told(lambda messages: "y"))
    assert tape.layers == []
    assert label_calls(tape) == []
    assert sorted(map(len, trained(tape))) == [1, 40]


@pytest.mark.parametrize("ids", [True, False])
def test_a_tape_without_calls_has_no_labels(tmp_path: Path, ids: bool):
    async def program(ask: Client) -> None:
        pass

    assert play(tmp_path, program, Told(ids=ids)).layers == []
