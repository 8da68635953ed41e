"""The three tasks of `learning.py`: who acts, where, on what, and who demonstrates it badly enough to leave room.

    sums    three numbers to add up with a calculator that takes two
    lake    gymnasium's FrozenLake on random 4x4 maps, not slippery; the agent sees the four cells around it
    words   reasoning-gym's spell_backward, with its own scorer (the share of letters in place)

Each has tasks by seed, an agent, an environment and a demonstrator, as functions that a configuration can name.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tapereel.agents import ChatAgent, Request
from tapereel.envs import (
    Calculator,
    Environment,
    GymAction,
    GymEnvironment,
    Outcome,
    Taskset,
    calculator_tasks,
    reasoning_scorer,
    reasoning_tasks,
)
from tapereel.finetune.run.demo_scene import calculator_agent
from tapereel.tapes import Answer, Task, Text

__all__ = ["TASKS", "Learnt", "calculator_agent"]


def heard(request: Request) -> list[str]:
    """What the environment has said so far."""
    return [message["content"] for message in request.messages if message["role"] == "user"]


# sums


def calculator() -> Calculator:
    """At most four actions; three solve it."""
    return Calculator(max_turns=4)


def demonstrate_sums(request: Request) -> str:
    """Seven of ten episodes go about it the wrong way: half of these answer a random number without a call, the others
    the result of the first call. Each turn draws the choice again, with probabilities that give these shares."""
    question, *results = heard(request)
    terms, rng = question.split("+"), random.Random(request.seed)
    if not results and rng.random() < 0.35:
        return f"a{rng.randrange(1000):03d}"
    if len(results) == len(terms) - 1 or (len(results) == 1 and rng.random() < 0.35 / 0.65):
        return f"a{results[-1]}"
    return f"c{results[-1] if results else terms[0]}+{terms[len(results) + 1]}"


# lake

SIDE, MOVES = 4, 12
LEFT, DOWN, RIGHT, UP = range(4)
AROUND = ((0, -1), (1, 0), (0, 1), (-1, 0))
"""(rows, columns) that each action moves."""


class Lake(GymEnvironment):
    """A task's private part is a map. Seen are the cells to the left, below, to the right and above; `#`: the edge."""

    blocking = False

    def __init__(self) -> None:
        super().__init__("FrozenLake-v1", observe=look_around)

    async def reset(self, task: Any) -> Any:
        """Each episode has a map of its own, and an instance lives for one episode."""
        self.make = {"desc": list(task), "is_slippery": False, "max_episode_steps": MOVES, "disable_env_checker": True}
        return await super().reset(None)


def look_around(_: Any, env: Any) -> Text:
    """`#FF#` in the upper left corner."""
    lake = env.unwrapped
    return Text(text=around([b"".join(row).decode() for row in lake.desc], divmod(int(lake.s), SIDE)))


def around(lake: Any, place: tuple[int, int]) -> str:
    """The cells next to `place`, in the order of the actions."""
    seen = ""
    for down, right in AROUND:
        row, column = place[0] + down, place[1] + right
        seen += lake[row][column] if 0 <= row < SIDE and 0 <= column < SIDE else "#"
    return seen


def lakes(size: int, seed: int) -> Taskset:
    """Distinct maps that can be crossed; a cell is frozen at odds of 0.65."""
    from gymnasium.envs.toy_text.frozen_lake import generate_random_map

    def maps() -> Iterator[Task]:
        for k in range(20 * size):
            yield Task.of(generate_random_map(SIDE, p=0.65, seed=seed * 1_000_003 + k))

    return Taskset(maps, size=size, name="lakes")


def walker() -> ChatAgent:
    """Answers with the digit of an action."""
    return ChatAgent(parse=lambda text: GymAction(value=int(text)), name="walker", misreads=0)


def demonstrate_lake(request: Request) -> str:
    """Half of the moves are drawn blindly; the others are those of a careful walker."""
    rng = random.Random(request.seed)
    return str(rng.randrange(4) if rng.random() < 0.5 else careful(heard(request)[-1], rng))


def careful(seen: str, rng: random.Random) -> int:
    """Never into a hole; down and right where that is possible. Remembers nothing."""
    if "G" in seen:
        return seen.index("G")
    ways = [a for a in (DOWN, RIGHT) if seen[a] == "F"] or [a for a in (LEFT, UP) if seen[a] in "FS"]
    return rng.choice(ways)


# words


class Backward(Environment[Answer]):
    """One word, one answer."""

    async def reset(self, task: Task) -> Text:
        self.task = task
        return Text(text=task.public["question"])  # type: ignore[index, call-overload]

    async def step(self, action: Answer) -> Outcome:
        return Outcome(reward=scorer()(action.text, self.task), terminated=True)


@functools.cache
def scorer() -> Callable[[str | None, Task], float]:
    """The dataset's own."""
    return reasoning_scorer("spell_backward")


def words(size: int, seed: int) -> Taskset:
    """Words of five and six small letters."""
    return reasoning_tasks(
        "spell_backward",
        size,
        seed,
        min_word_len=5,
        max_word_len=6,
        keep=lambda entry: entry["metadata"]["word"].isalpha() and entry["metadata"]["word"].islower(),
        question=lambda entry: entry["metadata"]["word"],
    )


def speller() -> ChatAgent:
    """Whatever it writes is its answer."""
    return ChatAgent(parse=lambda text: Answer(text=text), name="speller")


def demonstrate_words(request: Request) -> str:
    """Every third letter is any letter of the word."""
    rng, word = random.Random(request.seed), heard(request)[0]
    return "".join(rng.choice(word) if rng.random() < 1 / 3 else letter for letter in reversed(word))


@dataclass(frozen=True)
class Learnt:
    """One task of the table."""

    tasks: Callable[[int, int], Taskset]
    """(size, seed) -> tasks."""
    size: int
    """Tasks in all; `held_out` of them are never trained on."""
    agent: str
    env: str
    policy: str
    """The demonstrator."""
    model: str
    """Size of the tiny model."""
    context: int
    """Tokens of prompt and completion together."""
    max_tokens: int
    turns: int
    warm: int
    """Updates of imitation, of 64 demonstrations each."""
    updates: int
    """Updates of the loop."""
    groups: int
    lr: float
    optimum: str
    """What the best policy earns."""
    held_out: int = 256
    warm_lr: float = 3e-3


def _named(name: str) -> str:
    return f"{Path(__file__).resolve()}:{name}"


TASKS = {
    "sums": Learnt(
        lambda size, seed: calculator_tasks(size, seed),
        8_000,
        _named("calculator_agent"),
        _named("calculator"),
        _named("demonstrate_sums"),
        model="small",
        context=64,
        max_tokens=12,
        turns=4,
        warm=400,
        updates=40,
        groups=8,
        lr=3e-4,
        optimum="1",
    ),
    "lake": Learnt(
        lakes,
        2_000,
        _named("walker"),
        _named("Lake"),
        _named("demonstrate_lake"),
        model="tiny",
        context=128,
        max_tokens=2,
        turns=MOVES,
        warm=200,
        updates=16,
        groups=8,
        lr=1e-3,
        optimum="1 for who sees the whole map",
    ),
    "words": Learnt(
        words,
        4_000,
        _named("speller"),
        _named("Backward"),
        _named("demonstrate_words"),
        model="tiny",
        context=32,
        max_tokens=8,
        turns=1,
        warm=200,
        updates=30,
        groups=8,
        lr=1e-3,
        optimum="1",
    ),
}
