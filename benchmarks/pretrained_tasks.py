"""The tasks of `pretrained.py`: examples/first_letter.py, one with a tool and two turns, and one that a model of 135 M
weights can't learn."""

from __future__ import annotations

import itertools
import random
import re
import runpy
from collections.abc import Callable, Sequence
from pathlib import Path

import tapereel as tr
from tapereel.agents import Agent
from tapereel.envs.adapters.tools import ToolEnvironment
from tapereel.envs.environment import EnvironmentFactory
from tapereel.tapes import Answer, ToolCall, ToolCalls

EXAMPLE = Path(__file__).resolve().parents[1] / "examples" / "first_letter.py"

ITEMS = """lamp chair table clock mirror carpet kettle basket ladder hammer pillow candle bottle pencil shovel bucket
blanket guitar camera helmet wallet ribbon saddle needle anchor drum fan hat jar key map net pan ring scarf tent vase
whistle broom brush button cup desk flag glove jacket knife mop napkin plate"""
COLOURS = "red blue green yellow white black brown grey pink purple golden orange"
ARTICLES = [f"{colour} {item}" for colour in COLOURS.split() for item in ITEMS.split()]
PRICES = dict(zip(ARTICLES, random.Random(0).choices(range(10, 100), k=len(ARTICLES)), strict=True))


class Shop(ToolEnvironment):
    """The agent can't know a price, so it must look it up and say it. No price stands in the question."""

    def __init__(self) -> None:
        super().__init__([self.price])

    def price(self, article: str) -> str:
        """The price of an article."""
        return f"The {article} costs {PRICES[article]}."

    async def prompt(self, task: tr.Task) -> str:
        return f"What is the price of the {task.public}?"

    async def answered(self, text: str) -> tr.Outcome:
        said = re.findall(r"\d+", text)
        return tr.Outcome(reward=float(said[-1:] == [str(PRICES[str(self.task.public)])]), terminated=True)


def called(text: str) -> ToolCalls | Answer:
    """An answer without a number that names an article looks it up. SmolLM2's chat template can't offer tools, and a
    model of its size hardly ever writes a call in JSON."""
    words = re.findall(r"[a-z]+", text.lower())
    named = [article for article in map(" ".join, itertools.pairwise(words)) if article in PRICES]
    if not named or re.search(r"\d", text):
        return Answer(text=text)
    return ToolCalls(calls=(ToolCall(id="0", name="price", arguments={"article": named[-1]}),))


class Product(tr.Environment):
    async def reset(self, task: list[int]) -> str:
        self.right = str(task[0] * task[1])
        return f"What is {task[0]} times {task[1]}?"

    async def step(self, action: Answer) -> tr.Outcome:
        said = re.findall(r"\d+", action.text.replace(",", ""))
        return tr.Outcome(reward=float(said[-1:] == [self.right]), terminated=True)


Scene = tuple[Agent, EnvironmentFactory, Sequence[object]]


def letter() -> Scene:
    example = runpy.run_path(str(EXAMPLE))
    return example["agent"], example["FirstLetter"], example["words"]


def price() -> Scene:
    return tr.ChatAgent(parse=called, max_tokens=24), Shop, [tr.Task(public=article) for article in ARTICLES]


def product() -> Scene:
    pairs = [list(pair) for pair in itertools.product(range(12, 100, 3), repeat=2)]
    return tr.ChatAgent(max_tokens=24), Product, pairs


SCENES: dict[str, Callable[[], Scene]] = {"letter": letter, "price": price, "product": product}
