"""MCP: a real server of the official SDK over stdio and HTTP, what it hints, what it says, and its death."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tapereel.agents import ChatAgent, ScriptedEngine, rollout
from tapereel.envs import Outcome
from tapereel.envs.adapters import McpServer, ToolEnvironment, ToolFailed
from tapereel.envs.adapters.tools import Tool, ToolsLost
from tapereel.tapes import Answer, CauseType, MissingExtra, Picture, Status, Tape, Task, ToolCalls, ToolResults
from tapereel.tapes.errors import BadArgument

pytest.importorskip("mcp")
SERVER = Path(__file__).parents[1] / "mcp_server.py"
AGENT = ChatAgent(actions=[ToolCalls], plain=Answer)
TASK = Task(public="What is the code of amber?", private="4711")


class Asked(ToolEnvironment):
    """Wants the code of a word."""

    async def answered(self, text: str) -> Outcome:
        return Outcome(reward=float(text == self.task.private), terminated=True)


def over_stdio(**options: Any) -> McpServer:
    return McpServer.stdio(sys.executable, str(SERVER), "stdio", **options)


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    with socket.create_server(("127.0.0.1", 0)) as found:
        port = found.getsockname()[1]
    process = subprocess.Popen(
        [sys.executable, str(SERVER), "http", str(port)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        for _ in range(1200):
            assert process.poll() is None, "the server ended at once"
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port)):
                break
            time.sleep(0.05)
        yield f"http://127.0.0.1:{port}/mcp"
    finally:
        process.kill()
        process.wait(60)


def called(*calls: tuple[str, dict[str, Any]]) -> str:
    return "".join(f"<tool_call>{json.dumps({'name': n, 'arguments': a})}</tool_call>" for n, a in calls)


def play(server: McpServer, *answers: str) -> Tape:
    return asyncio.run(rollout(AGENT, lambda: Asked([server]), TASK, engine=ScriptedEngine(list(answers))))


def results(tape: Tape) -> list[tuple[str, bool]]:
    return [(r.content, r.error) for step in tape if isinstance(step, ToolResults) for r in step.results]


def assert_serves(server: McpServer) -> None:
    tape = play(
        server,
        called(("lookup", {"word": "amber"}), ("lookup", {"word": "zinc"}), ("picture", {})),
        called(("huge", {"size": 5000}), ("note", {"text": "é"}), ("lookup", {})),
        "4711",
    )
    assert (tape.status, tape.reward, tape.cause) == (Status.FINISHED, 1.0, None)
    told = results(tape)
    assert told[0] == ("4711", False)
    assert "Error executing tool lookup" in told[1][0]
    assert told[1][1]
    assert told[2][0].startswith("a dot:\n[image image/png: ")
    assert "WebP" in told[2][0]
    assert told[2][1]
    assert told[3] == ("x" * 1000 + "\n[cut here: 4,000 of 5,000 characters left out]", False)
    assert told[4] == ("1 notes", False)
    assert told[5][1]
    assert "word" in told[5][0]
    (offer,) = (t for t in tape[0].tools if t["function"]["name"] == "lookup")
    assert offer["function"]["description"] == "The code of a word."
    assert offer["function"]["parameters"]["required"] == ["word"]


@pytest.mark.ledger("X11")
def test_a_server_over_stdio():
    assert_serves(over_stdio(limit=1000))


@pytest.mark.ledger("X11")
def test_a_server_over_http(address: str):
    assert_serves(McpServer.http(address, limit=1000))


async def tools_of(server: McpServer) -> dict[str, Tool]:
    try:
        return {tool.name: tool for tool in await server.open()}
    finally:
        await server.close()


def test_an_effect_is_what_is_declared_else_what_is_hinted_else_irreversible(address: str):
    hinted = McpServer.http(address)
    assert hinted.effect == "irreversible"
    found = asyncio.run(tools_of(hinted))
    assert {name: tool.effect for name, tool in found.items()} == {
        "lookup": "pure",
        "code_of": "pure",
        "note": "idempotent",
        "huge": "irreversible",
        "picture": "irreversible",
        "photo": "irreversible",
        "sleep": "irreversible",
        "die": "irreversible",
    }
    declared = McpServer.http(address, effect="pure", effects={"note": "irreversible"}, only=["note", "huge"])
    assert declared.effect == "irreversible"
    assert {name: tool.effect for name, tool in asyncio.run(tools_of(declared)).items()} == {
        "note": "irreversible",
        "huge": "pure",
    }
    reads = McpServer.http(address, only=["lookup"])
    asyncio.run(tools_of(reads))
    assert reads.effect == "pure"
    with pytest.raises(BadArgument, match=r"'fly'.*lookup"):
        asyncio.run(tools_of(McpServer.http(address, only=["fly"])))


def test_a_server_that_prints_what_is_no_message_is_told_of_once(caplog: pytest.LogCaptureFixture):
    code = (
        "import runpy, sys; print('noise\\n' * 500, flush=True); sys.argv[1:] = ['stdio']; "
        f"runpy.run_path({str(SERVER)!r}, run_name='__main__')"
    )

    async def check() -> None:
        server = McpServer.stdio(sys.executable, "-c", code)
        assert await server.open()
        await server.close()

    asyncio.run(check())
    (record,) = [record for record in caplog.records if "parse" in record.getMessage()]
    assert record.exc_info is None


@pytest.mark.parametrize("shared", [False, True])
def test_a_server_that_dies_is_the_environments_fault_and_the_next_episode_has_another(shared: bool):
    server = over_stdio(shared=shared)

    async def two() -> tuple[Tape, Tape]:
        script = [called(("lookup", {"word": "amber"}), ("die", {})), "4711"]
        first = await rollout(AGENT, lambda: Asked([server]), TASK, engine=ScriptedEngine(script))
        script = [called(("lookup", {"word": "amber"})), "4711"]
        return first, await rollout(AGENT, lambda: Asked([server]), TASK, engine=ScriptedEngine(script))

    dead, well = asyncio.run(two())
    assert (dead.status, dead.cause.type, dead.cause.error) == (Status.ERROR, CauseType.ENVIRONMENT, "ToolsLost")  # type: ignore[union-attr]
    assert re.search(r"\b(lookup|die)\b", str(dead.cause.message))  # type: ignore[union-attr]
    assert not dead.trains
    assert (well.status, well.reward) == (Status.FINISHED, 1.0)


def test_a_call_that_takes_too_long_is_told_and_the_server_goes_on(address: str):
    tape = play(McpServer.http(address, timeout=0.01), called(("sleep", {"seconds": 0.3})), "4711")
    ((told, error),) = results(tape)
    assert error
    assert re.search(r"\bsleep\b.*\b0\.01 s", told)
    assert tape.reward == 1.0


def test_a_shared_session_serves_all_episodes_of_a_loop_and_ends_with_it(address: str):
    server = McpServer.http(address, shared=True)
    opened: list[Any] = []
    connect = server._connect

    @contextlib.asynccontextmanager
    async def counted() -> AsyncIterator[Any]:
        async with connect() as session:
            opened.append(session)
            yield session
        opened.append("closed")

    server._connect = counted

    async def many() -> list[Tape]:
        script = [called(("lookup", {"word": "amber"})), "4711"]
        return await asyncio.gather(
            *(rollout(AGENT, lambda: Asked([server]), TASK, engine=ScriptedEngine(script)) for _ in range(8))
        )

    assert [tape.reward for tape in asyncio.run(many())] == [1.0] * 8
    assert len(opened) == 1, "one session"
    assert [tape.reward for tape in asyncio.run(many())] == [1.0] * 8
    assert len(opened) == 2, "another loop has another one"


@pytest.mark.parametrize(
    ("server", "says"),
    [
        (McpServer.stdio(sys.executable, "-c", "import sys; sys.exit('no luck today')"), "stderr: no luck today"),
        (McpServer.stdio(sys.executable, "-c", "print('hello, not JSON')"), "ConnectionError.*stderr"),
        (McpServer.stdio("no-such-program"), "no-such-program.*FileNotFoundError"),
        (McpServer.http("http://user:pw@127.0.0.1:9/mcp?key=k"), r" http://127\.0\.0\.1:9/mcp "),
        (
            McpServer.http("http://127.0.0.1:9/", key_variable="NOT_SET_ANYWHERE"),
            "NOT_SET_ANYWHERE",
        ),
        (
            McpServer.stdio(sys.executable, "-c", "import sys; sys.stdin.read()", start_timeout=0.2),
            r"\b0\.2 s",
        ),
    ],
)
def test_a_server_that_cant_be_used_says_why(server: McpServer, says: str):
    with pytest.raises(ToolsLost, match=says):
        asyncio.run(tools_of(server))
    tape = play(server, "4711")
    assert tape.cause is not None
    assert (tape.cause.type, tape.cause.error) == (CauseType.ENVIRONMENT, "ToolsLost")


def test_without_the_package_the_extra_is_named(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "mcp", None)
    with pytest.raises(MissingExtra, match=r"tapereel\[mcp\]"):
        asyncio.run(tools_of(over_stdio()))


class First:
    """A session as version 1 of the SDK has it: other names of fields, a cursor as an argument."""

    def __init__(self) -> None:
        hints = SimpleNamespace(readOnlyHint=True, idempotentHint=None)
        self.pages: dict[str | None, Any] = {
            None: SimpleNamespace(tools=[self.tool("a", hints)], nextCursor="2"),
            "2": SimpleNamespace(tools=[self.tool("b", None)], nextCursor=None),
        }

    def tool(self, name: str, hints: Any) -> Any:
        return SimpleNamespace(name=name, description=None, annotations=hints, inputSchema={"type": "object"})

    async def list_tools(self, cursor: str | None = None) -> Any:
        return self.pages[cursor]

    async def call_tool(self, name: str, arguments: dict[str, Any]) -> Any:
        link = SimpleNamespace(type="resource_link", name="page", uri="file:///page")
        inside = SimpleNamespace(type="resource", resource=SimpleNamespace(uri="u", text="within"))
        whole = SimpleNamespace(type="resource", resource=SimpleNamespace(uri="u", blob="AAAA"))
        if name == "a":
            return SimpleNamespace(content=[link, inside, whole], structuredContent=None, isError=False)
        return SimpleNamespace(content=[], structuredContent={"x": 1}, isError=True)


def test_sessions_of_either_version_of_the_sdk_will_do():
    @contextlib.asynccontextmanager
    async def connect() -> AsyncIterator[Any]:
        yield First()

    async def use() -> None:
        server = McpServer(connect, name="first")
        a, b = await server.open()
        assert (a.name, a.effect, b.name, b.effect) == ("a", "pure", "b", "irreversible")
        assert await a.call({}) == "[page: file:///page]\nwithin\n[u: 4 characters of base64, not shown]"
        with pytest.raises(ToolFailed, match=r'\{"x":1\}'):
            await b.call({})
        await server.close()
        with pytest.raises(ToolsLost, match=r"\bfirst\b"):
            await a.call({})

    asyncio.run(use())


def test_a_list_without_end_is_refused():
    lying = First()
    lying.pages["2"].nextCursor = "2"

    @contextlib.asynccontextmanager
    async def connect() -> AsyncIterator[Any]:
        yield lying

    with pytest.raises(ToolsLost, match=r"lying.*'2'"):
        asyncio.run(tools_of(McpServer(connect, name="lying")))


def servers() -> list[int]:
    """Process ids of the servers over stdio that this process started."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            parent = int((path / "stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()[1])
            line = (path / "cmdline").read_bytes()
            if parent == os.getpid() and SERVER.name.encode() in line and b"stdio" in line:
                found.append(int(path.name))
    return found


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="processes are listed in /proc")
def test_the_process_of_a_server_ends_with_its_episode():
    async def use(server: McpServer) -> list[int]:
        await server.open()
        running = servers()
        await server.close()
        return running

    assert len(asyncio.run(use(over_stdio()))) == 1
    assert servers() == []


