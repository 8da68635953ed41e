"""Who may come in, how many, and for how long."""

from __future__ import annotations

import asyncio
import random
import re
from typing import Any

import aiohttp
import pytest

from tapereel.envs.remote import (
    PROTOCOL,
    ROUTE,
    Busy,
    Item,
    RemoteEnvironment,
    ResetCall,
    Service,
    ServiceLimits,
    SessionLost,
)
from tapereel.envs.remote.env_protocol import SESSION, Fault, StepCall, read_answer, read_welcome
from tapereel.tapes import Status, Task

from .worlds import Guess, GuessNumber, Waiting, Wire, bearer, play, until

GOOD = {
    "Sec-WebSocket-Protocol": PROTOCOL,
    "Upgrade": "websocket",
    "Connection": "Upgrade",
    "Sec-WebSocket-Version": "13",
    "Sec-WebSocket-Key": "AAAAAAAAAAAAAAAAAAAAAA==",
}


def serve(check: Any, make: Any = GuessNumber, **options: Any) -> None:
    """Run `check(service, http session)` beside a service."""

    async def main() -> None:
        limits = ServiceLimits(**options.pop("limits", {}))
        service = Service(make, limits=limits, **options)
        async with service.serving(), aiohttp.ClientSession(headers=bearer(service)) as http:
            await check(service, http)

    asyncio.run(main())


async def begun(url: str, make: Any = GuessNumber, **options: Any) -> RemoteEnvironment:
    env = RemoteEnvironment(url, make, **options)
    env.rng = random.Random(0)
    await env.reset(7)
    return env


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"Origin": "http://evil.example"}, 403),
        ({"Origin": "null"}, 403),
        ({"Sec-WebSocket-Protocol": "other"}, 426),
        ({SESSION: "0" * 32}, 410),
        ({SESSION: "../../etc"}, 410),
    ],
)
def test_who_may_not_come_in_is_told_before_anything_is_made(headers: dict[str, str], status: int):
    async def check(service: Service, http: aiohttp.ClientSession) -> None:
        async with http.get(service.url + ROUTE, headers={**GOOD, **headers}) as answer:
            assert answer.status == status
        assert service.occupied == 0

    serve(check)


def test_a_token_is_asked_for_everywhere():
    async def check(service: Service, http: aiohttp.ClientSession) -> None:
        for route in (ROUTE, "/health", "/other"):
            for given in (
                {"Authorization": ""},
                {"Authorization": "Bearer x"},
                {"Authorization": "Bearer \N{SNOWMAN}"},
            ):
                async with http.get(service.url + route, headers=given) as answer:
                    assert answer.status == 401
                    assert "right-token" not in await answer.text()
        async with http.get(service.url + "/health", headers={"Authorization": "Bearer the-right-token-16"}) as answer:
            assert await answer.json() == {
                "status": "healthy",
                "environment": "GuessNumber",
                "protocol": PROTOCOL,
                "sessions": 0,
                "places": 1000,
            }

    serve(check, token="the-right-token-16")


@pytest.mark.parametrize(
    ("host", "token", "told"),
    [
        ("127.0.0.1", "short", r"\b16\b"),
        ("127.0.0.1", "x" * 15 + "\n", r"\b16\b"),
    ],
)
def test_a_token_that_can_be_guessed_is_refused(host: str, token: str | None, told: str):
    with pytest.raises(ValueError, match=told):
        Service(GuessNumber, host=host, token=token)


def test_a_full_service_says_when_to_come_again_and_has_place_later():
    async def check(service: Service, http: aiohttp.ClientSession) -> None:
        first, second = await begun(service.url), await begun(service.url)
        async with http.get(service.url + ROUTE, headers=GOOD) as answer:
            assert (answer.status, answer.headers["Retry-After"]) == (503, "0")
        with pytest.raises(Busy, match=r"\b503\b.*\b0\.1 s"):
            await begun(service.url, patience=0.1)
        third = asyncio.create_task(begun(service.url))
        await first.close()
        assert (await (await third).step(Guess(number=7))).terminated
        await asyncio.gather(second.close(), (await third).close())

    serve(check, limits={"sessions": 2, "retry_after": 0})


