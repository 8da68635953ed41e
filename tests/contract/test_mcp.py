"""MCP beyond our own server and SDK: the server from npm that shows every feature, and version 1 of the Python SDK."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
from pathlib import Path
from shutil import which
from typing import Any

import pytest

from tapereel.agents import ChatAgent, ScriptedEngine, rollout
from tapereel.envs.adapters import McpServer, ToolEnvironment
from tapereel.tapes import Answer, CauseType, Status, Task, ToolCalls, ToolResults

from .npm_mcp import OLDER_DONE, OLDER_PYTHON, ROOT, SERVER

pytestmark = [pytest.mark.contract, pytest.mark.timeout(300)]
NODE = which("node")
needs_npm = pytest.mark.skipif(NODE is None or not SERVER.exists(), reason="run tests/contract/npm_mcp.py first")
AGENT = ChatAgent(actions=[ToolCalls], plain=Answer)


def everything(**options: Any) -> McpServer:
    return McpServer.stdio(str(NODE), str(SERVER), "stdio", **options)


def call(name: str, **arguments: Any) -> str:
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


@needs_npm
def test_the_tools_of_a_server_in_another_language_are_offered_and_called():
    pytest.importorskip("mcp")
    script = call("echo", message="grüß") + call("get-sum", a=2, b=3) + call("get-tiny-image") + call("get-sum", a="x")
    tape = asyncio.run(
        rollout(
            AGENT, lambda: ToolEnvironment([everything()]), Task(public="?"), engine=ScriptedEngine([script, "done"])
        )
    )
    assert (tape.status, tape.cause) == (Status.FINISHED, None)
    (seen,) = [step for step in tape if isinstance(step, ToolResults)]
    echoed, added, image, wrong = seen.results
    assert (echoed.content, echoed.error) == ("Echo: grüß", False)
    assert "5" in added.content
    assert [(one.width > 0, one.data is not None) for one in image.pictures] == [(True, True)]
    assert wrong.error
    offered = {t["function"]["name"]: t["function"]["parameters"] for t in tape[0].tools}
    assert offered["get-sum"]["required"] == ["a", "b"]


@needs_npm
def test_many_calls_at_once_over_one_shared_session():
    pytest.importorskip("mcp")
    server = everything(shared=True)

    async def many() -> list[str]:
        async def one(k: int) -> str:
            tools = {tool.name: tool for tool in await server.open()}
            return await tools["echo"].call({"message": str(k)})

        try:
            return await asyncio.gather(*(one(k) for k in range(50)))
        finally:
            await server.stop()

    assert asyncio.run(many()) == [f"Echo: {k}" for k in range(50)]


@needs_npm
def test_its_death_is_the_environments_fault():
    pytest.importorskip("mcp")

    def kill() -> int:
        return subprocess.run(["pkill", "-P", str(os.getpid()), "-f", str(SERVER)], timeout=60).returncode

    class Dies(ToolEnvironment):
        async def step(self, action: ToolCalls | Answer) -> Any:
            assert await asyncio.to_thread(kill) == 0
            return await super().step(action)

    tape = asyncio.run(
        rollout(
            AGENT,
            lambda: Dies([everything()]),
            Task(public="?"),
            engine=ScriptedEngine([call("echo", message="x"), "done"]),
        )
    )
    assert tape.cause is not None
    assert (tape.status, tape.cause.type, tape.cause.error) == (Status.ERROR, CauseType.ENVIRONMENT, "ToolsLost")


OLDER = """
import asyncio, sys
from importlib.metadata import version
from tapereel.envs.adapters.mcp import McpServer
from tapereel.envs.adapters.tools import ToolFailed, ToolsLost

assert version("mcp").startswith("1."), version("mcp")

async def use(server):
    tools = {tool.name: tool for tool in await server.open()}
    assert tools["lookup"].effect == "pure" and tools["note"].effect == "idempotent"
    assert tools["lookup"].parameters["required"] == ["word"]
    assert await tools["lookup"].call({"word": "amber"}) == "4711"
    _, photo, _ = await tools["photo"].call({})
    assert (photo.width, photo.height) == (3, 2)
    try:
        await tools["picture"].call({})
    except ToolFailed as error:
        assert "a dot:" in str(error)
    try:
        await tools["lookup"].call({"word": "zinc"})
    except ToolFailed as error:
        assert "zinc" in str(error)
    try:
        await tools["die"].call({})
    except ToolsLost as error:
        print(type(error).__name__)
    await server.close()

asyncio.run(use(McpServer.stdio(sys.executable, sys.argv[1], "stdio")))
"""


@pytest.mark.skipif(not OLDER_DONE.exists(), reason="run tests/contract/npm_mcp.py first")
def test_version_1_of_the_sdk_will_do(tmp_path: Path):
    (tmp_path / "tapereel").symlink_to(ROOT)
    (tmp_path / "use.py").write_text(OLDER, encoding="utf-8")
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    server = ROOT / "tests" / "envs" / "mcp_server.py"
    done = subprocess.run(
        [OLDER_PYTHON, str(tmp_path / "use.py"), str(server)],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "ToolsLost\n"
