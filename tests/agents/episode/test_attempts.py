"""The attempts at several tasks, made at once: each carries its own task, and all of a group what they share."""

from __future__ import annotations

import asyncio

import pytest

from tapereel.agents import EpisodeSpec, ScriptedEngine, rollout_group
from tapereel.tapes import Task

from ..worlds import GuessNumber, Hint, Player

TASKS = [3, 7, 5]
N = 4


class Guessing(GuessNumber):
    """The secret is the private part of a task whose public part is the same for all."""

    async def reset(self, task: Task) -> Hint:
        return await super().reset(task.private)


@pytest.mark.ledger("F09", "T10")
def test_n_attempts_at_each_task_carry_its_public_and_private_part_and_its_group_in_whatever_order_they_end():
    async def play() -> list:
        engine = ScriptedEngine(lambda request: str(1 + len(request.messages) % 9))
        groups = (
            rollout_group(
                Player(),
                Guessing,
                EpisodeSpec.of(Task(public="guess", private=task), seed=1, group=f"g{k}"),
                n=N,
                engine=engine,
            )
            for k, task in enumerate(TASKS)
        )
        return await asyncio.gather(*groups)

    groups = asyncio.run(play())
    assert [len(group) for group in groups] == [N] * len(TASKS)
    flat = [tape for group in groups for tape in group]
    for g, tape in enumerate(flat):
        i, k = divmod(g, N)
        assert (tape.begin.group, tape.begin.attempt) == (f"g{i}", k)
        assert (tape.begin.task.private, tape.begin.task.public) == (TASKS[i], "guess")
    assert len({tape.begin.env_seed for tape in groups[0]}) == 1
    assert len({tape.begin.env_seed for tape in flat}) == len(TASKS), "one text, three tasks: three groups"
    assert len({tape.begin.seed for tape in flat}) == len(flat)
