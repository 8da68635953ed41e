"""TapeAgents: CPU microseconds per step of `main_loop`, one node, a model that answers at once. Prints JSON by length.

Run with the Python of an environment that has `tapeagents`; `benchmarks/rollout_cost.py --tapeagents PYTHON` does.
Re-selection of the node is stubbed, as a single-node agent needs none; everything else is the library's own loop.
"""

import json
import logging
import time

from tapeagents.agent import Agent, Node
from tapeagents.core import LLMOutput, Prompt
from tapeagents.dialog_tape import AssistantStep, DialogTape, UserStep
from tapeagents.environment import Environment
from tapeagents.llms import LLMEvent, LLMStream
from tapeagents.llms.mock import MockLLM
from tapeagents.orchestrator import main_loop

logging.disable(logging.CRITICAL)
TEXT = "x" * 135


class InstantLLM(MockLLM):
    def generate(self, prompt):
        def answer():
            yield LLMEvent(output=LLMOutput(content=TEXT))

        return LLMStream(answer(), prompt=prompt)


class OneNode(Node):
    def make_prompt(self, agent, tape):
        return Prompt(messages=[{"role": "user", "content": tape.steps[-1].content}])

    def generate_steps(self, agent, tape, llm_stream):
        yield AssistantStep(content=llm_stream.get_text())


class OneNodeAgent(Agent[DialogTape]):
    def select_node(self, tape):
        return self.nodes[0]

    def should_stop(self, tape):
        return isinstance(tape.steps[-1], AssistantStep)


class Echo(Environment):
    def react(self, tape):
        return tape.append(UserStep(content=TEXT))


def run(steps: int) -> float:
    agent = OneNodeAgent.create(InstantLLM(), nodes=[OneNode(name="one")])
    tape = DialogTape(steps=[UserStep(content=TEXT)])
    started = time.process_time()
    last = tape
    for event in main_loop(agent, tape, Echo(), max_loops=steps // 2):
        last = event.env_tape or event.agent_tape or last
    seconds = time.process_time() - started
    if len(last.steps) != 1 + 2 * (steps // 2):
        raise RuntimeError(f"the loop ended with {len(last.steps)} steps")
    return seconds / len(last.steps) * 1e6


if __name__ == "__main__":
    run(10)
    print(json.dumps({str(n): min(run(n) for _ in range(3 if n < 1000 else 1)) for n in (10, 100, 1_000, 3_000)}))
