"""What the tests of reward sources share: closed tapes of one question and one answer, without a model."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from tapereel.agents import Agent, EpisodeSpec, ScriptedEngine, agent, rollout
from tapereel.envs import Environment, Outcome, Rewards, RewardSource
from tapereel.tapes import Answer, Tape, Task, Text
from tapereel.tapes.records import Reward


class Asks(Environment[Answer]):
    """Asks what the task says; the answer ends it. A task with `worth` in its private part is scored so."""

    async def reset(self, task: Task) -> Text:
        self.task = task
        return Text(text=str(task.public["question"] if isinstance(task.public, dict) else task.public))

    async def step(self, action: Answer) -> Outcome:
        private = self.task.private
        return Outcome(reward=private.get("worth") if isinstance(private, dict) else None, terminated=True)


@agent
async def speaker(tape: Tape, llm: Any) -> Any:
    yield Answer(text=(await llm(tape)).text)


SPEAKER: Agent = speaker


async def said(answer: str, task: Task | None = None, **options: Any) -> Tape:
    env = options.pop("env", Asks)
    journal = options.pop("journal", None)
    spec = EpisodeSpec.of(task or Task(public="q", private="a"), **options)
    return await rollout(SPEAKER, env, spec, engine=ScriptedEngine([answer]), journal=journal)


def tapes(answers: Sequence[str], task: Task | None = None, **options: Any) -> list[Tape]:
    async def every() -> list[Tape]:
        return [await said(answer, task, **options) for answer in answers]

    return asyncio.run(every())


def scores(sources: Sequence[Any], *of: Tape) -> list[list[Reward]]:
    """The records of each tape, all asked at once."""
    rewards = Rewards(s if isinstance(s, RewardSource) else RewardSource(score=s) for s in sources)

    async def every() -> list[list[Reward]]:
        return await asyncio.gather(*(rewards.score(tape) for tape in of))

    return asyncio.run(every())


def failure(records: Sequence[Reward]) -> str:
    """What the failed source of these records says; an error where none failed."""
    (failed,) = [r for r in records if r.value != r.value]
    assert all(r.weight == 0 for r in records), "one that failed leaves the tape unscored"
    assert isinstance(failed.evidence, dict)
    return str(failed.evidence["failed"])
