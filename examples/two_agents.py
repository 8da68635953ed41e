"""Two agents on one tape, and both learn: a guide who sees a letter, and a seeker who hears only what the guide says.

Each has a policy of its own. The guide earns when it says the capital of the letter that was shown, and the seeker when
it says the letter of the capital that it heard; so each is compared with itself in the other attempts, by its own
reward (`by_agent`, components named `name@path`). The settings are in `two_agents.yaml`.

    python examples/two_agents.py runs/pair        # saves two tiny untrained models
    tapereel train --config examples/two_agents.yaml --out runs/two
"""

import sys
from collections.abc import AsyncIterator
from pathlib import Path

from tapereel.agents import LLM, Agent, delegate
from tapereel.envs import Environment, Outcome
from tapereel.tapes import Action, Observation, Step, Tape, Task, Thought

LETTERS = "abcd"
GUIDE, SEEKER = "pair/guide", "pair/seeker"


class Letter(Observation):
    text: str


class Word(Thought):
    """What the guide says; the seeker hears it."""

    text: str


class Found(Action):
    text: str
    word: str


class Hidden(Environment[Found]):
    """A task is a letter. The guide should say its capital; the seeker, the letter of the capital that it heard."""

    async def reset(self, task: Task) -> Letter:
        self.letter = str(task.public)
        return Letter(text=self.letter)

    async def step(self, action: Found) -> Outcome:
        said = action.word[:1]
        told, heard = said == self.letter.upper(), bool(said) and action.text[:1] == said.lower()
        return Outcome(reward={f"told@{GUIDE}": float(told), f"heard@{SEEKER}": float(heard)}, terminated=True)


class Guide(Agent):
    async def act(self, tape: Tape, llm: LLM) -> AsyncIterator[Step]:
        yield Word(text=(await llm(tape)).text)


class Seeker(Agent):
    async def act(self, tape: Tape, llm: LLM) -> AsyncIterator[Step]:
        word = tape.thoughts[-1]
        assert isinstance(word, Word)
        reply = await llm(tape, messages=[{"role": "user", "content": word.text or "?"}])
        yield Found(text=reply.text, word=word.text)


class Pair(Agent):
    """One turn: the guide speaks, then the seeker acts."""

    def __init__(self) -> None:
        self.guide, self.seeker = Guide(), Seeker()

    async def act(self, tape: Tape, llm: LLM) -> AsyncIterator[Step]:
        async for step in delegate("guide", self.guide, tape, llm):
            yield step
        async for step in delegate("seeker", self.seeker, tape, llm):
            yield step


def tasks() -> list[Task]:
    return [Task(public=letter) for letter in LETTERS]


def save_models(folder: str) -> None:
    from tapereel.agents.engines.embedded.tiny_model import char_tokenizer, tiny_model

    tokenizer = char_tokenizer(LETTERS + LETTERS.upper() + "?")
    for seed, name in enumerate(("guide", "seeker")):
        path = Path(folder, name)
        tiny_model(tokenizer, "micro", seed=seed, context=32).save_pretrained(path)
        tokenizer.save_pretrained(path)


if __name__ == "__main__":
    save_models(sys.argv[1])
