"""An agent with the tools of an MCP server: it looks a word up and answers, and every call is on the tape.

    python examples/mcp_agent.py            plays one episode with a script in place of a model
    python examples/mcp_agent.py serve      is the server, over stdio

With a model: `tapereel run --agent examples/mcp_agent.py:asker --env examples/mcp_agent.py:Codes
--tasks examples/mcp_agent.py:tasks --model MODEL --out runs/codes`. Needs `pip install ".[mcp]"`.
"""

import asyncio
import json
import sys

from tapereel import ToolEnvironment
from tapereel.agents import ChatAgent, ScriptedEngine, rollout
from tapereel.envs import Outcome, Taskset
from tapereel.envs.adapters.mcp import McpServer
from tapereel.tapes import Answer, Task, ToolCalls

CODES = {"amber": "4711", "birch": "0815", "cedar": "1234"}
# One process serves all episodes. What it does is declared: it only reads, so any tape can be executed again.
SERVER = McpServer.stdio(sys.executable, __file__, "serve", shared=True, effect="pure")


class Codes(ToolEnvironment):
    """Asks for the code of a word, which only the server knows."""

    def __init__(self) -> None:
        super().__init__([SERVER])

    async def prompt(self, task: Task) -> str:
        return f"What is the code of {task.public}? Look it up, and answer with the code alone."

    async def answered(self, text: str) -> Outcome:
        return Outcome(reward=float(text.strip() == self.task.private), terminated=True)


asker = ChatAgent("You have tools.", actions=[ToolCalls], plain=Answer)


def tasks() -> Taskset:
    return Taskset([Task(public=word, private=code) for word, code in CODES.items()])


def serve() -> None:
    try:
        from mcp.server.mcpserver import MCPServer as Server
    except ModuleNotFoundError:  # version 1 of the SDK
        from mcp.server.fastmcp import FastMCP as Server
    server = Server("codes")

    @server.tool()
    def lookup(word: str) -> str:
        """The code of a word."""
        return CODES[word]

    server.run("stdio")


async def main() -> None:
    call = json.dumps({"name": "lookup", "arguments": {"word": "birch"}})
    script = ScriptedEngine([f"<tool_call>{call}</tool_call>", "0815"])
    tape = await rollout(asker, Codes, Task(public="birch", private="0815"), engine=script)
    for step in tape:
        print(f"{step.kind}: {step}")
    print(tape.status, tape.reward)


if __name__ == "__main__":
    serve() if sys.argv[1:] == ["serve"] else asyncio.run(main())
