"""Ordinary shapes of agents: what the model reads next is what happened, and each row is exact."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tapereel.agents import LLM, EpisodeSpec, Request, ScriptedEngine, agent, rollout
from tapereel.agents.engines.servers import LiteLLMEngine
from tapereel.agents.replay import replay
from tapereel.envs import Environment, Outcome
from tapereel.finetune import rows
from tapereel.finetune.interchange.sets import turns_of, write_preference, write_sft
from tapereel.tapes import Answer, ParseError, Sampling, Status, Tape, Task
from tapereel.tapes.messages import text_of
from tapereel.tapes.records import Label

from ..gateway.lab import RENDERER, embedded
from ..hosted import Provider
from ..rendering.templates_table import page
from .shapes import BEGIN, PAGE, SHAPES, Note, Room, Shape, Steps, best_of, grade, play, second, table

PLAIN = [shape for shape in SHAPES if not shape.last and shape.in_order and shape.name != "two actions in a turn"]
LONE = [shape for shape in PLAIN if "program" not in shape.name]


def ids(shapes: Sequence[Shape]) -> list[str]:
    return [shape.name for shape in shapes]


def test_the_page_shows_what_is_read() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert page(text, table(), begin=BEGIN, name=str(PAGE)) == text, "run python -m tests.agents.episode.shapes"


@pytest.mark.parametrize("shape", SHAPES, ids=ids(SHAPES))
def test_each_shape_replays_and_is_read_back_as_it_was_read(shape: Shape) -> None:
    tape = play(shape)
    assert tape.status is (Status.ERROR if "two actions" in shape.name else Status.FINISHED), tape.cause
    again = Tape.model_validate_json(tape.model_dump_json())
    assert list(again.messages(path=shape.first)) == list(tape.messages(path=shape.first))
    verdict = asyncio.run(replay(again, shape.agent))
    assert verdict.outcome == "verified", verdict


def exact(tape: Tape) -> None:
    """Each row holds, for each of its calls, the call's whole prompt and then its sampled ids."""
    found = [(row, call) for row in rows(tape) for call in row.calls]
    assert {call for _, call in found} == {call.call for call in tape.calls if call.completion}
    for row, name in found:
        call, here = tape.call(name), row.call == row.calls.index(name)
        start = int(row.own[here][0]) - int(row.offset[here][0])
        assert list(row.input_ids[:start]) == list(call.prompt)
        assert list(row.input_ids[start : start + len(call.completion or ())]) == list(call.completion or ())


@pytest.mark.parametrize("shape", PLAIN, ids=ids(PLAIN))
def test_the_next_prompt_continues_the_ids_of_the_answer_that_was_taken(shape: Shape) -> None:
    tape = play(shape, ScriptedEngine(shape.script, renderer=RENDERER))
    assert tape.status is Status.FINISHED, tape.cause
    exact(tape)
    begun, made = [], {call for entry in tape.entries if entry.turn == 0 for call, _, _ in entry.calls}
    for call in tape.calls[len(shape.answers) :]:
        before = [one for one in tape.calls if one.call in made and one.engine == "scripted"]
        ends = [one.prompt + (one.completion or one.prompt[:0]) for one in before]
        begun += [any(call.prompt[: len(end)] == end for end in ends)]
    if "guard" not in shape.name:  # of its answer, no step was made
        assert any(begun)


@pytest.mark.parametrize("shape", [one for one in PLAIN if one.answers != ("right",) and "number" not in one.name])
def test_a_model_in_this_process_reads_the_same_shapes(shape: Shape) -> None:
    task, sampling = Task(public="Where to?"), Sampling(max_tokens=5)
    tape = asyncio.run(rollout(shape.agent, shape.env(), task, engine=embedded(), sampling=sampling))
    if tape.cause is not None:  # a model of random weights writes no word
        assert tape.cause.error in ("TooManyParseErrors", "IndexError"), tape.cause
    exact(tape)
    assert asyncio.run(replay(tape, shape.agent, renderer=RENDERER)).outcome == "verified"


