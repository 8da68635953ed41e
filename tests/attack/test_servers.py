"""The four HTTP servers against a web page, a stranger and half a request, on each route of their own route tables."""

from __future__ import annotations

import asyncio
import http.client
import io
import random
import re
import socket
import threading
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp
import pytest

from tapereel.agents import ScriptedEngine
from tapereel.agents.engines.embedded import EngineServer
from tapereel.agents.engines.transport import http_channel
from tapereel.agents.gateway import Control
from tapereel.envs.remote import (
    PROTOCOL,
    ROUTE,
    Refused,
    RemoteEnvironment,
    ResetCall,
    Service,
    ServiceLimits,
    remote_environment,
)
from tapereel.envs.remote.env_protocol import RandomState
from tapereel.tapes import Task
from tapereel.tapes.common import HttpService, http_service, token_for
from tapereel.tapes.store import Store
from tapereel.tapes.view import RunView, Server

from ..agents.served import Served
from ..envs.remote.worlds import GuessNumber, bearer, until
from ..finetune.loop.hosting import in_thread
from ..tapes.view.lab import training_run

pytestmark = pytest.mark.timeout(120)
NAMES = ("viewer", "environment", "gateway", "model")
BODY_BYTES = 100_000
BODY_SECONDS = 0.3
SECRET = "group-1"
"""Stands in the run that the viewer shows, and in no refusal."""


def quickly(server: Any) -> Any:
    """Bounds that a test can wait for."""
    server.body_bytes, server.body_seconds, server.header_seconds = BODY_BYTES, BODY_SECONDS, 1.0
    return server


@asynccontextmanager
async def up(name: str, folder: Path) -> AsyncIterator[HttpService]:
    if name == "viewer":
        with RunView(training_run(folder / "run")) as view:
            async with quickly(Server(view)).serving() as server:
                yield server
    elif name == "environment":
        async with quickly(Service(GuessNumber, tasks=[7])).serving() as server:
            yield server
    elif name == "gateway":
        with Store.create(folder / "gateway") as store:
            async with quickly(Control(None, ScriptedEngine(["x"]), journal=store.writer)).serving() as server:
                yield server
    else:
        async with quickly(EngineServer(Served.policy(0), "micro")).serving() as server:
            yield server


@pytest.fixture(scope="module", params=NAMES)
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[HttpService]:
    with in_thread(lambda: up(request.param, tmp_path_factory.mktemp(request.param))) as found:
        yield found


class Answer(NamedTuple):
    status: int
    headers: dict[str, str]
    body: bytes


def ask(server: HttpService, method: str, path: str, body: bytes | None, headers: list[tuple[str, str]]) -> Answer:
    """One request with exactly these headers."""
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
    try:
        connection.putrequest(method, path, skip_host=True, skip_accept_encoding=True)
        for name, value in headers:
            connection.putheader(name, value)
        connection.endheaders(body)
        answer = connection.getresponse()
        switched = answer.status == 101
        return Answer(
            answer.status,
            {name.lower(): value for name, value in answer.getheaders()},
            b"" if switched or "event-stream" in str(answer.getheader("Content-Type")) else answer.read(),
        )
    finally:
        connection.close()


def routes(server: HttpService) -> list[tuple[str, str]]:
    """Each method and path of the server's own table, with a value for each variable part."""
    found = []
    for route in server.routes():
        path = route.path
        for part, pattern in re.findall(r"\{(\w+(?::((?:[^{}]|\{[^{}]*\})+))?)\}", path):
            value = next(value for value in ("0", "0" * 8) if re.fullmatch(pattern or "[^/]+", value))
            path = path.replace("{" + part + "}", value)
        found.append((route.method, path))
    return found


def sent(server: HttpService, method: str, **changes: str | None) -> list[tuple[str, str]]:
    """The headers of a right request, with these changes; None leaves one out."""
    headers: dict[str, str | None] = {
        "Host": f"127.0.0.1:{server.port}",
        "Authorization": f"Bearer {server.token}",
        "Content-Type": "application/json" if method == "POST" else None,
        "Connection": "close",
        **{name.replace("_", "-"): value for name, value in changes.items()},
    }
    return [(name, value) for name, value in headers.items() if value is not None]


