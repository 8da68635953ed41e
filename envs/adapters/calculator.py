"""Arithmetic with a calculator: the environment of the demo. The agent calls the tool, then answers.

The text form of actions is short, so that a tiny character-level model can learn it. `c47+83` asks the calculator,
which answers `130` (padded to `width` digits), and `a155` answers the problem. `read_action` converts text to typed
actions. The calculator computes one sum, difference or product of two integers. It never evaluates code. The reward
component `exact` is 1.0 for the right number and 0.0 for any other answer.
"""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from typing import Any

from ...tapes.common.arguments import check_arguments
from ...tapes.records import Status, Task
from ...tapes.steps import Action, Observation
from ..environment import Environment, Outcome
from ..taskset import BadTasks, Taskset
from .reasoning import reasoning_scorer, reasoning_tasks

# The operands are bounded, so a product has at most 24 digits and a call takes microseconds.
_BINARY = re.compile(r"(-?[0-9]{1,12})([+*-])(-?[0-9]{1,12})")
_NUMBER = re.compile(r"-?[0-9]{1,24}")
_WORDED = re.compile(r"([0-9]{1,12})([-+*]|[a-z]+)([0-9]{1,12})")
WORDS = {"+": ("plus", "and"), "-": ("minus", "less"), "*": ("times", "by")}
"""The words for each key of the calculator in `word_problems`."""
UNREADABLE = "?"
"""The calculator's result for an expression that it can't parse."""


class Problem(Observation, kind="calculator_problem"):
    """The problem to solve."""

    text: str
    """The problem, for example `47+83+25`."""


class Result(Observation, kind="calculator_result"):
    """The result of the calculator."""

    text: str
    """The number, padded, or `?` if the expression can't be parsed."""


class Calculate(Action, kind="calculator_call"):
    """Asks the calculator. Its text is `c47+83`."""

    expression: str

    def __str__(self) -> str:
        return f"c{self.expression}"


class FinalAnswer(Action, kind="calculator_answer"):
    """Answers the problem and ends the episode. Its text is `a155`."""

    answer: str

    def __str__(self) -> str:
        return f"a{self.answer}"


class Calculator(Environment[Calculate | FinalAnswer]):
    """One arithmetic problem. A task has a public `question` and a private `answer`, which is an integer as text."""

    kinds = (Result,)

    @check_arguments
    def __init__(self, *, width: int = 3, max_turns: int = 4, scorer: str | None = None) -> None:
        """`width` is the number of digits to which results are padded.

        The episode is truncated after `max_turns` actions. `scorer` names a reasoning-gym dataset. The score from this
        dataset's own scorer is reported as the metric `reasoning_gym`.
        """
        if not 0 <= width <= 100:
            raise ValueError(f"width is {width}; it must be from 0 to 100 digits")
        self.width = width
        self.max_turns = max_turns
        self.scorer = scorer
        self._score = reasoning_scorer(scorer) if scorer is not None else None
        self._answer: str | None = None

    async def reset(self, task: Task) -> Problem:
        public, private = task.public, task.private
        if not isinstance(public, dict) or not isinstance(private, dict):
            raise BadTasks(
                "a calculator task needs a public `question` and a private `answer`, as calculator_tasks() makes them; "
                f"task {task.id or task.hash[:12]} has {public!r:.60}"
            )
        self._task = task
        self._target = int(str(private["answer"]))
        self._answer = None
        self._turns = 0
        return Problem(text=str(public["question"]))

    async def step(self, action: Calculate | FinalAnswer) -> Outcome:
        """Calculate, or score the answer and end the episode."""
        self._turns += 1
        if isinstance(action, FinalAnswer):
            self._answer = action.answer
            return Outcome(reward=self._reward(), metrics=self._metrics(), terminated=True)
        result = Result(text=calculate(action.expression, self.width))
        return Outcome(result, truncated=self._turns >= self.max_turns)

    async def finish(self, status: Status) -> Outcome | None:
        """Score an episode that ended without an answer as wrong (0.0), so that it doesn't stay unscored."""
        if self._answer is not None:
            return None
        return Outcome(reward=self._reward(), metrics=self._metrics())

    def _reward(self) -> dict[str, float]:
        answer = self._answer
        right = answer is not None and _NUMBER.fullmatch(answer) is not None and int(answer) == self._target
        return {"exact": float(right)}

    def _metrics(self) -> dict[str, float]:
        return {"reasoning_gym": self._score(self._answer, self._task)} if self._score is not None else {}