@pytest.mark.parametrize("shape", LONE, ids=ids(LONE))
def test_a_hosted_model_reads_the_same_messages(shape: Shape, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHAPES_KEY", "k")
    answers = iter(shape.script)
    with Provider(says=lambda body: {"content": next(answers)}).up() as provider:
        engine = LiteLLMEngine(model="openai/m", base_url=provider.url, key_variable="SHAPES_KEY")
        tape = play(shape, engine)
    assert tape.status is Status.FINISHED, tape.cause
    _, messages = second(shape)
    sent = provider.asked[len(shape.answers)]["messages"]
    assert [(one["role"], one["content"]) for one in sent] == [(one["role"], text_of(one)) for one in messages]


# Random agents


class Endless(Environment[Answer]):
    async def reset(self, task: Any) -> str:
        self.turn = 0
        return "begin"

    async def step(self, action: Answer) -> Outcome:
        self.turn += 1
        return Outcome(f"seen {self.turn}", reward=0.0, terminated=self.turn == len(PLANS))


PLANS: list[list[tuple[str, int]]] = []
"""What the random agent does in each turn."""
OPS = st.sampled_from(["ask", "ask", "ask apart", "note", "hint", "take", "name"])
TURN = st.lists(st.tuples(OPS, st.integers(0, 3)), max_size=6)


@agent
async def random_agent(tape: Tape, llm: LLM) -> Steps:
    heard: list[Any] = []
    for op, k in PLANS[tape.turns]:
        if op == "ask":
            heard.append(await llm(tape.now()))
        elif op == "ask apart":
            heard.append(await llm(tape, messages=[{"role": "user", "content": f"apart {k}"}]))
        elif op == "note":
            yield Note(text=f"note {tape.turns}.{k}")
        elif op == "hint":
            yield ParseError(problem=f"hint {k}")
        elif heard and op == "take":
            yield Note(text=heard[-1].text)
        elif heard:
            reply = heard[k % len(heard)]
            yield llm.read_from(Note(text=f"of {reply.text}"), reply)
    yield Answer(text=heard[-1].text if heard else f"own {tape.turns}")


def told(tape: Tape) -> list[tuple[str, str]]:
    """Each step of the tape as (role, text), in order: the answer that it was made of, once, or its own text."""
    said: list[tuple[str, str, str | None]] = []
    for entry in tape.entries:
        text, made_of = str(entry.step), next((call for call, _, _ in entry.calls), None)
        if made_of is not None and made_of not in [name for *_, name in said]:
            said.append(("assistant", tape.call(made_of).text or "", made_of))
        if entry.by == "env" or isinstance(entry.step, ParseError):
            said.append(("user", text, None))
        elif made_of is None:
            said.append(("assistant", text, None))
    return [(role, text) for role, text, _ in said]


@settings(max_examples=150, deadline=None)
@given(st.lists(TURN, min_size=1, max_size=3))
def test_the_conversation_is_the_tapes_steps_and_each_row_is_exact(plans: list[list[tuple[str, int]]]) -> None:
    PLANS[:] = plans
    asked: list[Request] = []

    def policy(request: Request) -> str:
        asked.append(request)
        return f"answer {len(asked)}"

    tape = asyncio.run(rollout(random_agent, Endless(), 0, engine=ScriptedEngine(policy, renderer=RENDERER)))
    assert tape.status is Status.FINISHED, tape.cause
    exact(tape)
    found = [(one["role"], text_of(one)) for one in tape.messages()]
    assert sorted(found) == sorted(told(tape))
    # Nothing is out of order, except that an answer stands before notes that the agent yielded after asking.
    steps = told(tape)
    assert [one for one in found if one[0] == "user" and one[1].startswith(("seen", "begin"))] == [
        one for one in steps if one[0] == "user" and one[1].startswith(("seen", "begin"))
    ]
    for kind in ("note", "answer", "hint", "own"):
        assert [one for one in found if one[1].startswith(kind)] == [one for one in steps if one[1].startswith(kind)]
    # Each request showed a conversation that the final one continues, but for answers of which a step was made later.
    later = [(one["role"], text_of(one)) for one in tape.messages()]
    for request in asked:
        read = [(one["role"], text_of(one)) for one in request.messages]
        if not read[0][1].startswith("apart"):
            rest = iter(later)
            assert all(one in rest for one in read), (read, later)
    assert asyncio.run(replay(tape, random_agent, renderer=RENDERER)).outcome == "verified"
    again = Tape.model_validate_json(tape.model_dump_json())
    assert list(again.messages()) == list(tape.messages())
    for k in range(again.turns):
        assert list(again.at_turn(k).messages()) == list(tape.messages())[: len(again.at_turn(k).messages())]


# What is imitated


def test_an_answer_that_was_not_taken_is_reinforced_and_not_imitated() -> None:
    tape = play(Shape("", best_of, ("up", "left", "on"), "best_of"), ScriptedEngine(["up", "left", "on"] * 2))
    assert [tape.call(name).text for name in sorted(tape.not_taken)] == ["up", "on", "up", "on"]
    assert [turn.reply["content"] for turn in turns_of(tape)] == ["left", "left"]
    (row,) = [one for one in write_sft([tape]) if isinstance(one, dict)]
    assert [one["content"] for one in row["messages"]] == ["Where to?", "left", "And now?", "left"]
    assert {call for made in rows(tape, renderer=RENDERER) for call in made.calls} == {c.call for c in tape.calls}


def test_a_preference_chooses_what_was_taken() -> None:
    def graded(answers: list[str], attempt: int) -> Tape:
        room = Room(worth=1.0 - attempt)
        return asyncio.run(
            rollout(grade, room, EpisodeSpec.of(0, group="g", attempt=attempt), engine=ScriptedEngine(answers * 2))
        )

    good, bad = graded(["left", "Score: 9"], 0), graded(["up", "Score: 1"], 1)
    assert good.not_taken == frozenset()  # the grader read another prompt
    (pair,) = [one for one in write_preference([good, bad]) if isinstance(one, dict)]
    assert [one["content"] for one in pair["chosen"]] == ["left", "And now?", "left"]
    assert [one["content"] for one in pair["rejected"]] == ["up", "And now?", "up"]


@agent
async def discards(tape: Tape, llm: LLM) -> Steps:
    replies = [await llm(tape) for _ in range(2)]
    llm.label(replies[0], "discarded")
    yield Answer(text=replies[1].text)


def test_an_agent_may_discard_an_answer() -> None:
    tape = play(Shape("", discards, ("up", "left"), "discards"), ScriptedEngine(["up", "left"] * 2, renderer=RENDERER))
    assert [(layer.call, layer.use) for layer in tape.layers if isinstance(layer, Label)] == [
        (call.call, "discarded") for call in tape.calls if call.text == "up"
    ]
    assert {tape.call(call).text for row in rows(tape) for call in row.calls} == {"left"}
