"""Tapes for the tests of what shows them: a guessing game, played by a script."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

from tapereel.agents import LLM, Agent, EpisodeSpec, ScriptedEngine, rollout
from tapereel.envs import Environment, Outcome
from tapereel.tapes import Action, Answer, Call, Cause, CauseType, Observation, Sampling, Status, Tape, Task, Text
from tapereel.tapes.arrays import floats, ints
from tapereel.tapes.journal import Journal
from tapereel.tapes.records import Begin, End, Identity, Reward
from tapereel.tapes.store import Store
from tapereel.tapes.tape import TapeLog, step_record


class Hint(Observation, kind="front_hint"):
    text: str


class Guess(Action, kind="front_guess"):
    number: int


class Guessing(Environment[Guess]):
    async def reset(self, task: int) -> Hint:
        self.secret = task
        return Hint(text="from 1 to 9")

    async def step(self, action: Guess) -> Outcome:
        if action.number == self.secret:
            return Outcome(reward={"right": 1.0}, terminated=True, metrics={"luck": 0.5})
        return Outcome(Hint(text="higher" if action.number < self.secret else "lower"), reward={"late": -0.25})

    async def finish(self, status: Status) -> Outcome:
        return Outcome(reward={"played": 0.125})


class Guesser(Agent):
    async def act(self, tape: Tape, llm: LLM) -> AsyncIterator[Guess]:
        yield Guess(number=int((await llm(tape)).text))


async def _play(answers: Sequence[str], journal: Journal | None = None, split: str = "train") -> Tape:
    spec = EpisodeSpec.of(7, split=split)
    return await rollout(Guesser(), Guessing(), spec, engine=ScriptedEngine(answers), journal=journal)


def played(*answers: str) -> Tape:
    """One episode with these answers."""
    return asyncio.run(_play(answers))


def run_of(path: Path, episodes: Sequence[tuple[str, Sequence[str]]]) -> list[Tape]:
    """A run directory with an episode for each (split, answers)."""

    async def play_all(store: Store) -> list[Tape]:
        return [await _play(answers, journal=store.writer, split=split) for split, answers in episodes]

    with Store.create(path) as store:
        return asyncio.run(play_all(store))


def sampled_tape(
    answer: str,
    *,
    logprobs: Sequence[float] | None,
    spans: tuple[tuple[str, int, int], ...] = (),
    question: str = "6*7",
    reward: float = 1.0,
) -> Tape:
    """A tape of one turn whose answer has one token a character and an end token (id 3)."""
    name = f"{random.Random(answer).getrandbits(88):022x}"
    task = Task(public=question, private="42")
    log = TapeLog(
        Begin(
            tape=name,
            task=task,
            task_hash=task.hash,
            agent=Identity(name="solver"),
            env=Identity(name="Sums"),
            env_seed=0,
            seed=0,
            split="eval",
            at=0.0,
        )
    )
    log.append(step_record(name, Text(text=question), by="env"))
    ids = ints([*map(ord, answer), 3])
    log.append(
        Call(
            tape=name,
            call=f"{name}.1",
            by="solver",
            new_prompt=ints([1]),
            completion=ids,
            text=answer,
            at=0.0,
            logprobs=None if logprobs is None else floats(logprobs),
            spans=spans,
            finish="stop",
            sampling=Sampling(),
            engine="embedded",
        )
    )
    log.append(step_record(name, Answer(text=answer), by="solver", calls=((f"{name}.1", 0, len(ids)),)))
    log.append(Reward(tape=name, step=1, name="exact", value=reward))
    log.append(End(tape=name, status=Status.FINISHED, seconds=0.5, at=1.0))
    return Tape(log)


def hostile_everywhere(path: Path, text: str) -> Path:
    """A run of one tape, `hostile`, that says `text` wherever a tape can say anything."""
    name = "hostile"
    task = Task(id=text, public=text)
    with Store.create(path) as store:
        for record in (
            Begin(
                tape=name,
                task=task,
                task_hash=task.hash,
                agent=Identity(name=text),
                env=Identity(name=text),
                env_seed=0,
                seed=0,
                group=text,
                split=text,
                at=0.0,
            ),
            step_record(name, Text(text=text), by="env"),
            Call(
                tape=name,
                call=f"{name}.1",
                by=text,
                text=text,
                engine=text,
                split=text,
                at=0.0,
                completion=ints([1]),
                logprobs=floats([-1.0]),
                spans=((text, 0, 1),),
            ),
            step_record(name, Answer(text=text), by=text, calls=((f"{name}.1", 0, 1),)),
            Reward(tape=name, step=1, name=text, value=1.0),
            Reward(tape=name, name=text, value=1.0),
            End(tape=name, status=Status.ERROR, cause=Cause(type=CauseType.AGENT, error=text, message=text), at=1.0),
        ):
            store.writer.append(record.body())
    return path
