"""An agent of OpenAI's Agents SDK, which knows nothing of Tapereel: a question on stdin, an answer on stdout.

`gateway_clients.py` records and replays it as it stands here. Needs `pip install openai-agents`.
"""

import sys

from agents import Agent, Runner, function_tool


@function_tool
def add(a: int, b: int) -> int:
    """the sum of a and b"""
    return a + b


if __name__ == "__main__":
    agent = Agent(name="adder", instructions="Add with the tool, then say the sum and nothing else.", tools=[add])
    print(Runner.run_sync(agent, sys.stdin.read().strip()).final_output)
