"""What the tests of the verbs name in configurations: the digits of the example, and worlds that break."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path
from typing import Any

from tapereel.agents import Request, agent
from tapereel.envs import Outcome, Taskset
from tapereel.envs.load_named import load_named
from tapereel.tapes import Task
from tapereel.tapes.store import read_metrics

EXAMPLE = str(Path(__file__).resolve().parents[2] / "examples" / "digits.py")
Digits: Any = load_named(f"{EXAMPLE}:Digits")
Digit: Any = load_named(f"{EXAMPLE}:Digit")
Said: Any = load_named(f"{EXAMPLE}:Said")


class Deadly(Digits):
    """Kills its process at the step that the environment variable DEADLY_STEP counts to."""

    steps = 0

    async def step(self, action: Any) -> Outcome:
        Deadly.steps += 1
        if Deadly.steps == int(os.environ.get("DEADLY_STEP", "-1")):
            os.kill(os.getpid(), signal.SIGKILL)
        return await super().step(action)


class Signalled(Digits):
    """Signals its process at a step. The environment variable SIGNAL_STEP has both numbers: `STEP SIGNAL`."""

    steps = 0

    async def step(self, action: Any) -> Outcome:
        Signalled.steps += 1
        at, _, number = os.environ.get("SIGNAL_STEP", "-1 0").partition(" ")
        if Signalled.steps == int(at):
            os.kill(os.getpid(), int(number))
        return await super().step(action)


class Rising(Digits):
    """Every answer earns 0 until the run in the environment variable RISING_RUN has made RISING_AT updates, then 1."""

    async def step(self, action: Any) -> Outcome:
        outcome = await super().step(action)
        lines = read_metrics(Path(os.environ["RISING_RUN"], "metrics.jsonl"))
        reward = float(sum(line["phase"] == "rl" for line in lines) >= int(os.environ["RISING_AT"]))
        return Outcome(reward=reward, terminated=outcome.terminated)


class BreaksLater(Digits):
    """Works for 30 steps, then breaks in every episode."""

    steps = 0

    async def step(self, action: Any) -> Outcome:
        BreaksLater.steps += 1
        if BreaksLater.steps > 30:
            raise OSError("the world broke")
        return await super().step(action)


class Broken(Digits):
    async def step(self, action: Any) -> Outcome:
        raise OSError("the world broke")


class BrokenForThree(Digits):
    async def step(self, action: Any) -> Outcome:
        if self.wanted == "4":
            raise OSError("the world broke")
        return await super().step(action)


class ScoresThreeAndBreaks(Digits):
    """After 3 the first answer earns 0, and the second breaks the world."""

    begun = False

    async def step(self, action: Any) -> Outcome:
        if self.wanted != "4":
            return await super().step(action)
        if self.begun:
            raise OSError("the world broke")
        self.begun = True
        return Outcome(reward=0.0, observation=Digit(text="3"))


class WaitsForThree(Digits):
    async def step(self, action: Any) -> Outcome:
        if self.wanted == "4":
            await asyncio.Event().wait()
        return await super().step(action)


class Extreme(Digits):
    """Rewards as large as a float can be, and some that are too large for their squares; the others are as ever."""

    async def step(self, action: Any) -> Outcome:
        size = {"4": 1e308, "7": 1e200}.get(self.wanted)
        outcome = await super().step(action)
        if size is None:
            return outcome
        signed = size if outcome.reward else -size
        return Outcome(reward={"exact": signed, "brief": 0.25}, metrics={"size": signed}, terminated=True)


class Picky(Digits):
    def __init__(self, size: int) -> None:
        self.size = size


class Counted(Digits):
    closed = 0

    async def close(self) -> None:
        Counted.closed += 1


instance = Digits()


def make_counted() -> Any:
    return Counted()


def make_nothing() -> None:
    return None


async def make_later() -> Any:
    return Digits()


async def undecorated(tape: Any, llm: Any) -> Any:
    yield Said(text=(await llm(tape)).text)


@agent
async def changes_its_mind(tape: Any, llm: Any) -> Any:
    await llm(tape, system="1", max_tokens=2)
    yield Said(text=(await llm(tape, system="2", max_tokens=2)).text)


@agent
async def goes_on(tape: Any, llm: Any) -> Any:
    yield Said(text=(await llm(tape)).text)


@agent
async def fails(tape: Any, llm: Any) -> Any:
    await llm(tape)
    raise ValueError("a bug")
    yield


@agent
async def trips_over_nines(tape: Any, llm: Any) -> Any:
    if tape.observations[-1].text.startswith("9"):
        raise ValueError("nine")
    yield Said(text=(await llm(tape)).text)


number = 7
few = Taskset([Task(public="3", private="4"), Task(public="5", private="6")])
three = Taskset([Task(public="3", private="4")])


def by_index(k: int) -> Task:
    return Task(public=str(k), private=str(k + 1))


def listed() -> list[int]:
    return [1, 2, 3]


async def listed_later() -> list[int]:
    return [1]


def to_task(row: Any) -> Task:
    shown = row["shown"] if isinstance(row, dict) else row
    return Task(public=str(shown), private=str(int(shown) + 1))


def half_right(request: Request) -> str:
    shown = request.messages[-1]["content"]
    return str((int(shown[-1]) + 1) % 10) if len(shown) > 5 else "no"