def test_a_client_never_asks_again_before_the_server_wants_it(monkeypatch: pytest.MonkeyPatch):
    slept: list[float] = []
    sleep = asyncio.sleep

    async def noted(seconds: float) -> None:
        slept.append(seconds)
        await sleep(0)

    async def check(service: Service, http: aiohttp.ClientSession) -> None:
        env = await begun(service.url)
        monkeypatch.setattr("tapereel.envs.remote.remote_environment.asyncio.sleep", noted)
        waiting = asyncio.create_task(begun(service.url, patience=1000.0))
        await until(lambda: sum(seconds > 1 for seconds in slept) >= 3)
        monkeypatch.undo()
        await env.close()
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        told = [seconds for seconds in slept if seconds > 1]
        assert all(7 <= seconds <= 14 for seconds in told)

    serve(check, limits={"sessions": 1, "retry_after": 7})


def test_more_episodes_than_places_all_come_to_their_end():
    async def check(service: Service, http: aiohttp.ClientSession) -> None:
        tapes = await asyncio.gather(*(play(RemoteEnvironment(service.url, GuessNumber), "5", "7") for _ in range(12)))
        assert {tape.status for tape in tapes} == {Status.FINISHED}

    serve(check, limits={"sessions": 4, "retry_after": 0})


def test_a_client_that_says_nothing_for_too_long_is_let_go():
    async def check(service: Service, http: aiohttp.ClientSession) -> None:
        env = await begun(service.url)
        await until(lambda: service.occupied == 0)
        with pytest.raises((PermissionError, SessionLost)):
            await env.step(Guess(number=7))
        await env.close()

    serve(check, limits={"idle_seconds": 0.5})


def test_a_call_may_take_longer_than_a_client_may_be_silent():
    class Slow(GuessNumber):
        async def step(self, action: Any) -> Any:
            await asyncio.sleep(2.5)
            return await super().step(action)

    async def check(service: Service, http: aiohttp.ClientSession) -> None:
        env = await begun(service.url, Slow)
        assert (await env.step(Guess(number=7))).terminated
        await env.close()

    serve(check, Slow, limits={"idle_seconds": 1.2})


def test_a_client_that_answers_no_ping_is_gone():
    async def check(service: Service, http: aiohttp.ClientSession) -> None:
        async with http.ws_connect(service.url + ROUTE, protocols=(PROTOCOL,), autoping=False) as socket:
            assert read_welcome(await socket.receive_str()).session
            await until(lambda: service.occupied == 0)

    serve(check, limits={"heartbeat_seconds": 0.05, "window_seconds": 0.05})


def test_a_session_that_was_never_used_is_not_kept_either():
    async def check(service: Service, http: aiohttp.ClientSession) -> None:
        async with http.ws_connect(service.url + ROUTE, protocols=(PROTOCOL,)) as socket:
            assert read_welcome(await socket.receive_str()).resumed is False
        await until(lambda: service.occupied == 0)

    serve(check, limits={"window_seconds": 0.01})


async def raw(socket: aiohttp.ClientWebSocketResponse, text: str) -> Any:
    await socket.send_str(text)
    return read_answer(await socket.receive_str())


RESET = ResetCall(id=1, task=Task.of(7), rng=None)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("no json", PROTOCOL),
        ('{"t":"reset","id":1}', PROTOCOL),
        ('{"t":"step","id":1,"action":{"kind":"remote_guess","content":{}}}', "`step`.*`reset`"),
        ('{"t":"finish","id":1,"status":"finished"}', "`finish`.*`reset`"),
        ('{"t":"close","id":2}', r"call 2\b.*call 0\b"),
        (RESET.model_copy(update={"id": 5}).encoded(), r"call 5\b.*call 0\b"),
        (
            '{"t":"reset","id":1,"task":{"private":1},"rng":{"words":"AAAA","position":0}}',
            r"\b624\b",
        ),
        ('{"t":"reset","id":1,"task":{"private":1},"rng":{"words":"","position":9999}}', PROTOCOL),
    ],
)
def test_a_call_that_is_none_is_refused_and_the_session_goes_on(text: str, told: str):
    async def check(service: Service, http: aiohttp.ClientSession) -> None:
        async with http.ws_connect(service.url + ROUTE, protocols=(PROTOCOL,)) as socket:
            await socket.receive_str()
            answer = await raw(socket, text)
            assert isinstance(answer, Fault)
            assert answer.code == "refused"
            assert re.search(told, answer.message)
            used = '"id":1' in text and told != PROTOCOL
            again = await raw(socket, RESET.model_copy(update={"id": 2 if used else 1}).encoded())
            assert "noise" in str(again) or again.error == "AttributeError"

    serve(check)