UPGRADE = {
    "Connection": "Upgrade",
    "Upgrade": "websocket",
    "Sec_WebSocket_Version": "13",
    "Sec_WebSocket_Key": "AAAAAAAAAAAAAAAAAAAAAA==",
    "Sec_WebSocket_Protocol": PROTOCOL,
}
REFUSED: dict[str, tuple[dict[str, str | None], set[int]]] = {
    "no token": ({"Authorization": None}, {401}),
    "an empty token": ({"Authorization": "Bearer "}, {401}),
    "a wrong token": ({"Authorization": "Bearer " + "x" * 32}, {401}),
    "a wrong password": ({"Authorization": "Basic dGFwZXJlZWw6eHh4eHh4eHh4eHh4eHh4eHh4eHh4eHh4"}, {401}),
    "a password that is none": ({"Authorization": "Basic !!!"}, {401}),
    "another scheme": ({"Authorization": "Basic {token}"}, {401}),
    "half a token": ({"Authorization": "Bearer {half}"}, {401}),
    "a foreign cookie": ({"Authorization": None, "Cookie": "tapereel-token={token}"}, {401}),
    "another origin": ({"Origin": "https://evil.example"}, {403}),
    "another port's origin": ({"Origin": "http://127.0.0.1:1"}, {403}),
    "an opaque origin": ({"Origin": "null"}, {403}),
    "a page of another site": ({"Sec_Fetch_Site": "cross-site"}, {403}),
    "a page of another port": ({"Sec_Fetch_Site": "same-site", "Sec_Fetch_Mode": "no-cors"}, {403}),
    "a frame of another site": (
        {"Sec_Fetch_Site": "cross-site", "Sec_Fetch_Mode": "navigate", "Sec_Fetch_Dest": "iframe"},
        {403},
    ),
    "a rebound name": ({"Host": "evil.example:{port}"}, {403}),
    "no host": ({"Host": None}, {400, 403}),
    "a host with a user": ({"Host": "127.0.0.1@evil.example"}, {400, 403}),
    "a link without a token": (
        {
            "Authorization": None,
            "Sec_Fetch_Site": "cross-site",
            "Sec_Fetch_Mode": "navigate",
            "Sec_Fetch_Dest": "document",
        },
        {401, 403},
    ),
    "an upgrade without a token": ({**UPGRADE, "Authorization": None}, {401}),
    "an upgrade by a page": ({**UPGRADE, "Origin": "https://evil.example"}, {403}),
    "an upgrade by a rebound name": ({**UPGRADE, "Host": "evil.example"}, {403}),
}


def check_refusal(answer: Answer, expected: set[int], case: object) -> None:
    assert answer.status in expected, (case, answer)
    assert not [name for name in answer.headers if name.startswith("access-control")], (case, answer)
    if answer.status != 400:  # 400 is the parser's, before any route
        assert answer.headers["cache-control"] == "no-store", case
        assert answer.headers["x-content-type-options"] == "nosniff", case
        assert answer.headers["referrer-policy"] == "no-referrer", case
    assert SECRET.encode() not in answer.body, case


@pytest.mark.parametrize("attack", REFUSED)
def test_no_route_lets_a_stranger_or_a_page_in(server: HttpService, attack: str):
    changes, expected = REFUSED[attack]
    filled = {
        name: value and value.format(port=server.port, token=server.token, half=server.token[:16])
        for name, value in changes.items()
    }
    for method, path in [*routes(server), ("GET", "/no/such/route"), ("OPTIONS", "/"), ("DELETE", "/")]:
        answer = ask(server, method, path, None, sent(server, method, **filled))
        check_refusal(answer, expected, (attack, method, path))


BODIES: dict[str, tuple[bytes, dict[str, str | None], set[int]]] = {
    "plain text": (b"{}", {"Content_Type": "text/plain"}, {415}),
    "plain text that names JSON": (b"{}", {"Content_Type": "text/plain; charset=application/json"}, {415}),
    "a form": (b"a=1", {"Content_Type": "application/x-www-form-urlencoded"}, {415}),
    "a form with files": (b"--x--", {"Content_Type": "multipart/form-data; boundary=x"}, {415}),
    "no type": (b"{}", {"Content_Type": None}, {415}),
    "nothing of no type": (b"", {"Content_Type": None}, {415}),
    "too large": (b'"' + b"x" * BODY_BYTES + b'"', {}, {413}),
    "too deep": (b'{"a":' * 5_000 + b"1" + b"}" * 5_000, {}, {400}),
    "too deep an end": (b"[" * (BODY_BYTES - 10), {}, {400}),
    "a little too deep": (b"[" * 65 + b"]" * 65, {}, {400}),
    "no object": (b"[1, 2]", {}, {400}),
    "no JSON": (b"\x80\x04.", {}, {400}),
    "packed": (b"\x1f\x8b\x08\x00", {"Content_Encoding": "gzip"}, {400}),
}


@pytest.mark.parametrize("attack", BODIES)
def test_no_route_takes_a_body_that_is_none(server: HttpService, attack: str):
    body, changes, expected = BODIES[attack]
    posts = [(method, path) for method, path in routes(server) if method not in ("GET", "HEAD")]
    assert posts or isinstance(server, Server | Service), "these two only answer questions"
    for method, path in posts:
        length = {"Content_Length": str(len(body))}
        answer = ask(server, method, path, body, sent(server, method, **length, **changes))
        check_refusal(answer, expected, (attack, method, path))


