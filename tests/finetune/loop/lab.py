"""What the tests of the loop share: a world of letters that a micro model learns in seconds, and runs in it.

The model is asked for a letter each turn and should say it. An alphabet of six characters keeps everything small; the
tapes, the engine, the ledger and the trainer are those of any other run.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import random
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import torch

from tapereel.agents import LLM, Agent, EmbeddedEngine, Limits
from tapereel.agents.engines.embedded import char_tokenizer
from tapereel.agents.engines.embedded.tiny_model import tiny_model
from tapereel.agents.rendering import Renderer
from tapereel.envs import Environment, Outcome
from tapereel.finetune import History, Loop, LoopConfig, OptimiserConfig, Trainer
from tapereel.finetune.loop import Learner, Policy
from tapereel.finetune.loop.loop import UpdateReport
from tapereel.finetune.recipes import get_recipe
from tapereel.finetune.trainer import Processes, Ranks
from tapereel.finetune.trainer.distributed import MakeTrainer
from tapereel.tapes import Answer, Sampling, Tape, Text
from tapereel.tapes.store import Store

torch.set_num_threads(1)

LETTERS = "abcd"
WORDS = char_tokenizer(LETTERS + "+-")
RENDERER = Renderer(WORDS)
LIMITS = Limits(turns=6, agent_seconds=60.0, system_seconds=60.0)


class Letters(Environment[Answer]):
    """A task is a string: turn k asks for its k-th letter. A turn's reward is its share of the letters."""

    async def reset(self, task: str) -> Text:
        self.task, self.turn = task, 0
        return Text(text=task[0])

    async def step(self, action: Answer) -> Outcome:
        wanted, self.turn = self.task[self.turn], self.turn + 1
        reward = float(action.text.startswith(wanted)) / len(self.task)
        if self.turn == len(self.task):
            return Outcome(reward=reward, terminated=True)
        return Outcome(Text(text=self.task[self.turn]), reward=reward)


GATE = "LAB_GATE"
"""The variable with the path of a file. No episode begins while it is there."""


class Gated(Letters):
    """Holds the run while a server comes back, so that the next update finds it among the others."""

    async def reset(self, task: str) -> Text:
        while Path(os.environ[GATE]).exists():  # noqa: ASYNC110, ASYNC240  # another process opens it
            await asyncio.sleep(0.05)
        return await super().reset(task)


class EverySecond(Letters):
    """Every second episode earns, whatever is said: each update has a gradient, wherever training went before."""

    begun = itertools.count()

    async def reset(self, task: str) -> Text:
        self.earned = float(next(EverySecond.begun) % 2)
        return await super().reset(task)

    async def step(self, action: Answer) -> Outcome:
        outcome = await super().step(action)
        return Outcome(outcome.observation, self.earned, outcome.terminated)


class Flaky(Letters):
    """Breaks at some step in about 30 % of its episodes; which ones is drawn per instance, so a retry may succeed."""

    luck = random.Random(0)

    def __init__(self, share: float = 0.3) -> None:
        self.breaks = Flaky.luck.random() < share

    async def step(self, action: Answer) -> Outcome:
        if self.breaks:
            raise OSError("the world broke")
        return await super().step(action)


class Speaker(Agent):
    """Says whatever the model says."""

    async def act(self, tape: Tape, llm: LLM) -> AsyncIterator[Any]:
        yield Answer(text=(await llm(tape)).text)


def model(seed: int = 0, context: int = 64) -> Any:
    return tiny_model(WORDS, "micro", seed=seed, context=context)


def tasks(turns: int = 2, seed: int = 0) -> Callable[[int], str]:
    """Task k, the same at every call."""
    return lambda k: "".join(random.Random(f"{seed}/{k}").choices(LETTERS, k=turns))


def settings_of(**changes: Any) -> LoopConfig:
    return LoopConfig(
        **{
            "updates": 4,
            "groups": 4,
            "group_size": 4,
            "sampling": Sampling(max_tokens=2),
            "limits": LIMITS,
            "optimiser": OptimiserConfig(lr=1e-2),
            "checkpoint_every": 3,
            "keep_checkpoints": 3,
            "max_concurrent": 64,
            **changes,
        }
    )


def history_in(
    store: Store,
    directory: Path,
    config: LoopConfig,
    *,
    policy: Any = None,
    lineage: str = "run",
    changes: dict[str, Any] | None = None,
) -> History:
    def make(phase: str, work: Any, ranks: Ranks) -> Trainer:
        recipe = get_recipe("sft") if phase.startswith("sft") else get_recipe(config.recipe, changes or config.changes)
        return Trainer(
            work, recipe, OptimiserConfig(lr=config.optimiser.lr, micro_tokens=config.optimiser.micro_tokens)
        )

    trained = policy_of(model() if policy is None else policy, make)
    return History(trained, store, lineage, directory / "checkpoints")


def no_trainer(phase: str, work: Any, ranks: Ranks) -> Trainer:
    raise AssertionError(f"phase {phase!r} begins")


def policy_of(model: Any, make: MakeTrainer = no_trainer) -> Policy:
    """A policy in this process. `make` makes its trainers."""
    return Policy(weights=Processes(Ranks(), model, make), renderer=RENDERER, tokenizer=WORDS)


def engine_of(history: History, **options: Any) -> EmbeddedEngine:
    return EmbeddedEngine(history.model, RENDERER, version=history.version, **{"slots": 64, **options})


def loop_in(history: History, config: LoopConfig, *, cls: type[Loop] = Loop, **options: Any) -> Loop:
    engine = options.pop("engine", None) or engine_of(history)
    options = {
        "learners": [Learner(history=history, engine=engine)],
        "agent": Speaker(),
        "env": Letters,
        "tasks": tasks(),
        "start": 0,
        **options,
    }
    return cls(config, **options)


def run(path: Path, config: LoopConfig, **options: Any) -> tuple[Loop, list[UpdateReport]]:
    """One whole run in a new store; the store is closed, its books are checked."""
    reports: list[UpdateReport] = []
    policy = options.pop("policy", None)
    with Store.create(path, durability="os") as store:
        history = history_in(store, path, config, policy=policy)
        loop = loop_in(history, config, on_update=reports.append, **options)
        asyncio.run(loop.run())
    assert_books_close(path)
    return loop, reports


def assert_books_close(path: Path) -> Any:
    """The books close, and what they call trained is what the ledger's `use` records name."""
    store = Store.open(path)
    books = store.books()
    assert books.closes, books.findings
    trained: set[tuple[str, str, int]] = set()
    applied = 0
    for stored in store.run_records("use"):
        for tape, call, start, end, weight in stored.record.items:
            assert weight > 0
            trained.update((tape, call, k) for k in range(start, end))
            applied += end - start
    assert books.tokens["trained"] + books.authored_trained == len(trained)
    assert books.applied == applied
    store.close()
    return books
