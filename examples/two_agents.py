"""Two agents on one tape, and both learn: a guide who sees a letter, and a seeker who hears only what the guide says.

Each has a policy of its own. The guide earns when the seeker finds the letter that was shown, and the seeker when it
says the letter that belongs to the guide's word; so each is compared with itself in the other attempts, by its own
reward (`by_agent`, components named `name@path`). `--shared` gives both one set of weights.

    python examples/two_agents.py runs/two --updates 40
"""

import argparse
import asyncio
import statistics
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from tapereel.agents import LLM, Agent, Limits, delegate
from tapereel.agents.embedded import EmbeddedEngine
from tapereel.agents.multi import TeamEngine
from tapereel.agents.render import Renderer
from tapereel.agents.tiny import char_tokenizer, tiny_model
from tapereel.envs import Environment, Outcome
from tapereel.finetune import History, Loop, LoopConfig, OptimiserConfig, Trainer, get_recipe
from tapereel.finetune.players import Player
from tapereel.tapes import Action, Observation, Sampling, Step, Tape, Thought
from tapereel.tapes.store import Store

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

    async def reset(self, task: str) -> Letter:
        self.letter = task
        return Letter(text=task)

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


def policy(store: Store, name: str, folder: Path, config: LoopConfig, seed: int) -> History:
    """Weights, a trainer and a lineage of their own."""
    tokenizer = char_tokenizer(LETTERS + LETTERS.upper() + "?")
    model = tiny_model(tokenizer, "micro", seed=seed, context=32)
    recipe = get_recipe(config.recipe, config.changes)
    history = History(store, name, folder / name, model, lambda phase: Trainer(model, recipe, lr=config.optimiser.lr),
                      renderer=Renderer(tokenizer), tokenizer=tokenizer)  # fmt: skip
    store.append_layer(history.publish_record("start")[1])
    return history


def train(out: Path, updates: int, *, shared: bool = False, seed: int = 0) -> list[dict[str, Any]]:
    """The lines of metrics, one for each update."""
    lines: list[dict[str, Any]] = []
    config = LoopConfig(
        updates=updates, groups=8, group_size=8, by_agent=True, agents=None if shared else (GUIDE,),
        sampling=Sampling(max_tokens=1), limits=Limits(turns=1, seconds=60.0), optimiser=OptimiserConfig(lr=1e-2),
    )  # fmt: skip
    with Store.create(out) as store:
        guide = policy(store, "guide", out / "checkpoints", config, seed)
        engines = {GUIDE: EmbeddedEngine(guide.model, guide.renderer, version=guide.version)}
        players = []
        if shared:
            engines[SEEKER] = engines[GUIDE]
        else:
            seeker = policy(store, "seeker", out / "checkpoints", config, seed + 1000)
            engines[SEEKER] = EmbeddedEngine(seeker.model, seeker.renderer, version=seeker.version)
            players.append(Player(history=seeker, engine=engines[SEEKER], agents=(SEEKER,)))
        loop = Loop(config, store=store, history=guide, engine=TeamEngine(engines), agent=Pair(), env=Hidden,
                    tasks=lambda k: LETTERS[k % len(LETTERS)], players=players, seed=seed,
                    on_update=lambda report: lines.append(report.metrics))  # fmt: skip
        asyncio.run(loop.run())
        assert store.books().closes
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--updates", type=int, default=40)
    parser.add_argument("--shared", action="store_true", help="one set of weights for both")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    lines = train(args.out, args.updates, shared=args.shared, seed=args.seed)
    for path in (GUIDE, SEEKER):
        rewards = [line[f"reward/{path}"] for line in lines]
        print(f"{path}: {statistics.fmean(rewards[:5]):.2f} -> {statistics.fmean(rewards[-5:]):.2f}")


if __name__ == "__main__":
    main()