def test_a_right_request_reaches_each_route(server: HttpService):
    """Without this, the tests above would hold of a server that refuses everything."""
    for method, path in routes(server):
        if path == "/tapereel/pause":
            continue  # the next request would wait for its end
        body = b"{}" if method == "POST" else None
        answer = ask(server, method, path, body, sent(server, method, Content_Length=body and "2"))
        assert answer.status not in (403, 408, 413, 415, 500), (method, path, answer)
        if not path.startswith(("/v1", "/messages")):  # the gateway's are for a tape's key
            assert answer.status != 401, (method, path, answer)
        assert not [name for name in answer.headers if name.startswith("access-control")]
        assert answer.headers["cache-control"] == "no-store", (method, path)


def half_sent(server: HttpService) -> dict[str, bytes]:
    head = f"Host: 127.0.0.1\r\nAuthorization: Bearer {server.token}\r\nContent-Type: application/json\r\n"
    halves = {
        "nothing": b"",
        "half a line": b"GET /",
        "half the headers": b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\nAuth",
        "half the headers of a second request": f"GET /no HTTP/1.1\r\n{head}\r\nGET /".encode(),
        "an idle connection": f"GET /no HTTP/1.1\r\n{head}\r\n".encode(),
        "half a body without a token": b"POST / HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 9\r\n\r\n{",
        "half a body of a GET": f"GET /no HTTP/1.1\r\n{head}Content-Length: 9\r\n\r\n{{".encode(),
    }
    for method, path in routes(server):
        if method != "GET":
            for how, more in (
                ("", "Content-Length: 9\r\n\r\n{"),
                (" in pieces", "Transfer-Encoding: chunked\r\n\r\n1\r\n{\r\n"),
            ):
                halves[f"half a body{how} of {path}"] = f"{method} {path} HTTP/1.1\r\n{head}{more}".encode()
    return halves


def test_half_a_request_is_closed_and_others_are_served_meanwhile(server: HttpService):
    halves = half_sent(server)
    lines = {}
    for name, data in halves.items():
        for k in range(10):
            line = lines[name, k] = socket.create_connection(("127.0.0.1", server.port), timeout=60)
            line.sendall(data)
    method, path = next((method, path) for method, path in routes(server) if method == "GET")
    assert ask(server, method, path, None, sent(server, method)).status != 403
    for (name, _), line in lines.items():
        said = b""
        while part := line.recv(1 << 16):
            said += part
        line.close()
        if name.startswith("half a body") and "GET" not in name:
            assert said.split()[1] == (b"401" if "without" in name else b"408"), (name, said[:300])


def test_a_slow_sender_is_closed_however_many_bytes_it_sends(server: HttpService):
    """One byte at a time, the deadline counts from the beginning."""
    with socket.create_connection(("127.0.0.1", server.port), timeout=60) as line:
        line.sendall(b"GET / HTTP/1.1\r\nX: ")
        closed = False
        while not closed:
            time.sleep(0.05)
            try:
                line.sendall(b"x")
                closed = line.recv(1, socket.MSG_DONTWAIT) == b""
            except BlockingIOError:
                continue
            except OSError:
                closed = True


VALUES = {"numbers": b"1", "floats": b"1.5", "lists": b"[]", "objects": b'{"a":1}', "deep": b"[" * 60 + b"]" * 60}


