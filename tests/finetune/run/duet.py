"""Two voices on one tape, small enough for a test: each is asked for a letter and earns for saying it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from tapereel.agents import LLM, Agent, delegate
from tapereel.agents.engines import TeamEngine
from tapereel.envs import Environment, Outcome
from tapereel.finetune import History, Loop, LoopConfig
from tapereel.finetune.loop import Learner
from tapereel.tapes import Answer, Tape, Text, Thought
from tapereel.tapes.store import Store

from ..loop.lab import RENDERER, engine_of, history_in, model, settings_of, tasks

ALTO, BASS = "duet/alto", "duet/bass"


class Sung(Thought):
    text: str


class Score(Environment[Answer]):
    """The alto should say the letter of the task, the bass the first of the alphabet."""

    async def reset(self, task: str) -> Text:
        self.letter = task[0]
        return Text(text=self.letter)

    async def step(self, action: Answer) -> Outcome:
        alto, _, bass = action.text.partition("-")
        earned = {f"right@{ALTO}": float(alto[:1] == self.letter), f"right@{BASS}": float(bass[:1] == "a")}
        return Outcome(reward=earned, terminated=True)


class Voice(Agent):
    async def act(self, tape: Tape, llm: LLM) -> AsyncIterator[Any]:
        yield Sung(text=(await llm(tape, messages=[{"role": "user", "content": str(tape[0])}])).text)


class Duet(Agent):
    """Both speak in one turn; the bass's last word carries what was sung by both."""

    def __init__(self) -> None:
        self.alto, self.bass = Voice(), Voice()

    async def act(self, tape: Tape, llm: LLM) -> AsyncIterator[Any]:
        async for step in delegate("alto", self.alto, tape, llm):
            yield step
        async for step in delegate("bass", self.bass, tape, llm):
            yield step
        said = tape.now().thoughts
        yield Answer(text=f"{said[-2]}-{said[-1]}")


def settings(**changes: Any) -> LoopConfig:
    return settings_of(**{"by_agent": True, "agents": (ALTO,), "max_lag": 0, "updates": 3, **changes})


def two(store: Store, path: Path, config: LoopConfig, *, seeds: tuple[int, int] = (0, 1)) -> tuple[History, History]:
    """Two policies of different weights, each with a lineage."""
    alto, bass = (
        history_in(store, path / name, config, policy=model(seed), lineage=name)
        for name, seed in zip(("alto", "bass"), seeds, strict=True)
    )
    return alto, bass


def loop_of(alto: History, bass: History, config: LoopConfig, *, frozen: bool = False, **options: Any) -> Loop:
    engines = {ALTO: engine_of(alto), BASS: engine_of(bass)}
    players = [] if frozen else [Learner(history=bass, engine=engines[BASS], agents=(BASS,))]
    learners = [Learner(history=alto, engine=TeamEngine(engines)), *players]
    options = {"env": Score, "agent": Duet(), "tasks": tasks(1), "start": 0, **options}
    return Loop(config, learners=learners, **options)


__all__ = ["ALTO", "BASS", "RENDERER", "Duet", "Score", "loop_of", "settings", "two"]
