"""A task small enough to watch a model learn it on a laptop: say the digit that comes next.

The environment shows a digit, once or several times over, and wants the one after it: 444 -> 5. `tapereel run` and
`tapereel train` take the names below; `python examples/digits.py DIR` saves a tiny untrained model to give them.
"""

import random
import sys
from collections.abc import AsyncIterator

from tapereel.agents import LLM, Request, agent
from tapereel.envs import Environment, Outcome, Taskset
from tapereel.tapes import Action, Observation, Tape, Task


class Digit(Observation):
    text: str


class Said(Action):
    text: str


class Digits(Environment[Said]):
    """A task shows `public` and wants `private`."""

    async def reset(self, task: Task) -> Digit:
        self.wanted = str(task.private)
        return Digit(text=str(task.public))

    async def step(self, action: Said) -> Outcome:
        return Outcome(reward=float(action.text == self.wanted), terminated=True)


@agent
async def player(tape: Tape, llm: LLM) -> AsyncIterator[Said]:
    yield Said(text=(await llm(tape, max_tokens=1)).text)


def tasks() -> Taskset:
    """After 9 comes 0."""
    return Taskset([Task(public=str(k) * n, private=str((k + 1) % 10)) for k in range(10) for n in range(1, 11)])


def held_out() -> Taskset:
    """Longer than any of `tasks`."""
    return Taskset([Task(public=str(k) * 11, private=str((k + 1) % 10)) for k in range(10)])


def counting(request: Request) -> str:
    """What a model that can count would say."""
    return str((int(request.messages[-1]["content"][-1]) + 1) % 10)


def blindly(seen: Digit, rng: random.Random) -> Said:
    """A policy for `tapereel check env`."""
    return Said(text=str(rng.randrange(10)))


def close(tape: Tape) -> float:
    """For `tapereel replay rewards`: 1 for the digit that was wanted, less the further off it is, 0 for no digit."""
    said = tape.actions[-1]
    if not isinstance(said, Said) or not said.text.isdigit():
        return 0.0
    return 1 - abs(int(said.text) - int(tape.begin.task.private)) / 10


def save_model(folder: str) -> None:
    from tapereel.agents.engines.embedded.tiny_model import char_tokenizer, tiny_model

    tokenizer = char_tokenizer("0123456789")
    tiny_model(tokenizer, "micro", context=32).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


if __name__ == "__main__":
    save_model(sys.argv[1])