def test_a_number_can_not_be_used_for_another_call():
    async def check(service: Service, http: aiohttp.ClientSession) -> None:
        env = await begun(service.url)
        name = env._session
        await env._hang_up()
        async with http.ws_connect(service.url + ROUTE, protocols=(PROTOCOL,), headers={SESSION: name}) as socket:
            assert read_welcome(await socket.receive_str()).resumed is True
            one = await raw(socket, StepCall(id=2, action=Item.of(Guess(number=1))).encoded())
            same = await raw(socket, StepCall(id=2, action=Item.of(Guess(number=1))).encoded())
            other = await raw(socket, StepCall(id=2, action=Item.of(Guess(number=2))).encoded())
            assert one == same
            assert "differs" in other.message

    serve(check)


def test_two_calls_at_once_are_one_too_many_and_a_flood_is_cut_off():
    async def check(service: Service, http: aiohttp.ClientSession) -> None:
        async with http.ws_connect(service.url + ROUTE, protocols=(PROTOCOL,)) as socket:
            await socket.receive_str()
            await raw(socket, RESET.encoded())
            await socket.send_str(StepCall(id=2, action=Item.of(Guess(number=1))).encoded())
            early = await raw(socket, StepCall(id=3, action=Item.of(Guess(number=1))).encoded())
            assert re.search(r"call 3\b.*answer.*call 2\b", early.message)
            for _ in range(10):
                await socket.send_str(StepCall(id=2, action=Item.of(Guess(number=1))).encoded())
            message = await socket.receive()
            assert (message.type, socket.close_code) == (aiohttp.WSMsgType.CLOSE, aiohttp.WSCloseCode.POLICY_VIOLATION)

    serve(check, Waiting, limits={"grace_seconds": 0.0})


@pytest.mark.parametrize("sent", ["long", "binary"])
def test_what_is_too_long_or_no_text_ends_the_connection_not_the_service(sent: str):
    async def check(service: Service, http: aiohttp.ClientSession) -> None:
        async with http.ws_connect(service.url + ROUTE, protocols=(PROTOCOL,)) as socket:
            await socket.receive_str()
            await (socket.send_str("x" * 20_000) if sent == "long" else socket.send_bytes(b"{}"))
            assert (await socket.receive()).type is aiohttp.WSMsgType.CLOSE
        assert (await play(RemoteEnvironment(service.url, GuessNumber), "7")).status is Status.FINISHED

    serve(check, limits={"message_bytes": 10_000})


def test_an_environment_that_can_not_be_made_is_a_fault_of_that_episode():
    made = []

    class Picky(GuessNumber):
        def __init__(self) -> None:
            made.append(self)
            if len(made) == 1:
                raise RuntimeError("not today")

    async def check(service: Service, http: aiohttp.ClientSession) -> None:
        first = await play(RemoteEnvironment(service.url, Picky), "7")
        assert first.cause is not None
        assert (first.cause.error, "not today" in str(first.cause.message)) == ("RuntimeError", True)
        assert (await play(RemoteEnvironment(service.url, Picky), "7")).status is Status.FINISHED

    serve(check, Picky)


def test_an_instance_that_can_not_be_closed_is_told_to_the_log(caplog: pytest.LogCaptureFixture):
    class Sticky(GuessNumber):
        async def close(self) -> None:
            raise OSError("it sticks")

    async def check(service: Service, http: aiohttp.ClientSession) -> None:
        async with Wire(service.port, [("up", 3, 0)]).laid() as wire:
            env = await begun(wire.url, Sticky)
            await env._hang_up()
            await until(lambda: service.occupied == 0)
        assert re.search("Sticky.*OSError: it sticks", caplog.text)

    serve(check, Sticky, limits={"window_seconds": 0.01})


def test_a_blocking_environment_runs_in_a_thread_of_its_own():
    import threading

    seen: set[str] = set()

    class Blocking(GuessNumber):
        blocking = True

        async def step(self, action: Any) -> Any:
            seen.add(threading.current_thread().name)
            return await super().step(action)

    async def check(service: Service, http: aiohttp.ClientSession) -> None:
        await asyncio.gather(*(play(RemoteEnvironment(service.url, Blocking), "5", "7") for _ in range(3)))
        assert seen == {"tapereel-env-Blocking"}
        await until(lambda: not any(t.name in seen for t in threading.enumerate()))

    serve(check, Blocking)
