"""What the tests of the gateway share: a tiny model, engines that can be told what to do, and a served gateway."""

from __future__ import annotations

import asyncio
import json
from array import array
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp

from tapereel.agents import Capability, Completion, EmbeddedEngine, Request
from tapereel.agents.engines.embedded import char_tokenizer
from tapereel.agents.engines.embedded.tiny_model import tiny_model
from tapereel.agents.gateway import Bounds, Control
from tapereel.agents.rendering import Renderer
from tapereel.tapes import Sampling, Tape
from tapereel.tapes.store import Store

WORDS = char_tokenizer("abcdefghijklmnopqrstuvwxyz 0123456789+-<>{}\"':,._/\n")
RENDERER = Renderer(WORDS)
TOKEN = "an-admin-token-of-the-tests"
SHORT = Sampling(max_tokens=4)


def embedded(context: int = 512, seed: int = 0) -> EmbeddedEngine:
    return EmbeddedEngine(tiny_model(WORDS, "micro", seed=seed, context=context), RENDERER, version="run:0", slots=8)


class Told:
    """Answers what a function of the messages says, as ids with log-probs of one version, when it is let."""

    name = "told"

    def __init__(self, say: Callable[[list[Any]], str] = lambda messages: "yes", *, ids: bool = True) -> None:
        self.say, self._ids = say, ids
        self.changing = False
        self.gate = asyncio.Event()
        self.gate.set()
        self.begun = asyncio.Event()
        self.requests: list[Request] = []

    can: frozenset[Capability] = frozenset({"weights"})

    @property
    def renderer(self) -> Any:
        return RENDERER if self._ids else None

    @property
    def context(self) -> int | None:
        return 4096 if self._ids else None

    async def complete(self, request: Request) -> Completion:
        self.requests.append(request)
        text = self.say(list(request.messages))
        whole = self._completion(text, end=True)
        self.begun.set()
        try:
            await self.gate.wait()
        except asyncio.CancelledError:
            if request.on_partial is not None:
                request.on_partial(self._completion(text[:2], end=False))
            raise
        return whole

    def _completion(self, text: str, *, end: bool) -> Completion:
        if not self._ids:
            return Completion(text=text)
        ids = array("i", WORDS(text, add_special_tokens=False)["input_ids"]) + array("i", RENDERER.end_ids[:1] * end)
        return Completion(
            text=text,
            ids=ids,
            logprobs=array("f", [-0.5] * len(ids)),
            spans=(("run:0", 0, len(ids)),),
            finish="stop" if end else "cancelled",
        )

    def forget(self, cache_key: str) -> None:
        pass

    async def close(self) -> None:
        pass


async def until(done: Callable[[], object]) -> None:
    """Returns once it is true; the test's time limit bounds it."""
    while True:
        if done():
            return
        await asyncio.sleep(0.01)


class Client:
    """Plain HTTP to a gateway, with one key or token."""

    def __init__(self, http: aiohttp.ClientSession, root: str, key: str) -> None:
        self.http, self.root, self.key = http, root, key

    async def __call__(self, method: str, path: str, body: Any = None, **headers: str) -> tuple[int, Any]:
        data = body if isinstance(body, bytes | None) else json.dumps(body).encode()
        typed = {"Content-Type": "application/json"} if method == "POST" else {}
        headers = {
            **typed,
            "Authorization": f"Bearer {self.key}",
            **{k.replace("_", "-"): v for k, v in headers.items()},
        }
        async with self.http.request(method, self.root + path, data=data, headers=headers) as answer:
            text = await answer.text()
            return answer.status, json.loads(text) if answer.content_type == "application/json" else text

    async def ask(self, *messages: Any, **more: Any) -> tuple[int, Any]:
        """A chat completion of these messages; a text is a user's."""
        said = [{"role": "user", "content": m} if isinstance(m, str) else m for m in messages]
        return await self("POST", "/v1/chat/completions", {"model": "any", "messages": said, **more})

    def with_key(self, key: str) -> Client:
        return Client(self.http, self.root, key)


class Stream:
    """A streamed answer, read event by event."""

    def __init__(self, answer: Any) -> None:
        self.answer = answer
        self.text = ""
        """That came so far."""
        self.comments = 0

    async def next(self) -> Any:
        """The next event; None at the end of the stream."""
        while line := await self.answer.content.readline():
            if line.startswith(b"data: "):
                data = line[6:].strip().decode()
                event = data if data == "[DONE]" else json.loads(data)
                if isinstance(event, dict) and event.get("choices"):
                    self.text += event["choices"][0]["delta"].get("content") or ""
                return event
            self.comments += line.startswith(b":")
        return None

    async def until(self, text: str) -> None:
        while self.text != text:
            assert await self.next() is not None

    async def rest(self) -> list[Any]:
        found = []
        while (event := await self.next()) is not None:
            found.append(event)
        return found


@asynccontextmanager
async def streamed(client: Client, *messages: Any, **more: Any) -> AsyncIterator[Stream]:
    said = [{"role": "user", "content": m} if isinstance(m, str) else m for m in messages]
    body = {"model": "m", "messages": said, "stream": True, **more}
    async with client.http.post(
        f"{client.root}/v1/chat/completions", json=body, headers={"Authorization": f"Bearer {client.key}"}
    ) as answer:
        yield Stream(answer)


class Served:
    """A gateway with control routes, and the run that it records."""

    def __init__(self, gateway: Control, admin: Client, store: Store) -> None:
        self.gateway, self.admin, self.store = gateway, admin, store

    async def begin(self, **body: Any) -> tuple[str, Client]:
        """A new tape: its id, and a client with its key."""
        status, told = await self.admin("POST", "/tapereel/tapes", body)
        assert status == 200, told
        return told["tape"], self.admin.with_key(told["key"])

    async def end(self, tape: str, **body: Any) -> Any:
        return (await self.admin("POST", f"/tapereel/tapes/{tape}/end", body))[1]

    async def score(self, tape: str, **rewards: float) -> None:
        status, told = await self.admin("POST", f"/tapereel/tapes/{tape}/rewards", {"rewards": rewards})
        assert status == 200, told

    def tape(self, tape: str) -> Tape:
        self.store.writer.sync()
        return self.store.tape(tape)


@asynccontextmanager
async def served(path: Path, engine: Any, *, bounds: Bounds | None = None, **options: Any) -> AsyncIterator[Served]:
    """A gateway that is served, in a new run."""
    with Store.create(path, durability="os") as store:
        gateway = Control(TOKEN, engine, journal=store.writer, bounds=bounds, **{"sampling": SHORT, **options})
        async with gateway.serving(), aiohttp.ClientSession() as http:
            root = gateway.url.removesuffix("/v1")
            yield Served(gateway, Client(http, root, TOKEN), store)


def books_close(path: Path) -> Any:
    with Store.open(path) as store:
        books = store.books()
    assert books.closes, books.findings
    return books
