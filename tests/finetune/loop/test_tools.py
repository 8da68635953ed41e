"""The loop trains on episodes with a tool of an MCP server, in another process, and learns to ask it."""

from __future__ import annotations

import asyncio
import random
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from tapereel.agents import LLM, Agent, EmbeddedEngine, Limits
from tapereel.agents.engines.embedded import char_tokenizer
from tapereel.agents.engines.embedded.tiny_model import tiny_model
from tapereel.agents.rendering import Renderer
from tapereel.envs import Outcome
from tapereel.envs.adapters import McpServer, ToolEnvironment
from tapereel.finetune import History, Loop, OptimiserConfig, Trainer
from tapereel.finetune.loop import Learner
from tapereel.finetune.recipes import get_recipe
from tapereel.finetune.trainer import Ranks
from tapereel.tapes import Answer, Tape, Task, ToolCall, ToolCalls, ToolResults
from tapereel.tapes.store import Store

from .lab import assert_books_close, policy_of, settings_of
from .test_learning import climbed, rewards

pytest.importorskip("mcp")
SERVER = Path(__file__).parents[2] / "envs" / "mcp_server.py"
WORDS = char_tokenizer("abcd?+-")
RENDERER = Renderer(WORDS)


class Codes(ToolEnvironment):
    """Wants the letter of a key that only the server knows: a guess earns a quarter of the time, and nothing before the
    server was asked. To ask is worth something too, or the policy would hardly find out what it's for."""

    def __init__(self, server: McpServer) -> None:
        super().__init__([server])
        self.code: str | None = None

    async def prompt(self, task: Task) -> str:
        return "+"

    async def step(self, action: ToolCalls | Answer) -> Outcome:
        outcome = await super().step(action)
        if not isinstance(outcome.observation, ToolResults):
            return outcome
        first, self.code = self.code is None, outcome.observation.results[0].content
        return Outcome(outcome.observation, reward={"asked": 0.1} if first else None)

    async def answered(self, text: str) -> Outcome:
        right = self.code is not None and text.startswith(self.code)
        return Outcome(reward={"right": float(right)}, terminated=True)


class Asker(Agent):
    """`?` asks for the code of the task's key; anything else is the answer."""

    async def act(self, tape: Tape, llm: LLM) -> AsyncIterator[Any]:
        reply = await llm(tape)
        if reply.text.startswith("?"):
            yield ToolCalls(calls=(ToolCall(id="1", name="code_of", arguments={"key": tape.task}),))
        else:
            yield Answer(text=reply.text)


def taught(path: Path, seed: int, updates: int) -> list[list[float]]:
    server = McpServer.stdio(sys.executable, str(SERVER), "stdio", shared=True, effect="pure", only=["code_of"])
    config = settings_of(updates=updates, groups=8, group_size=8, limits=Limits(turns=2))
    policy = tiny_model(WORDS, "micro", seed=seed, context=64)

    def make(phase: str, work: Any, ranks: Ranks) -> Trainer:
        return Trainer(
            work,
            get_recipe(config.recipe),
            OptimiserConfig(lr=config.optimiser.lr, micro_tokens=config.optimiser.micro_tokens),
        )

    with Store.create(path, durability="os") as store:
        history = History(policy_of(policy, make), store, "run", path / "checkpoints")
        engine = EmbeddedEngine(policy, RENDERER, version=history.version, slots=64)
        loop = Loop(
            config,
            learners=[Learner(history=history, engine=engine)],
            agent=Asker(),
            env=lambda: Codes(server),
            seed=seed,
            start=0,
            tasks=lambda k: Task(public=f"{random.Random(f'{seed}/{k}').getrandbits(64):x}"),
        )
        asyncio.run(loop.run())
    assert_books_close(path)
    return rewards(path)


def test_episodes_with_a_tool_of_another_process_are_trained_on(tmp_path: Path) -> None:
    batches = taught(tmp_path / "run", 1, 2)
    assert [len(batch) for batch in batches] == [64, 64]
    with Store.open(tmp_path / "run") as store:
        found = [store.tape(s.id, refresh=False) for s in store.summaries()]
    assert {tape.begin.env.effect for tape in found} == {"pure"}
    asked = [tape for tape in found if any(isinstance(step, ToolResults) for step in tape)]
    assert asked, "an untrained model says `?` now and then"
    assert all(
        r.content in "abcd" and not r.error
        for tape in asked
        for step in tape
        if isinstance(step, ToolResults)
        for r in step.results
    )


@pytest.mark.learning
@pytest.mark.timeout(600)
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_reward_climbs_by_asking_whatever_the_seed(tmp_path: Path, seed: int) -> None:
    # Nothing is earned unasked. How far it comes in repeating what it was told differs from run to run.
    assert climbed(taught(tmp_path / "run", seed, 48)) > 3
