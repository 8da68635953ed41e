"""GSM8K: an agent, an environment and a reward for the dataset `openai/gsm8k`, school sums told in words.

`qwen3_0.6b.yaml` and `qwen3_4b.yaml` train on it. math-verify compares the answer with the reference
(`pip install "tapereel[math]"`), so 1/2, 0.5 and \\boxed{\\frac{1}{2}} are equal.
"""

from tapereel.agents import ChatAgent
from tapereel.envs import Environment, Outcome
from tapereel.envs.rewards.mathematics import last_text, math_reward
from tapereel.tapes import Answer, Tape, Task

agent = ChatAgent("Solve the problem step by step. Put the final number into \\boxed{}.")


class WordProblem(Environment[Answer]):
    """One question and one answer. The reward `correct` scores it."""

    async def reset(self, task: Task) -> str:
        assert isinstance(task.public, dict)
        return str(task.public["prompt"])

    async def step(self, action: Answer) -> Outcome:
        return Outcome(terminated=True)


def after_thought(tape: Tape) -> str:
    """The answer without the model's thought; nothing where the thought was cut off, so that a guess in it earns 0."""
    text = last_text(tape)
    return "" if "<think>" in text and "</think>" not in text else text.rpartition("</think>")[2]


def final_number(tape: Tape) -> str:
    """The reference: what GSM8K writes after `####`, without the commas of thousands."""
    assert isinstance(tape.begin.task.private, dict)
    return str(tape.begin.task.private["answer"]).rpartition("####")[2].strip().replace(",", "")


correct = math_reward(name="correct", answer=after_thought, reference=final_number)
