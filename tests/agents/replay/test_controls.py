"""Negative controls: each change to an agent, a world, a tokenizer, a model or a reward diverges, and at its place."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from tapereel.agents import LLM, Agent, ChatAgent, delegate
from tapereel.agents.engines.embedded import char_tokenizer
from tapereel.agents.engines.embedded.tiny_model import CHAT_TEMPLATE
from tapereel.agents.rendering import Renderer
from tapereel.agents.replay import replay
from tapereel.envs.checks.reexec import reexec
from tapereel.tapes import Answer, ParseError, Reasoning, Tape, ToolCalls
from tapereel.tapes.audit import Likely
from tapereel.tapes.audit.verdict import Divergence

from .worlds import RENDERER, TOOLS, Counting, Debate, Speaker, Thinker, parse_short, record


def found(tape: Tape, agent: Agent, **options: Any) -> Divergence:
    """Where a replay diverges; the same place when the turn is played alone."""
    divergence = asyncio.run(replay(tape, agent, renderer=RENDERER, **options)).divergence
    assert divergence is not None
    if divergence.turn is not None and "renderer" not in options:
        alone = asyncio.run(replay(tape, agent, renderer=RENDERER, turn=divergence.turn)).divergence
        assert alone == divergence
    return divergence


class Changed(Agent):
    """A Thinker with one thing changed from its turn 1 on."""

    name = "thinker"

    def __init__(self, change: str) -> None:
        self.change = change

    async def act(self, tape: Tape, llm: LLM) -> AsyncIterator[Any]:
        now = self.change if tape.turns >= 1 else ""
        if now == "asks once more":
            await llm(tape, system="Think.", conversation="secretly")
        system = "Think!" if now == "prompt" else "Think."
        max_tokens = 8 if now == "sampling" else 9
        first = await llm(tape, system=system, temperature=0.5, max_tokens=max_tokens)
        if now == "raises":
            raise KeyError("gone")
        thoughts = [Reasoning(text=first.text), Reasoning(text="a thought of its own")]
        if now == "order":
            thoughts.reverse()
        for thought in thoughts[: 1 if now == "one thought less" else 2]:
            yield thought
        if now == "one thought more":
            yield Reasoning(text="and another")
        if now == "asks once less":
            yield Answer(text=first.text)
            return
        reply = await llm(tape.now(), system="Think.", conversation="new" if now == "conversation" else "")
        yield Answer(text=reply.text.upper() if now == "reads otherwise" else reply.text)


@pytest.mark.parametrize(
    ("change", "field", "cause"),
    [
        ("prompt", "messages[0].content", Likely.PROMPT),
        ("sampling", "sampling.max_tokens", Likely.CODE),
        ("order", "reasoning.text", Likely.ORDER),
        ("one thought less", "messages[7]", None),
        ("one thought more", "kind", Likely.CODE),
        ("asks once more", "call", Likely.EXHAUSTED),
        ("asks once less", "answer.text", Likely.CODE),
        ("raises", "end.status", None),
        ("reads otherwise", "answer.text", Likely.PARSER),
        ("conversation", "call", Likely.EXHAUSTED),
    ],
)
def test_changed_code_diverges_in_the_turn_and_the_field_that_changed(change: str, field: str, cause: Likely | None):
    tape = record("thoughts", tokens=True)
    assert asyncio.run(replay(tape, Changed(""), renderer=RENDERER)).outcome == "verified"
    divergence = found(tape, Changed(change))
    assert (divergence.tape, divergence.turn, divergence.by or "thinker") == (tape.id, 1, "thinker")
    assert cause is None or divergence.cause == cause, divergence
    assert divergence.field == field, divergence
    assert asyncio.run(replay(tape, Changed(change), renderer=RENDERER, turn=0)).outcome == "verified"


def test_a_divergence_has_both_values_the_record_and_a_diff():
    tape = record("thoughts")
    divergence = found(tape, Changed("prompt"))
    assert (divergence.recorded, divergence.observed) == ("Think.", "Think!")
    assert divergence.diff == ["-Think.", "+Think!"]
    call = tape.calls[2]
    assert divergence.call == call.call
    assert divergence.record is not None
    assert call.call.encode() in tape.bodies[divergence.record]
    step = found(tape, Changed("reads otherwise"))
    assert step.step is not None
    assert step.recorded == str(tape[step.step])
    assert b'"t":"step"' in tape.bodies[step.record or 0]
    assert str(tape[step.step]).encode() in tape.bodies[step.record or 0]


def test_other_tools_and_another_order_of_tools():
    tape = record("tools")
    for tools in (TOOLS[::-1], TOOLS[:1]):
        agent = ChatAgent("Use tools.", actions=[ToolCalls, Answer], tools=tools, misreads=9)
        divergence = found(tape, agent)
        assert (divergence.turn, divergence.cause) == (0, Likely.TOOLS)
        assert divergence.field.startswith("tools[")
    assert (
        "order"
        in found(tape, ChatAgent("Use tools.", actions=[ToolCalls, Answer], tools=TOOLS[::-1], misreads=9)).sentence
    )


def test_a_changed_parser():
    tape = record("misread answers")
    first = next(k for k, step in enumerate(tape) if isinstance(step, ParseError))

    def forgiving(text: str) -> Answer:
        return Answer(text=text[:3])

    divergence = found(tape, ChatAgent("Short!", parse=forgiving, misreads=6))
    assert (divergence.cause, divergence.step, divergence.field) == (Likely.PARSER, first, "kind")
    assert (divergence.recorded, divergence.observed) == ("misread", "answer")

    def strict(text: str) -> Answer:
        raise ValueError("never")

    kept = next(k for k, step in enumerate(tape) if not isinstance(step, ParseError) and k > 0)
    divergence = found(tape, ChatAgent("Short!", parse=strict, misreads=6))
    assert divergence.cause == Likely.PARSER
    assert divergence.step is not None
    assert divergence.step <= kept


def other_template(tokenizer: Any) -> Any:
    tokenizer.chat_template = CHAT_TEMPLATE.replace("<|{{ m['role'] }}|>", "<|{{ m['role'] }}|>\n")
    return tokenizer


@pytest.mark.parametrize(
    ("make", "position"),
    [
        (lambda: other_template(char_tokenizer()), 1),
        (lambda: char_tokenizer("abcdefghijklmnopqrstuvwxyz .TW()0123456789"), 1),
    ],
    ids=["template", "tokenizer"],
)
def test_another_tokenizer_or_template(make: Callable[[], Any], position: int):
    tape = record("thoughts", tokens=True)
    divergence = asyncio.run(replay(tape, Thinker(), renderer=Renderer(make()))).divergence
    assert divergence is not None
    assert (divergence.turn, divergence.cause) == (0, Likely.RENDERING)
    assert divergence.field == f"prompt[{position}]"


def test_another_agent_speaks():
    class Planner(Agent):
        async def act(self, tape: Tape, llm: LLM) -> AsyncIterator[Any]:
            async for step in delegate("researcher", Thinker(), tape, llm):
                if isinstance(step, Reasoning):
                    yield step
            yield Answer(text="done")

    divergence = found(record("sub-agents"), Planner())
    assert (divergence.turn, divergence.by) == (0, "planner/researcher")
    assert "planner/searcher" in divergence.sentence


def test_a_change_in_one_of_several_concurrent_agents_is_that_ones():
    class Debated(Debate):
        name = "debate"

        async def act(self, tape: Tape, llm: LLM) -> AsyncIterator[Any]:
            class Door:
                """Turns b's prompt, in its second turn, and nobody else's."""

                def __getattr__(self, name: str) -> Any:
                    return getattr(llm, name)

                async def __call__(self, view: Tape, *, system: str) -> Any:
                    if view.scope == "debate/b" and tape.turns == 1:
                        system = system.replace("You said", "You told")
                    return await llm(view, system=system)

            async for step in super().act(tape, Door()):  # type: ignore[arg-type]
                yield step

    tape = record("concurrent sub-agents")
    divergence = found(tape, Debated())
    assert (divergence.turn, divergence.by, divergence.cause) == (1, "debate/b", Likely.PROMPT)


def test_an_agent_that_stops_early_and_one_that_goes_on():
    tape = record("an agent that raises")

    class Later(Agent):
        name = "fails_later"

        async def act(self, tape: Tape, llm: LLM) -> AsyncIterator[Any]:
            yield Answer(text=(await llm(tape)).text)

    divergence = found(tape, Later())
    assert (divergence.turn, divergence.cause, divergence.field) == (2, Likely.EXHAUSTED, "step")
    assert "thing" in divergence.sentence


def test_another_seed_of_the_environment_or_another_environment_diverges_where_it_shows():
    tape = record("one speaker", env_seed=3)
    assert asyncio.run(reexec(tape, Counting)).outcome == "verified"

    class Off(Counting):
        async def step(self, action: Any) -> Any:
            if self.left == 2:
                self.rng.random()
            return await super().step(action)

    divergence = asyncio.run(reexec(tape, Off)).divergence
    assert divergence is not None
    assert (divergence.turn, divergence.field, divergence.cause) == (1, "observation.text.text", Likely.ENVIRONMENT)
    edited = _edited(tape, b'"env_seed":3', b'"env_seed":4')
    divergence = asyncio.run(reexec(edited, Counting)).divergence
    assert divergence is not None
    assert (divergence.turn, divergence.step, divergence.field) == (None, 0, "observation.text.text")


def _edited(tape: Tape, old: bytes, new: bytes) -> Tape:
    return Tape.of([body.replace(old, new) for body in tape.bodies])


def test_an_edited_tape_diverges_where_it_was_edited():
    tape = record("one speaker")
    word = str(tape.actions[1])
    edited = _edited(tape, f'"content":{{"text":"{word}"}}'.encode(), b'"content":{"text":"forged"}')
    divergence = asyncio.run(replay(edited, Speaker())).divergence
    assert divergence is not None
    assert (divergence.turn, divergence.recorded, divergence.observed) == (1, "forged", word)


def test_the_parser_of_the_world_is_the_one_under_test():
    assert parse_short("abc") == Answer(text="abc")
