"""A server in vLLM's shapes, as recorded from a real one, that does wrong what a test tells it to.

The answer to a prompt depends on nothing but the prompt and the seed, so a retried request gives the same tokens.
"""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

from aiohttp import web

Fault = Callable[[web.Request, dict[str, Any]], Awaitable[web.StreamResponse]]

LENGTH = 5
STEPS = (
    "/pause",
    "/collective_rpc",
    "/reset_prefix_cache",
    "/update_weight_version",
    "/resume",
    "/sleep",
    "/wake_up",
    "/v1/load_lora_adapter",
    "/v1/unload_lora_adapter",
    "/init_weight_transfer_engine",
    "/shutdown_weight_transfer_engine",
    "/start_weight_update",
    "/update_weights",
    "/finish_weight_update",
)


@asynccontextmanager
async def listening(app: web.Application) -> AsyncIterator[str]:
    """Serves an application on loopback; its address."""
    runner = web.AppRunner(app, handle_signals=False, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    assert site._server is not None
    port = site._server.sockets[0].getsockname()[1]  # type: ignore[attr-defined]
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        await runner.cleanup()


class FaultyServer:
    """`faults` are used up one by one, a request each; then all is well."""

    workers = 1

    def __init__(self, faults: list[Fault] | None = None) -> None:
        self.faults = faults or []
        self.version = "default"
        self.asked: list[dict[str, Any]] = []
        self.control: list[str] = []
        """Routes of the control plane, as they were asked."""
        self.told: list[tuple[str, dict[str, Any]]] = []
        """The same with their parameters and bodies."""
        self.broken_step = ""
        self.pending: dict[str, asyncio.Event] = {}

    @asynccontextmanager
    async def up(self) -> AsyncIterator[str]:
        app = web.Application()
        for route in ("/version", "/v1/models", "/weight_info", "/health", "/is_paused", "/get_world_size"):
            app.router.add_get(route, self.about)
        app.router.add_post("/inference/v1/generate", self.generate)
        app.router.add_post("/inference/v1/abort_requests", self.abort)
        for step in STEPS:
            app.router.add_post(step, self.step)
        async with listening(app) as url:
            yield url

    def answer(self, body: dict[str, Any], length: int = LENGTH, finish: str = "length") -> dict[str, Any]:
        """What a healthy server says."""
        length = min(length, body["sampling_params"].get("max_tokens", length))
        ids = [8 + (sum(body["token_ids"]) + body["sampling_params"]["seed"] + k) % 4 for k in range(length)]
        scale = 1.0 / body["sampling_params"]["temperature"]
        count = body["sampling_params"]["logprobs"]
        content = [
            {
                "token_id": token,
                "logprob": -0.5,
                "rank": 1,
                "top_logprobs": [
                    {"token_id": k, "logprob": -0.5 - scale * 0.25 * k, "rank": k + 1} for k in range(count)
                ],
            }
            for token in ids
        ]
        versions = [{"version": self.version, "start": 0, "end": length}] if length else []
        return {
            "request_id": "generate-tokens-x",
            "usage": {"prompt_tokens": len(body["token_ids"])},
            "choices": [
                {
                    "index": 0,
                    "token_ids": ids,
                    "logprobs": {"content": content},
                    "finish_reason": finish,
                    "weight_versions": versions,
                }
            ],
        }

    async def generate(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        if body["request_id"] != "tapereel-probe":
            self.asked.append(body)
            if self.faults:
                return await self.faults.pop(0)(request, body)
        if body["stream"]:
            return await sent(request, chunks(self.answer(body)))
        return web.json_response(self.answer(body))

    async def hang(self, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        """A fault: waits until it is aborted, then gives two tokens."""
        event = self.pending[f"generate-tokens-{body['request_id']}"] = asyncio.Event()
        await event.wait()
        return web.json_response(self.answer(body, 2, "abort"))

    async def abort(self, request: web.Request) -> web.StreamResponse:
        for name in (await request.json())["request_ids"]:
            self.pending.pop(name).set()
        return web.json_response({})

    async def about(self, request: web.Request) -> web.StreamResponse:
        models = [{"id": "m", "max_model_len": 64}]
        return web.json_response(
            {"version": "0.32.0", "weight_version": self.version, "data": models, "world_size": self.workers}
        )

    async def step(self, request: web.Request) -> web.StreamResponse:
        self.control.append(request.path)
        self.told.append((request.path, {**request.query, **(await request.json() if request.can_read_body else {})}))
        if request.path == self.broken_step:
            return web.Response(status=500, text="out of memory")
        if request.path == "/update_weight_version":
            self.version = (await request.json())["new_version"]
        if request.path == "/finish_weight_update":
            self.version = (await request.json())["weight_version"]
        return web.json_response({})


class Mortal(FaultyServer):
    """Dies at a step: from then on each connection is closed without an answer."""

    def __init__(self, step: str = "", dead: bool = False) -> None:
        super().__init__()
        self.last, self.dead = step, dead

    async def about(self, request: web.Request) -> web.StreamResponse:
        return await (dropped(request, {}) if self.dead else super().about(request))

    async def generate(self, request: web.Request) -> web.StreamResponse:
        return await (dropped(request, {}) if self.dead else super().generate(request))

    async def step(self, request: web.Request) -> web.StreamResponse:
        self.dead = self.dead or request.path == self.last
        return await (dropped(request, {}) if self.dead else super().step(request))

    def revive(self) -> None:
        """Come up as a new process, with the weights that it began with."""
        self.last, self.dead, self.version = "", False, "default"


def chunks(answer: dict[str, Any]) -> list[Any]:
    """The same as a stream: a token each, the versions with the last, then the usage."""
    (choice,) = answer["choices"]
    ids, last = (
        choice["token_ids"],
        {"finish_reason": choice["finish_reason"], "weight_versions": choice["weight_versions"]},
    )
    found = [
        {
            "choices": [
                {
                    "index": 0,
                    "token_ids": [id],
                    "finish_reason": None,
                    "weight_versions": None,
                    "logprobs": {"content": [choice["logprobs"]["content"][k]]},
                    **(last if k == len(ids) - 1 else {}),
                }
            ]
        }
        for k, id in enumerate(ids)
    ]
    if "mm_placeholders" in answer:
        found[0] |= {name: answer[name] for name in ("prompt_token_ids", "mm_placeholders")}
    return [*found, {"choices": [], "usage": answer["usage"]}, "[DONE]"]


async def sent(request: web.Request, events: list[Any]) -> web.StreamResponse:
    """Sends these as a stream; None drops the connection."""
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await response.prepare(request)
    for event in events:
        if event is None:
            assert request.transport is not None
            request.transport.close()
            break
        data = event if isinstance(event, str) else json.dumps(event, allow_nan=True)
        await response.write(f"data: {data}\n\n".encode())
    return response


def streams(change: Callable[[list[Any]], object]) -> Fault:
    """Streams as a healthy server would, but for `change` of the events."""

    async def fault(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        events = chunks(FaultyServer().answer(body))
        change(events)
        return await sent(request, events)

    return fault


def status(code: int, text: str = "not now", **headers: str) -> Fault:
    """Answers with that status."""

    async def fault(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        return web.Response(status=code, text=text, headers=headers)

    return fault


def changed(change: Callable[[dict[str, Any]], object]) -> Fault:
    """Answers as a healthy server would, but for `change` of the choice."""

    async def fault(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        answer = FaultyServer().answer(body)
        change(answer["choices"][0])
        return web.Response(text=json.dumps(answer, allow_nan=True), content_type="application/json")

    return fault


async def dropped(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
    """Closes the connection without a word."""
    assert request.transport is not None
    request.transport.close()
    return web.Response()


async def cut_short(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
    """Breaks off in the middle of the answer."""
    response = web.StreamResponse(headers={"Content-Length": "1000", "Content-Type": "application/json"})
    await response.prepare(request)
    await response.write(b'{"choices": [{"token_ids": [8, 9')
    assert request.transport is not None
    request.transport.close()
    return response


async def no_json(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
    return web.Response(text="<html>gateway</html>")


async def stuck(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
    """Never answers."""
    await asyncio.Event().wait()
    return web.Response()


NAN = math.nan
