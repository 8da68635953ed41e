"""The task of smollm_run.py: say the first letter of a word. SmolLM2-135M can do it, and often doesn't."""

from __future__ import annotations

import re

import tapereel as tr

WORDS = """apple baker candle dragon eagle forest garden hammer island jacket kettle ladder market needle orange pencil
quarter rabbit saddle table umbrella valley window yellow zebra anchor bridge castle desert engine feather glacier
harbor insect jungle kitchen lantern mirror napkin ocean pillow quilt river silver tunnel uncle velvet wagon yard"""


class FirstLetter(tr.Environment):
    """The reward is 1 if the last single letter in the answer is the word's first one."""

    async def reset(self, task: tr.Task) -> str:
        self.word = str(task.public)
        return f"What is the first letter of the word {self.word}?"

    async def step(self, action: tr.Answer) -> tr.Outcome:
        letters = re.findall(r"\b[a-z]\b", action.text.lower())
        return tr.Outcome(reward=float(letters[-1:] == [self.word[0]]), terminated=True)


agent = tr.ChatAgent()
tasks = tr.Taskset([tr.Task(public=word) for word in WORDS.split()])
