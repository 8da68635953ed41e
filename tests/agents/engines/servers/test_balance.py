"""Several servers behind one engine, and what a server or the way to it does wrong beside its answers."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Callable
from contextlib import nullcontext, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from aiohttp import web

from tapereel.agents import EngineError, Request, rollout
from tapereel.agents.engines.servers import Chat, Completions, Generate, RemoteEngine, SGLangGenerate, health
from tapereel.agents.engines.transport import BadAnswer, Server, absence, http_channel
from tapereel.agents.engines.transport.wire import Dialect
from tapereel.agents.engines.weights import PublishFailed
from tapereel.tapes import CauseType, Sampling

from ....finetune.loop.lab import Letters, Speaker
from ...faulty import FaultyServer, changed, listening, no_json, status
from .test_remote import COMPLETION, SGLANG, ask, completed
from .test_servers import WEIGHTS, using

pytestmark = pytest.mark.timeout(60)


def conversations(n: int) -> list[Request]:
    return [replace(ask(seed=k), cache_key=f"conversation {k}") for k in range(n)]


def test_conversations_that_begin_at_once_are_spread_over_the_servers() -> None:
    servers = [FaultyServer(), FaultyServer(), FaultyServer()]

    async def test(engine: RemoteEngine) -> None:
        engine.fleet.members[0].server.in_flight += 6  # as if it were working on something long
        await asyncio.gather(*map(engine.complete, conversations(30)))

    using(servers, test)
    assert [len(server.asked) for server in servers] == [6, 12, 12]


@pytest.mark.parametrize(
    ("fault", "raises"),
    [
        (status(500), True),
        (changed(lambda found: found.update(logprobs=[1])), True),
        (status(503), False),
        (no_json, False),
    ],
)
def test_a_server_that_fails_at_once_does_not_take_all_conversations(fault: Any, raises: bool) -> None:
    """It has the least under way, always. A server that is away loses the request to another one."""
    ill, well = FaultyServer([fault] * 100), FaultyServer()

    async def test(engine: RemoteEngine) -> None:
        with pytest.raises(EngineError) if raises else nullcontext():
            await engine.complete(conversations(7)[6])
        for request in conversations(6 if raises else 5):
            await engine.complete(request)

    using([ill, well], test)
    assert (len(ill.asked), len(well.asked)) == (1, 6)


def test_a_server_that_was_lost_is_avoided_for_a_while_or_until_it_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(health.time, "monotonic", lambda: now)

    async def test() -> None:
        nonlocal now
        first, second = Server("http://127.0.0.1:1"), Server("http://127.0.0.1:2")
        first.in_flight, wellness = -9, health.Wellness()
        assert wellness.best([first, second]) is first
        wellness.lost(first)
        assert wellness.best([first, second]) is second
        assert wellness.best([first]) is first, "there is no elsewhere"
        now += health.AVOIDED
        assert wellness.best([first, second]) is first
        wellness.lost(first)
        wellness.reached(first)
        assert wellness.best([first, second]) is first

    asyncio.run(test())


@pytest.mark.parametrize(
    "step", ["/pause", "/collective_rpc", "/reset_prefix_cache", "/update_weight_version", "/resume"]
)
def test_no_step_of_a_publish_outlives_its_bound(step: str, tmp_path: Path) -> None:
    class StandsStill(FaultyServer):
        async def step(self, request: web.Request) -> web.StreamResponse:
            if request.path == step:
                await asyncio.Event().wait()
            return await super().step(request)

    async def test(engine: RemoteEngine) -> None:
        with pytest.raises(PublishFailed, match=r"0\.2 s"):
            await engine.sync_weights({"w": torch.zeros(2)}, "run:1")

    using([StandsStill()], test, weights_folder=tmp_path, control_seconds=0.2)


def test_a_wait_that_a_server_asks_for_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[float] = []

    async def sleep(seconds: float) -> None:
        waits.append(seconds)

    class Time:
        def __getattr__(self, name: str) -> Any:
            return sleep if name == "sleep" else getattr(asyncio, name)

    monkeypatch.setattr(absence, "asyncio", Time())
    completed(
        FaultyServer(
            [
                status(503, **{"Retry-After": "7"}),
                status(429, **{"Retry-After": "0.5"}),
                status(503, **{"Retry-After": "²"}),
            ]
        )
    )
    assert waits[:2] == [7.0, 0.5]
    assert waits[2] < 1, "what is no number is no wait"


async def one_connection(test: Callable[[Server, asyncio.Event], Any]) -> Any:
    """With a server that drops a connection on which it answered 500, as uvicorn does, and a client of one connection;
    /hang waits for the event."""
    dropped: set[Any] = set()
    go_on = asyncio.Event()

    async def answer(request: web.Request) -> web.StreamResponse:
        assert request.transport is not None
        if request.transport in dropped:
            request.transport.close()
        if request.path == "/hang":
            await go_on.wait()
        if request.path == "/fails":
            dropped.add(request.transport)
            return web.Response(status=500)
        return web.json_response({})

    app = web.Application()
    app.router.add_post("/{route}", answer)
    async with listening(app) as url:
        server = Server(url)
        try:
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(http_channel, "CONNECTIONS", 1)
                return await test(server, go_on)
        finally:
            go_on.set()
            await server.close()


def test_a_control_call_takes_no_connection_that_the_server_may_have_dropped() -> None:
    async def test(server: Server, _: asyncio.Event) -> None:
        for fresh in (False, True):
            with pytest.raises(EngineError, match="500"):
                await server.post("/fails", {}, fresh=fresh)
            assert await server.post("/pause", {}, fresh=True) == {}

    asyncio.run(one_connection(test))


def test_a_control_call_does_not_wait_for_those_who_sample() -> None:
    async def test(server: Server, go_on: asyncio.Event) -> None:
        hanging = asyncio.ensure_future(server.post("/hang", {}))
        while not server.in_flight:  # noqa: ASYNC110  # the other side of a real connection
            await asyncio.sleep(0)
        assert await server.post("/pause", {}, fresh=True) == {}
        go_on.set()
        await hanging

    asyncio.run(one_connection(test))


JUNK: list[Any] = [None, 0, -1, 1.5, "x", [], {}, [1], {"a": 1}, True, math.nan, math.inf, 10**400, [None], 2**31]
CHAT = {
    "prompt_token_ids": [4],
    "usage": {"prompt_tokens": 1, "prompt_tokens_details": None},
    "choices": [
        {
            "index": 0,
            "finish_reason": "stop",
            "token_ids": [8, 9],
            "weight_versions": None,
            "logprobs": {"content": [{"logprob": -0.5}, {"logprob": -1}]},
        }
    ],
}
ASKED = {"seed": 1, "temperature": 1.0, "logprobs": 2}
GENERATE = FaultyServer().answer({"token_ids": [1, 2], "sampling_params": ASKED})


def places(value: Any, here: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    inside = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [here, *(place for name, one in inside for place in places(one, (*here, name)))]


def with_junk(value: Any, place: tuple[Any, ...], junk: Any) -> Any:
    if not place:
        return junk
    copy = value.copy()
    copy[place[0]] = with_junk(value[place[0]], place[1:], junk)
    return copy


@pytest.mark.parametrize(
    ("dialect", "answer"),
    [(Generate(), GENERATE), (Completions(), COMPLETION), (Chat(), CHAT), (SGLangGenerate(), SGLANG)],
    ids=["generate", "completions", "chat", "sglang"],
)
def test_whatever_stands_anywhere_in_an_answer_it_is_read_or_refused(dialect: Dialect, answer: Any) -> None:
    for place in places(answer):
        for junk in JUNK:
            for read in (dialect.parse, dialect.listed):
                with suppress(BadAnswer):
                    read(with_junk(answer, place, junk))


def test_an_answer_that_cannot_be_read_is_the_models_fault_and_asked_for_again() -> None:
    async def nested(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        return web.Response(text="[" * 200_000, content_type="application/json")

    async def test(engine: RemoteEngine) -> Any:
        return await rollout(Speaker(), Letters(), task="ab", engine=engine, sampling=Sampling(max_tokens=5))

    strange = [changed(lambda found: found.update(logprobs=[1])), nested]
    tape = using([FaultyServer(list(strange))], test)
    assert (tape.status, [len(call.attempts) for call in tape.calls]) == ("finished", [2, 1]), tape.cause
    tape = using([FaultyServer(strange * 3)], test)
    assert (tape.status, tape.cause.type) == ("error", CauseType.MODEL)
    assert [json.dumps(call.finish) for call in tape.calls] == ['"error"']


def test_a_server_that_was_started_anew_gives_nothing_until_it_has_the_weights() -> None:
    """It says the label that it had at first, which was right then."""
    anew, well = FaultyServer(), FaultyServer()

    async def test(engine: RemoteEngine) -> None:
        await engine.sync_weights(WEIGHTS, "run:1")
        anew.version = "default"
        untouched = len(well.control)
        for text in "abcd":
            assert (await engine.complete(ask(text))).spans == (("run:1", 0, 5),)
        assert anew.version == "run:1", "it got the newest weights again"
        assert len(well.control) == untouched
        await engine.sync_weights(WEIGHTS, "run:2")
        assert anew.version == "run:2"

    using([anew, well], test)


@pytest.mark.parametrize("late", [False, True])
def test_a_request_that_a_restarted_server_ends_without_a_token_is_asked_again(late: bool) -> None:
    """Another request found its weights wrong, and the pause before they are sent ends all requests there. The ended
    request was sent at the same time as the other one, or `late`: between its answer and the pause."""

    class Restarted(FaultyServer):
        async def waiting(self, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
            self.faults.append(self.at_once)
            self.waits.set()
            await self.paused.wait()
            return web.json_response(self.answer(body, 0, "abort"))

        async def at_once(self, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
            return web.json_response(self.answer(body))

        async def step(self, request: web.Request) -> web.StreamResponse:
            if request.path == "/pause":
                self.pausing.set()
                await self.waits.wait()
                self.paused.set()
            return await super().step(request)

        def __init__(self) -> None:
            super().__init__()
            self.pausing, self.waits, self.paused = asyncio.Event(), asyncio.Event(), asyncio.Event()

    server = Restarted()

    async def test(engine: RemoteEngine) -> None:
        server.waits.set()
        await engine.sync_weights(WEIGHTS, "run:1")
        server.pausing, server.waits, server.paused = asyncio.Event(), asyncio.Event(), asyncio.Event()
        server.version, server.faults = "default", [server.at_once] if late else [server.waiting]
        asked = [asyncio.create_task(engine.complete(ask("a")))]
        if late:
            await server.pausing.wait()
            server.faults.append(server.waiting)
        both = await asyncio.gather(engine.complete(ask("a")), *asked)
        assert [said.spans for said in both] == [(("run:1", 0, 5),)] * 2
        assert len(server.asked) == 4, "each was asked twice"

    using([server], test)
