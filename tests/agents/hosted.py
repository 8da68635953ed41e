"""A provider in OpenAI's shapes, in a thread of its own: it says what a script says, and does wrong what it is told."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any

from aiohttp import web

from ..finetune.loop.hosting import in_thread
from .faulty import Fault

Says = Callable[[dict[str, Any]], dict[str, Any]]
"""From the body of a request to the fields of the answer's choice and usage that it sets."""


def echo(body: dict[str, Any]) -> dict[str, Any]:
    """The last message again."""
    return {"content": str(body["messages"][-1]["content"])}


class Provider:
    """`faults` are used up one by one, a request each; then `says` answers."""

    def __init__(self, faults: list[Fault] | None = None, says: Says = echo) -> None:
        self.faults = faults or []
        self.says = says
        self.asked: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.url = ""

    def answer(self, body: dict[str, Any]) -> dict[str, Any]:
        """What it says when all is well: 10 prompt tokens, 4 of them cached, and 5 of the answer."""
        said = self.says(body)
        finish = said.pop("finish_reason", "tool_calls" if said.get("tool_calls") else "stop")
        usage = said.pop(
            "usage",
            {
                "prompt_tokens": 10,
                "completion_tokens": 5,
                "total_tokens": 15,
                "prompt_tokens_details": {"cached_tokens": 4},
            },
        )
        choice = {"index": 0, "finish_reason": finish, "message": {"role": "assistant", "content": None, **said}}
        return {
            "id": "x",
            "object": "chat.completion",
            "created": 1,
            "model": body["model"],
            "choices": [choice],
            **({"usage": usage} if usage else {}),
        }

    async def complete(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.asked.append(body)
        self.headers.append(dict(request.headers))
        if self.faults:
            return await self.faults.pop(0)(request, body)
        return web.json_response(self.answer(body))

    @contextmanager
    def up(self) -> Iterator[Provider]:
        """Serves inside, on loopback."""
        with in_thread(self._serving):
            yield self

    @asynccontextmanager
    async def _serving(self) -> AsyncIterator[None]:
        app = web.Application()
        app.router.add_post("/v1/chat/completions", self.complete)
        runner = web.AppRunner(app, handle_signals=False, shutdown_timeout=0.1)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        self.url = f"http://127.0.0.1:{runner.addresses[0][1]}/v1"
        yield
        await runner.cleanup()


class OneModel(Provider):
    """Knows a single model, `right`."""

    async def complete(self, request: web.Request) -> web.StreamResponse:
        if (await request.json())["model"] != "right":
            return await refuses(404, "no such model")(request, {})
        return await super().complete(request)


def refuses(code: int, message: str = "not now", kind: str = "", **headers: str) -> Fault:
    """Answers with that status and an error in OpenAI's form."""

    async def fault(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        error = {"error": {"message": message, "type": kind, "code": kind or None}}
        return web.json_response(error, status=code, headers={k.replace("_", "-"): v for k, v in headers.items()})

    return fault


def says(text: str, kind: str = "application/json") -> Fault:
    """Answers 200 with that text."""

    async def fault(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        return web.Response(text=text, content_type=kind)

    return fault


NO_CHOICES = json.dumps({"id": "x", "object": "chat.completion", "created": 1, "model": "m", "choices": []})
