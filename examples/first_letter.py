"""SmolLM2-135M learns the first letter of a word in some minutes on a CPU: `python examples/first_letter.py [MODEL]`.

MODEL is a name on the Hugging Face Hub (by default 0.27 GB), a folder or a GGUF file.
"""

import re
import sys
from pydoc_data.topics import topics  # Python's own help pages, for their words

import tapereel as tr

words = sorted(set(re.findall(r"\b[a-z]{4,8}\b", " ".join(topics.values()))))
agent = tr.ChatAgent(max_tokens=16)


class FirstLetter(tr.Environment):
    async def reset(self, task):
        self.word = task
        return f"What is the first letter of the word {task}?"

    async def step(self, action):
        letters = re.findall(r"\b[a-z]\b", action.text.lower())  # "The first letter is B." says b
        return tr.Outcome(reward=float(letters[-1:] == [self.word[0]]), terminated=True)


if __name__ == "__main__":
    model = sys.argv[1] if len(sys.argv) > 1 else "HuggingFaceTB/SmolLM2-135M-Instruct"
    run = tr.train(agent, FirstLetter, words, model, updates=12, out="runs/first-letter")
    print(run.summary.held_out["before"], "->", run.summary.held_out["after"])
