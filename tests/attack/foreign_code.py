"""All the code that a run can name: agent, environment, tasks, rewards, engine, policy of answers, recipe and term.

test_foreign_run.py copies this file into a run directory. Importing the copy there leaves a mark, as an attacker's code
would; importing another copy of it leaves a mark elsewhere.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

from torch import Tensor

from tapereel.agents import LLM, Request, ScriptedEngine, agent
from tapereel.envs import Environment, Outcome, Taskset
from tapereel.finetune import Stream
from tapereel.finetune.objective import Context, Regulariser
from tapereel.finetune.recipes import get_recipe
from tapereel.tapes import Action, Observation, Tape, Task

with Path(__file__).with_suffix(".executed").open("a") as mark:
    mark.write("executed\n")


class ForeignDigit(Observation):
    text: str


class ForeignWord(Action):
    text: str


class Digits(Environment[ForeignWord]):
    async def reset(self, task: Task) -> ForeignDigit:
        self.wanted = str(task.private)
        return ForeignDigit(text=str(task.public))

    async def step(self, action: ForeignWord) -> Outcome:
        return Outcome(reward=float(action.text == self.wanted), terminated=True)


@agent
async def player(tape: Tape, llm: LLM) -> AsyncIterator[ForeignWord]:
    yield ForeignWord(text=(await llm(tape, max_tokens=1)).text)


def tasks() -> Taskset:
    return Taskset([Task(public=str(k), private=str((k + 1) % 10)) for k in range(10)])


def score(tape: Tape) -> float:
    return float(len(str(tape.actions[-1])) == 1)


def counting(request: Request) -> str:
    return str((int(str(request.messages[-1]["content"])[-1]) + 1) % 10)


def engine() -> ScriptedEngine:
    return ScriptedEngine(counting)


class Nudge(Regulariser):
    """A loss of the run's own: a bonus on entropy, so that there is a gradient whatever the rewards are."""

    coefficient: float = 0.05

    @property
    def needs_entropy(self) -> bool:
        return True

    def __call__(
        self, lp: Tensor, entropy: Tensor | None, index: Tensor, stream: Stream, beta: float, context: Context
    ) -> Tensor:
        assert entropy is not None
        return -self.coefficient * entropy


nudged = get_recipe("grpo").but(name="nudged", regulariser=[Nudge()])