def values(kind: str, size: int) -> bytes:
    """JSON of about so many bytes that takes long to parse."""
    return b'{"a":[' + b",".join([VALUES[kind]] * (size // (len(VALUES[kind]) + 1))) + b"]}"


def test_a_large_body_is_refused_unparsed(monkeypatch: pytest.MonkeyPatch):
    """So that no other client waits for the parser. The bound on values is checked by counting bytes."""
    parsed: list[int] = []
    read_plain = http_service.read_plain

    def noted(body: bytes) -> object:
        parsed.append(len(body))
        return read_plain(body)

    monkeypatch.setattr(http_service, "read_plain", noted)

    async def scene() -> None:
        async with EngineServer(Served.policy(0), "micro").serving() as server, aiohttp.ClientSession() as http:

            async def sent(body: bytes, pieces: bool = False) -> int:
                headers = {**bearer(server), "Content-Type": "application/json"}
                data = None if pieces else {"Content-Length": str(len(body))}
                async with http.post(
                    f"{server.url}/resume", data=io.BytesIO(body), headers={**headers, **(data or {})}
                ) as answer:
                    return answer.status

            for kind in VALUES:
                assert await sent(values(kind, 8_000_000)) == 413, kind
            assert await sent(values("numbers", 9_000_000)) == 413
            assert await sent(values("numbers", 9_000_000), pieces=True) == 413
            assert parsed == []
            text = b'{"a":["' + b"x" * 7_000_000 + b'"]}'
            assert await sent(text) == 200, "a long text is no attack"
            assert parsed == [len(text)]

    asyncio.run(scene())


def test_a_body_is_parsed_beside_the_event_loop():
    """The thread of the event loop never parses a body of any size that counts."""
    threads: list[threading.Thread] = []
    read_plain = http_service.read_plain

    def noted(body: bytes) -> object:
        threads.append(threading.current_thread())
        return read_plain(body)

    async def scene() -> None:
        async with EngineServer(Served.policy(0), "micro").serving() as server, aiohttp.ClientSession() as http:
            headers = {**bearer(server), "Content-Type": "application/json"}
            async with http.post(
                f"{server.url}/resume", data=io.BytesIO(values("numbers", 900_000)), headers=headers
            ) as answer:
                assert answer.status == 200

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(http_service, "read_plain", noted)
        asyncio.run(scene())
    assert threads
    assert threading.main_thread() not in threads


# The environment server's places


RESET = ResetCall(id=1, task=Task.of(7), rng=RandomState.of(random.Random(0)))


async def begun(service: Service, **options: Any) -> RemoteEnvironment:
    env = RemoteEnvironment(service.url, GuessNumber, **options)
    env.rng = random.Random(0)
    await env.reset(7)
    return env


def abandoned(used: bool, *, grace: float) -> None:
    """Sessions whose clients left, after a call if `used`, fill the service, and another client gets a place."""

    async def scene() -> None:
        limits = ServiceLimits(sessions=20, window_seconds=600.0, retry_after=0)
        service = Service(GuessNumber, limits=limits)
        async with service.serving(), aiohttp.ClientSession(headers=bearer(service)) as http:
            for _ in range(20):
                async with http.ws_connect(service.url + ROUTE, protocols=(PROTOCOL,)) as socket:
                    await socket.receive_str()
                    if used:
                        await socket.send_str(RESET.encoded())
                        await socket.receive_str()
            await until(lambda: all(session.connection is None for session in service.sessions.values()))
            assert len(service.sessions) == 20
            newcomers = await asyncio.gather(*(begun(service, patience=60.0) for _ in range(20)))
            assert len(service.sessions) == 20
            await asyncio.gather(*(env.close() for env in newcomers))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tapereel.envs.remote.env_service.RECONNECT_SECONDS", grace)
        patch.setattr("tapereel.envs.remote.remote_environment._LONGEST", 0.1)  # pauses between two tries
        asyncio.run(scene())


def test_sessions_that_were_never_used_make_room_at_once():
    abandoned(False, grace=600.0)


def test_sessions_that_were_left_make_room_after_the_time_to_reconnect():
    abandoned(True, grace=0.2)


def test_a_session_whose_client_may_come_back_keeps_its_place():
    async def scene() -> None:
        limits = ServiceLimits(sessions=1, window_seconds=600.0, retry_after=0)
        async with Service(GuessNumber, limits=limits).serving() as service:
            env = await begun(service)
            await env._hang_up(goodbye=False)
            await until(lambda: all(session.connection is None for session in service.sessions.values()))
            with pytest.raises(Exception, match=r"status (429|503)"):
                await begun(service, patience=0.3)
            assert len(service.sessions) == 1
            await env.close()

    asyncio.run(scene())


# A server that is started anew has a new token


@pytest.fixture
def stale(monkeypatch: pytest.MonkeyPatch) -> None:
    """The client reads the old server's token first, and connects when the new server is there."""
    for module in (remote_environment, http_channel):
        first = iter(["the-token-of-the-server-before"])
        monkeypatch.setattr(module, "token_for", lambda url, first=first: next(first, None) or token_for(url))


@pytest.mark.usefixtures("stale")
def test_a_client_of_the_environment_tries_again_with_the_new_token():
    async def scene() -> None:
        async with Service(GuessNumber).serving() as service:
            await (await begun(service, patience=60.0)).close()

    asyncio.run(scene())


@pytest.mark.usefixtures("stale")
def test_a_client_of_the_model_says_that_another_try_can_succeed():
    async def scene() -> None:
        async with EngineServer(Served.policy(0), "micro").serving() as service:
            client = http_channel.Server(service.url)
            with pytest.raises(http_channel.ServerFailed, match="401") as caught:
                await client.get("/health")
            assert caught.value.retry
            assert await client.get("/health") == {}
            await client.close()

    asyncio.run(scene())


def test_a_client_with_a_wrong_token_does_not_try_again(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("SOME_TOKEN", "x" * 32)

    async def scene() -> None:
        async with Service(GuessNumber).serving() as service:
            with pytest.raises(Refused, match="401"):
                await begun(service, patience=60.0, key_variable="SOME_TOKEN")

    asyncio.run(scene())
