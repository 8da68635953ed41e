"""Servers that lie, flood, stall or babble: refused clearly, in bounded time and memory; the tape keeps the rest."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
from aiohttp import web

from tapereel.agents import Agent
from tapereel.envs.remote import PROTOCOL, Declared, OpenEnvAction, OpenEnvironment, RemoteEnvironment
from tapereel.envs.remote.env_protocol import Welcome
from tapereel.tapes import CauseType, Observation, Status, Tape

from .worlds import GuessNumber, play, until

NAME = "0" * 32
Script = Callable[[web.WebSocketResponse, Any], Awaitable[None]]
"""What the server does with the k-th call (as plain values) on its socket."""


@asynccontextmanager
async def lying(script: Script, greeting: Any = None, route: str = "/env") -> AsyncIterator[str]:
    """A server that greets (with `greeting`, or honestly) and then does what the script says."""
    honest = Welcome.to(Declared.of(GuessNumber), NAME, message_bytes=1 << 20).encoded()

    async def serve(request: web.Request) -> web.StreamResponse:
        socket = web.WebSocketResponse(protocols=(PROTOCOL,), max_msg_size=0, timeout=0.1)
        await socket.prepare(request)
        if route == "/env":
            await socket.send_str(honest if greeting is None else greeting)
        async for message in socket:
            await script(socket, json.loads(message.data))
        return socket

    app = web.Application()
    app.router.add_get(route, serve)
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1, handler_cancellation=True)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


def ended(script: Script, greeting: Any = None, **options: Any) -> Tape:
    """The tape of an episode with that server."""

    async def run() -> Tape:
        async with lying(script, greeting) as url:
            settings = {"seconds": 20.0, "patience": 20.0, **options}
            return await play(RemoteEnvironment(url, GuessNumber, **settings), "5", "7")

    return asyncio.run(run())


def honest(call: Any) -> dict[str, Any]:
    hint = {"kind": "remote_hint", "content": {"text": "begin", "noise": 0.5}}
    if call["t"] == "reset":
        return {"t": "result", "id": call["id"], "observation": hint}
    if call["t"] == "close":
        return {"t": "result", "id": call["id"]}
    return {"t": "result", "id": call["id"], "observation": hint, "reward": 0.25}


def at_first_step(**changes: Any) -> Script:
    """Honest, but for the answer to the first step."""

    async def script(socket: web.WebSocketResponse, call: Any) -> None:
        answer = honest(call)
        if call["t"] == "step":
            answer = {key: value for key, value in {**answer, **changes}.items() if value != "gone"}
        await socket.send_str(json.dumps(answer))

    return script


LIES: list[tuple[dict[str, Any], str, str]] = [
    ({"id": 1}, "BadAnswer", r"call 1\b.*call 2\b"),
    ({"id": 99}, "BadAnswer", r"call 99\b"),
    ({"reward": float("nan")}, "BadAnswer", "finite number"),
    ({"reward": float("inf")}, "BadAnswer", "finite number"),
    ({"reward": {"a": float("-inf")}}, "BadAnswer", "finite number"),
    ({"metrics": {"m": float("nan")}}, "BadAnswer", "finite number"),
    ({"reward": "1.0"}, "BadAnswer", "valid number"),
    ({"reward": True}, "BadAnswer", "valid number"),
    ({"terminated": 3}, "BadAnswer", "valid boolean"),
    ({"observation": {"kind": "remote_secret", "content": {"text": "x"}}}, "BadAnswer", "'remote_secret'"),
    ({"observation": {"kind": "os.system", "content": {"command": "true"}}}, "BadAnswer", r"'os\.system'"),
    ({"observation": {"kind": "remote_guess", "content": {"number": 1}}}, "BadAnswer", "'remote_guess'"),
    ({"observation": {"kind": "remote_hint", "content": {"text": 1, "noise": 0}}}, "BadAnswer", "text: "),
    ({"observation": {"kind": "remote_hint", "content": {"text": "x", "noise": 0, "more": 1}}}, "BadAnswer", "more: "),
    ({"t": "welcome"}, "BadAnswer", "answer"),
    ({"t": "eval"}, "BadAnswer", f"answer.*{PROTOCOL}"),
    ({"extra": 1}, "BadAnswer", "extra"),
]


@pytest.mark.parametrize(("changes", "error", "told"), LIES, ids=[str(lie[0])[:60] for lie in LIES])
def test_a_lie_ends_the_episode_and_what_came_before_is_kept(changes: dict[str, Any], error: str, told: str):
    tape = ended(at_first_step(**changes))
    assert tape.status is Status.ERROR
    assert tape.cause is not None
    assert (tape.cause.type, tape.cause.error) == (CauseType.ENVIRONMENT, error)
    assert re.search(told, str(tape.cause.message))
    assert [step.kind for step in tape] == ["remote_hint", "remote_guess"]
    assert tape.reward is None


async def too_long(socket: web.WebSocketResponse, call: Any) -> None:
    await socket.send_str("x" * 200_000)


async def binary(socket: web.WebSocketResponse, call: Any) -> None:
    await socket.send_bytes(b"\x80\x04.")


async def babble(socket: web.WebSocketResponse, call: Any) -> None:
    await socket.send_str("hello")


async def deep(socket: web.WebSocketResponse, call: Any) -> None:
    await socket.send_str("[" * 60_000)


async def flood(socket: web.WebSocketResponse, call: Any) -> None:
    with contextlib.suppress(ConnectionError):
        for _ in range(3000):
            await socket.send_str('{"t":"result","id":7}')


async def nothing(socket: web.WebSocketResponse, call: Any) -> None:
    return


async def endless(socket: web.WebSocketResponse, call: Any) -> None:
    """A message whose end never comes."""
    transport = socket._req.transport  # type: ignore[union-attr]
    transport.write(b"\x01\x01x")
    while not transport.is_closing():
        transport.write(b"\x00\x7e\x10\x00" + b"x" * 4096)
        await asyncio.sleep(0)


async def no_websocket(socket: web.WebSocketResponse, call: Any) -> None:
    socket._req.transport.write(b"\xff\xff\xff\xff")  # type: ignore[union-attr]


async def hang_up(socket: web.WebSocketResponse, call: Any) -> None:
    socket._req.transport.abort()  # type: ignore[union-attr]


async def say_no(socket: web.WebSocketResponse, call: Any) -> None:
    await socket.close(code=1008, message=b"no \x1b[31m")


@pytest.mark.parametrize(
    ("script", "error", "told"),
    [
        (too_long, "BadAnswer", r"\b100000 bytes"),
        (binary, "BadAnswer", r"binary.*\b3 bytes"),
        (babble, "BadAnswer", f"answer.*{PROTOCOL}"),
        (deep, "BadAnswer", f"answer.*{PROTOCOL}"),
        (flood, "BadAnswer", r"call 7\b"),
        (nothing, "Hung", r"`reset`.*\b1 s\b"),
        (endless, "BadAnswer", r"\b100000 bytes"),
        (no_websocket, "BadAnswer", "WebSocket"),
        (hang_up, "BadAnswer", "resuming"),
        (say_no, "Refused", "closed"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_server_that_misbehaves_costs_its_episode_and_no_more(script: Script, error: str, told: str):
    tape = ended(script, seconds=1.0 if script is nothing else 20.0, largest=100_000)
    assert tape.cause is not None
    assert (tape.cause.type, tape.cause.error) == (CauseType.ENVIRONMENT, error), tape.cause
    assert re.search(told, str(tape.cause.message))


def greeting(**changes: Any) -> str:
    honest = Welcome.to(Declared.of(GuessNumber), NAME, message_bytes=1 << 20)
    return json.dumps({**honest.model_dump(mode="json"), **changes})


@pytest.mark.parametrize(
    ("text", "error", "told"),
    [
        ("hello", "BadAnswer", f"greeting.*{PROTOCOL}"),
        (greeting(protocol="tapereel-env.9"), "BadAnswer", r"'tapereel-env\.9'"),
        (greeting(session=""), "BadAnswer", "''.*session"),
        (greeting(effect="harmless"), "BadAnswer", "effect"),
        (greeting(session="a\r\nX: y" * 5), "BadAnswer", r"'a\\r\\nX: y.*session"),
        (greeting(kinds={}), "WrongEnvironment", r"action:remote_guess \(.*\bhere\)"),
        (
            greeting(name="x" * 100_000, kinds={f"action:{k}": "0" for k in range(1000)}),
            "WrongEnvironment",
            r"\(.*\bthere\)",
        ),
        (greeting(resumed=True), "BadAnswer", r"call 50\b"),
    ],
)
def test_a_greeting_that_lies(text: str, error: str, told: str):
    async def other(socket: web.WebSocketResponse, call: Any) -> None:
        await socket.send_str(json.dumps({**honest(call), "id": 50}))

    tape = ended(other, text)
    assert tape.cause is not None
    assert tape.cause.error == error
    assert re.search(told, str(tape.cause.message))
    assert len(str(tape.cause.message)) <= 2000


async def no_server(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.write(b"SSH-2.0-OpenSSH_9\r\n" * 10)
    await writer.drain()


async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await reader.read()


async def redirecting(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await reader.readuntil(b"\r\n\r\n")
    writer.write(b"HTTP/1.1 302 Found\r\nLocation: http://127.0.0.1:1/stolen\r\nContent-Length: 0\r\n\r\n")
    await writer.drain()


@pytest.mark.parametrize(
    ("server", "error", "told"),
    [
        (no_server, "Unreachable", r"\b0\.2 s"),
        (redirecting, "Refused", "redirects"),
        (silent, "Hung", r"`reset`.*\b0\.4 s"),
    ],
    ids=["no server", "redirecting", "silent"],
)
def test_something_else_listens_there(server: Any, error: str, told: str):
    begun: list[int] = []
    over: list[int] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        begun.append(1)
        await server(reader, writer)
        writer.close()
        await asyncio.gather(writer.wait_closed(), return_exceptions=True)
        over.append(1)

    async def run() -> Tape:
        async with await asyncio.start_server(serve, "127.0.0.1", 0) as listener:
            url = f"http://127.0.0.1:{listener.sockets[0].getsockname()[1]}"
            env = RemoteEnvironment(url, GuessNumber, seconds=0.2, patience=0.2)
            tape = await play(env, "7")
            await until(lambda: begun == over)
            return tape

    tape = asyncio.run(run())
    assert tape.cause is not None
    assert tape.cause.error == error
    assert re.search(told, str(tape.cause.message))


class _Acts(Agent):
    async def act(self, tape: Any, llm: Any) -> Any:  # type: ignore[override]
        yield OpenEnvAction(data={"message": (await llm(tape)).text})


@pytest.mark.parametrize(
    ("answer", "error", "told"),
    [
        ("{}", "BadAnswer", "`reset`"),
        ("nothing", "BadAnswer", "`reset`"),
        ('{"type":"observation","data":{"observation":[]}}', "BadAnswer", "observation"),
        ('{"type":"observation","data":{"observation":{},"reward":NaN}}', "BadAnswer", "finite"),
        ('{"type":"observation","data":{"observation":{},"reward":"a lot"}}', "BadAnswer", "reward"),
        (
            '{"type":"error","data":{"message":"boom","code":"EXECUTION_ERROR"}}',
            "RemoteFault",
            "boom (EXECUTION_ERROR)",
        ),
        ('{"type":"error","data":{"message":"no","code":"VALIDATION_ERROR"}}', "Refused", "no (VALIDATION_ERROR)"),
        (
            '{"type":"error","data":{"message":"full","code":"CAPACITY_REACHED"}}',
            "Busy",
            "full (CAPACITY_REACHED)",
        ),
        ("abort", "Unreachable", "0.2 s"),
    ],
    ids=range(9),
)
def test_openenv_servers_are_not_trusted_either(answer: str, error: str, told: str):
    from tapereel.agents import ScriptedEngine, rollout

    async def script(socket: web.WebSocketResponse, call: Any) -> None:
        if answer == "abort":
            socket._req.transport.abort()  # type: ignore[union-attr]
        elif not socket.closed:
            await socket.send_str(answer)

    async def run() -> Tape:
        async with lying(script, route="/ws") as url:
            env = OpenEnvironment(url, seconds=5.0, patience=0.2)
            return await rollout(_Acts(), env, None, engine=ScriptedEngine(["hi"]))

    tape = asyncio.run(run())
    assert tape.cause is not None
    assert tape.cause.error == error, tape.cause
    assert told in str(tape.cause.message)
    assert not any(isinstance(step, Observation) for step in tape)
