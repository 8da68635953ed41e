"""Geometry3K: an agent, an environment and a reward for the dataset `hiyouga/geometry3k`, school geometry with figures.

`qwen3_vl_2b.yaml` trains on it. math-verify compares the answer with the reference (`pip install "tapereel[math]"`).
"""

from collections.abc import Mapping

from tapereel import ToolEnvironment
from tapereel.agents import ChatAgent
from tapereel.envs.rewards.mathematics import math_reward
from tapereel.envs.taskset import standard_row
from tapereel.tapes import Tape, Task

agent = ChatAgent("Look at the figure, and solve the problem step by step. Put the final answer into \\boxed{}.")
columns = standard_row({"prompt": "problem", "images": "images", "answer": "answer"})


def task(row: Mapping[str, object]) -> Task:
    """The task of a row. The mark `<image>` is removed, because the figure comes before the text anyway."""
    return columns({**row, "problem": str(row["problem"]).replace("<image>", "").strip()})


class Figure(ToolEnvironment):
    """One figure with a question, and one answer. The reward `correct` scores it."""

    pixels = True

    def __init__(self) -> None:
        super().__init__(())  # no tools


def reference(tape: Tape) -> str:
    """The answer in LaTeX, such as `2 \\sqrt { 221 }`."""
    assert isinstance(tape.begin.task.private, dict)
    return f"${tape.begin.task.private['answer']}$"


correct = math_reward(name="correct", reference=reference)
