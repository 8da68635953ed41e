"""Programs as agents: what `gateway_openai.py` and `gateway_pydantic_ai.py` do is recorded, replayed, trained on.

    tapereel run --agent examples/gateway_scene.py:speller --env examples/gateway_scene.py:Spelling \\
        --tasks examples/gateway_scene.py:words --set engine.answers='["a", "b"]' --out runs/speller
    tapereel replay agent runs/speller

Neither program is changed or imported: each is started with OPENAI_BASE_URL and OPENAI_API_KEY set, for one episode.
"""

import re
import sys
from pathlib import Path

from tapereel import Program
from tapereel.agents import Request
from tapereel.envs import Environment, Outcome
from tapereel.tapes import Answer, Text

HERE = Path(__file__).resolve().parent
speller = Program([sys.executable, str(HERE / "gateway_openai.py")], name="speller")
adder = Program([sys.executable, str(HERE / "gateway_pydantic_ai.py")], name="adder")
words = ("ab", "ba")
sums = ({"question": "what is 2 + 3?", "answer": "5"}, {"question": "what is 4 + 4?", "answer": "8"})


class Spelling(Environment[Answer]):
    """A word is to be said letter by letter; each right letter earns its share."""

    async def reset(self, task: str) -> Text:
        self.word = task
        return Text(text=task)

    async def step(self, action: Answer) -> Outcome:
        right = sum(said == letter for said, letter in zip(action.text, self.word, strict=False))
        return Outcome(reward=right / len(self.word), terminated=True)


class Sums(Environment[Answer]):
    """A question whose answer is known."""

    async def reset(self, task: dict[str, str]) -> Text:
        self.answer = task["answer"]
        return Text(text=task["question"])

    async def step(self, action: Answer) -> Outcome:
        return Outcome(reward=float(action.text == self.answer), terminated=True)


def adding(request: Request) -> str:
    """A model, as a script: calls the tool with the numbers of the question, then says what the tool gave."""
    last = request.messages[-1]
    if last["role"] == "tool":
        return str(last["content"])
    a, b = re.findall(r"\d+", last["content"])
    return f'<tool_call>{{"name": "add", "arguments": {{"a": {a}, "b": {b}}}}}</tool_call>'
