"""Programs in the loop: groups, updates, books, and a reward that rises."""

from __future__ import annotations

import asyncio
import runpy
from pathlib import Path
from typing import Any

import httpx
import pytest
from openai import AsyncOpenAI

from tapereel.agents.gateway import Endpoint, Program
from tapereel.agents.replay import replay
from tapereel.envs import Environment, Outcome
from tapereel.tapes import Answer, Text
from tapereel.tapes.store import Store

from ...finetune.loop.lab import RENDERER, assert_books_close, run, settings_of

EXAMPLES = Path(__file__).resolve().parents[3] / "examples"
spell = runpy.run_path(str(EXAMPLES / "gateway_openai.py"))["spell"]


async def program(task: str, endpoint: Endpoint) -> str:
    """The example's function, as it stands. Without certificates to load, a client is made in no time."""
    async with AsyncOpenAI(**endpoint._asdict(), http_client=httpx.AsyncClient(verify=False)) as client:
        return await spell(task, client)


async def framework(task: str, endpoint: Endpoint) -> str:
    """The same by an agent of pydantic-ai, which keeps the conversation; an answer without a letter ends it."""
    from pydantic_ai import Agent, UnexpectedModelBehavior
    from pydantic_ai.models.openai import OpenAIChatModel
    from pydantic_ai.providers.openai import OpenAIProvider

    said, history = "", []
    async with AsyncOpenAI(**endpoint._asdict(), http_client=httpx.AsyncClient(verify=False)) as client:
        agent = Agent(OpenAIChatModel("policy", provider=OpenAIProvider(openai_client=client)))
        for letter in task:
            try:
                found = await agent.run(letter, message_history=history)
            except UnexpectedModelBehavior:
                break
            history = found.all_messages()
            said += found.output[:1]
    return said


class Spelling(Environment[Answer]):
    """A word is to be said letter by letter; each right letter earns its share."""

    async def reset(self, task: str) -> Text:
        self.word = task
        return Text(text=task)

    async def step(self, action: Answer) -> Outcome:
        right = sum(said == letter for said, letter in zip(action.text, self.word, strict=False))
        return Outcome(reward=right / len(self.word), terminated=True)


async def with_a_helper(task: str, endpoint: Endpoint) -> str:
    """Asks for something else beside, which is not what it does."""
    async with AsyncOpenAI(**endpoint._asdict(), http_client=httpx.AsyncClient(verify=False)) as client:
        said = await spell(task, client)
        asked: Any = [{"role": "system", "content": "a-b"}, {"role": "user", "content": task}]
        await client.chat.completions.create(model="m", messages=asked)
        return said


def train(path: Path, function: Any = program, **changes: Any) -> list[Any]:
    _, reports = run(path, settings_of(**changes), agent=Program(function, name="speller"), env=Spelling)
    return reports


def test_the_loop_trains_on_what_a_program_asked(tmp_path: Path):
    reports = train(tmp_path, updates=2, groups=2, max_lag=0)
    assert len(reports) == 2
    books = assert_books_close(tmp_path)
    assert books.tokens["trained"] > 0
    # The episodes that were under way when the loop ended are given up, and their tokens are on their tapes.
    assert books.sampled == sum(books.tokens[place] for place in ("trained", "filtered", "unused", "cancelled"))
    with Store.open(tmp_path) as store:
        tapes = list(store.tapes(split="train", closed=True))
    assert {step.kind for tape in tapes for step in tape} == {"text", "exchange", "answer"}
    assert {layer.use for tape in tapes for layer in tape.layers} <= {"discarded"}  # type: ignore[attr-defined]
    verdict = asyncio.run(replay(tapes[0], Program(program, name="speller"), renderer=RENDERER))
    assert verdict.outcome == "verified", verdict


def test_what_a_helper_says_is_context_and_never_trained_on(tmp_path: Path):
    train(tmp_path, with_a_helper, updates=1, groups=1, max_lag=0)
    books = assert_books_close(tmp_path)
    with Store.open(tmp_path) as store:
        (use,) = (stored.record for stored in store.run_records("use"))
        tapes = [store.tape(name) for name in use.info["tapes"]]
    helped = {tape.calls[-1].call: len(tape.calls[-1].completion or ()) for tape in tapes}
    assert {layer.call for tape in tapes for layer in tape.layers} == set(helped)  # type: ignore[attr-defined]
    assert not {call for _, call, *_ in use.items} & set(helped)
    assert books.tokens["context"] == sum(helped.values()) > 0


@pytest.mark.learning
@pytest.mark.timeout(900)
@pytest.mark.parametrize("function", [program, framework], ids=["openai", "pydantic-ai"])
def test_a_program_that_knows_nothing_of_tapes_learns(tmp_path: Path, function: Any):
    rewards = [report.reward for report in train(tmp_path, function, updates=20, groups=12, group_size=8)]
    assert sum(rewards[-5:]) / 5 > sum(rewards[:5]) / 5 + 0.2, rewards
    assert_books_close(tmp_path)