def calculate(expression: str, width: int = 0) -> str:
    """Compute the sum, difference or product of two integers with at most 12 digits each: `47+83` gives `130`.

    The result is padded with zeros to `width` digits. For any other expression, the result is `?`.
    """
    found = _BINARY.fullmatch(expression)
    if found is None:
        return UNREADABLE
    a, operator, b = int(found[1]), found[2], int(found[3])
    value = a + b if operator == "+" else a - b if operator == "-" else a * b
    return f"{'-' if value < 0 else ''}{abs(value):0{width}d}"


def read_action(text: str) -> Calculate | FinalAnswer:
    """Parse a model's text: `c...` calls the calculator and `a...` answers.

    Raises ValueError for any other text, with a message for the model. `ChatAgent(parse=read_action)` is an agent for
    this environment.
    """
    head, rest = text[:1], text[1:]
    if head == "c" and rest:
        return Calculate(expression=rest)
    if head == "a" and rest:
        return FinalAnswer(answer=rest)
    raise ValueError("write c and two numbers (c12+34) to calculate, or a and the number (a46) to answer")


def calculator_tasks(size: int, seed: int = 0) -> Taskset:
    """Return `size` distinct sums of three two-digit numbers, from reasoning-gym's `chain_sum` problems without minus.

    Split them by hash: `train, held_out = calculator_tasks(14_000).split(0.9, 0.1)`.
    """
    return reasoning_tasks(
        "chain_sum",
        size,
        seed,
        keep=lambda entry: "-" not in entry["metadata"]["expression"],
        question=lambda entry: entry["metadata"]["expression"].replace(" ", ""),
        min_terms=3,
        max_terms=3,
        min_digits=2,
        max_digits=2,
    )


def word_problems(size: int, seed: int = 0, *, digits: int = 2, symbols: bool = False) -> Taskset:
    """Return `size` distinct problems with two numbers, from reasoning-gym's `basic_arithmetic`.

    The numbers have up to `digits` digits. In each problem, the operator is replaced by one of its words in `WORDS`,
    chosen with equal probability, as in `47plus83`. With `symbols`, the operator stays, as in `47+83`.
    """

    def question(entry: dict[str, Any]) -> str:
        found = _BINARY.fullmatch(entry["metadata"]["expression"].replace(" ", ""))
        assert found is not None
        a, key, b = found.groups()
        return found[0] if symbols else f"{a}{random.Random(found[0]).choice(WORDS[key])}{b}"

    return reasoning_tasks(
        "basic_arithmetic",
        size,
        seed,
        question=question,
        min_terms=2,
        max_terms=2,
        min_digits=digits,
        max_digits=digits,
        operators=list(WORDS),
        allow_parentheses=False,
        allow_negation=False,
    )


def demonstrate(
    question: str, results: Sequence[str], rng: random.Random, *, guess: float = 0.1, width: int = 3
) -> str:
    """Return the next text of a demonstrator that knows the calculator's keys, but not the words in `word_problems`.

    `results` holds the calculator's results so far. For `47+83`, the demonstrator uses the calculator and answers with
    the result. For `47plus83`, it presses a random key instead. In a share `guess` of these episodes, it makes no call
    and answers with a random number. Thus the demonstrations don't reveal what the words mean.
    """
    found = _WORDED.fullmatch(question)
    if found is None:
        raise BadTasks(f"the demonstrator works on problems like 47+83 or 47plus83, not {question!r}")
    a, key, b = found.groups()
    if results:
        return f"a{results[-1]}"
    if key not in WORDS:
        if rng.random() < guess:
            return f"a{rng.randrange(10**width):0{width}d}"
        key = rng.choice(list(WORDS))
    return f"c{a}{key}{b}"
