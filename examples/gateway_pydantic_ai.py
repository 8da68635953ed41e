"""A pydantic-ai agent with a tool, which knows nothing of Tapereel: a question on stdin, an answer on stdout.

`gateway_scene.py` records and replays it as it stands here. Needs `pip install "pydantic-ai-slim[openai]"`.
"""

import sys

from pydantic_ai import Agent
from pydantic_ai.models.openai import OpenAIChatModel

INSTRUCTIONS = "add with the tool, then say the sum and nothing else."


def add(a: int, b: int) -> int:
    """the sum of a and b"""
    return a + b


if __name__ == "__main__":
    agent = Agent(OpenAIChatModel("policy"), instructions=INSTRUCTIONS, tools=[add])
    print(agent.run_sync(sys.stdin.read().strip()).output)