@pytest.mark.parametrize("kind", ["image", "jpeg", "resource"])
def test_an_image_of_a_server_is_shown(kind: str):
    tape = play(over_stdio(), called(("photo", {"kind": kind}), ("lookup", {"word": "amber"})), "4711")
    assert (tape.status, tape.reward) == (Status.FINISHED, 1.0)
    (step,) = [step for step in tape if isinstance(step, ToolResults)]
    shown, other = step.results
    assert (shown.content, shown.error, other.pictures) == ("before\nafter", False, ())
    (picture,) = shown.pictures
    assert (picture.width, picture.height) == (3, 2)
    assert picture.data is not None
    assert kind == "jpeg" or picture == Picture.of(np.full((2, 3, 3), (255, 0, 0), "uint8"))
    content = next(m for m in tape.messages() if m["role"] == "tool")["content"]
    assert [part["type"] for part in content] == ["text", "image"]


def test_an_image_that_is_cut_off_is_an_error_that_the_model_reads():
    tape = play(over_stdio(), called(("photo", {"kind": "cut"})), "4711")
    assert (tape.status, tape.reward) == (Status.FINISHED, 1.0)
    (step,) = [step for step in tape if isinstance(step, ToolResults)]
    (result,) = step.results
    assert (result.error, result.pictures) == (True, ())
    assert result.content.startswith("before\n[image image/png: ")
    assert result.content.endswith("]\nafter")
