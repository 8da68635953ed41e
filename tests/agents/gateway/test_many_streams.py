"""64 streams at once, by three APIs and one real model: some clients hang up in the midst, some read slowly."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import torch

from tapereel.agents import EmbeddedEngine
from tapereel.agents.engines.embedded.tiny_model import tiny_model
from tapereel.agents.gateway import Bounds
from tapereel.tapes import Sampling, Tape

from .conversations import APIS, WRITE
from .lab import RENDERER, WORDS, Client, Served, books_close, served, until
from .test_live import asked

STREAMS, TOKENS, HEARD = 64, 120, 3
"""Clients, tokens of an answer, and pieces of text after which a client hangs up."""
LAST: Any = {"chat": "[DONE]", "responses": "response.incomplete", "messages": "message_stop"}
"""The last event of a stream that was cut at `max_tokens`, or its type."""


def endless() -> Any:
    """A model that samples its end token about never, so that a client surely hangs up in the midst."""
    model = tiny_model(WORDS, "micro", context=256)
    with torch.no_grad():
        weight = model.get_input_embeddings().weight
        weight *= 8
        weight[list(RENDERER.end_ids)] = 0
    return model


async def events(client: Client, api: str, question: str, slow: asyncio.Event | None) -> AsyncIterator[Any]:
    """The events of one streamed answer, over a socket of its own. With `slow`, the socket's buffer is small and the
    events are large, and only the first is read until `slow` is set."""
    lazy = socket.socket()
    if slow is not None:
        lazy.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    lazy.setblocking(False)
    await asyncio.get_running_loop().sock_connect(lazy, ("127.0.0.1", int(client.root.rpartition(":")[2])))
    reader, writer = await asyncio.open_connection(sock=lazy, limit=1 << 20 if slow is None else 1 << 15)
    model = "m" if slow is None else "m" * 8000
    body = json.dumps({**WRITE[api](None, [question]), "model": model, "stream": True}).encode()
    head = f"POST {APIS[api]} HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {client.key}\r\n"
    head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    writer.write(head.encode() + body)
    try:
        assert (await reader.readline()).split()[1] == b"200"
        while (line := await reader.readline()) != b"0\r\n":
            assert line, "the connection was lost"
            if line.startswith(b"data: "):
                data = line[6:].strip().decode()
                yield data if data == "[DONE]" else json.loads(data)
                if slow is not None:
                    await slow.wait()
    finally:
        writer.transport.abort()


def text_of(api: str, event: Any) -> str:
    """The new text in an event."""
    if api == "chat":
        return "" if event == "[DONE]" else event["choices"][0]["delta"].get("content") or ""
    if event["type"] == "response.output_text.delta":
        return event["delta"]
    return event["delta"]["text"] if event["type"] == "content_block_delta" else ""


async def read(client: Client, api: str, k: int, slow: asyncio.Event | None) -> tuple[str, Any]:
    """The text and the last event of stream `k`."""
    text, last = "", None
    async for last in events(client, api, f"tape {k}", slow):
        text += text_of(api, last)
    return text, last if api == "chat" else last["type"]


async def hang_up(client: Client, api: str, k: int) -> str:
    """The text that was read until the client hung up."""
    pieces = list[str]()
    stream = events(client, api, f"tape {k}", None)
    async for event in stream:
        if piece := text_of(api, event):
            pieces.append(piece)
        if len(pieces) == HEARD:
            break
    await stream.aclose()  # type: ignore[attr-defined]
    return "".join(pieces)


async def scene(there: Served) -> tuple[dict[int, tuple[str, Any]], dict[int, str], list[Tape]]:
    """What the clients that stay have read, what the others have, and all tapes."""
    apis, rest_read = [*APIS], asyncio.Event()
    begun = [await there.begin(task="t", seed=k) for k in range(STREAMS)]
    kinds: dict[str, list[int]] = {
        kind: [k for k in range(STREAMS) if k % 4 in places]
        for kind, places in {"quick": (0, 1), "slow": (2,), "gone": (3,)}.items()
    }

    async def group(ks: list[int], function: Any, *more: Any) -> dict[int, Any]:
        return dict(
            zip(ks, await asyncio.gather(*(function(begun[k][1], apis[k % 3], k, *more) for k in ks)), strict=True)
        )

    slow = asyncio.ensure_future(group(kinds["slow"], read, rest_read))
    quick, gone = await asyncio.gather(group(kinds["quick"], read, None), group(kinds["gone"], hang_up))
    for k in kinds["gone"]:
        await until(lambda k=k: there.tape(begun[k][0]).calls)
    rest_read.set()
    stayed = {**quick, **await slow}
    for tape, _ in begun:
        await there.end(tape)
    return stayed, gone, [there.tape(tape) for tape, _ in begun]


def logprobs(model: Any, prompt: list[int], ids: list[int]) -> torch.Tensor:
    """Of `ids` after `prompt`, in one pass of the model."""
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([[*prompt, *ids]])).logits[0, len(prompt) - 1 : -1]
    return torch.log_softmax(logits.float(), -1).gather(1, torch.tensor(ids)[:, None])[:, 0]


def test_64_streams_lose_and_mix_nothing(tmp_path: Path):
    async def whole() -> Any:
        engine = EmbeddedEngine(endless(), RENDERER, version="run:0", slots=STREAMS)
        sampling, bounds = Sampling(max_tokens=TOKENS), Bounds(write_seconds=300.0)
        async with served(tmp_path, engine, sampling=sampling, bounds=bounds) as there:
            return await scene(there)

    stayed, gone, tapes = asyncio.run(whole())
    model, sampled = endless(), 0
    for k, tape in enumerate(tapes):
        (call,) = asked(tape)
        prompt, ids = list(call.prompt), list(call.completion)
        assert prompt == list(RENDERER.prompt([{"role": "user", "content": f"tape {k}"}]).ids)
        torch.testing.assert_close(logprobs(model, prompt, ids), torch.tensor(call.logprobs), atol=1e-4, rtol=0)
        said = RENDERER.decode(ids)
        if k in stayed:
            api = [*APIS][k % 3]
            assert stayed[k] == (said, LAST[api])
            assert (call.finish, len(ids)) == ("length", TOKENS)
            assert not tape.layers
        else:
            assert said.startswith(gone[k])
            assert HEARD <= len(ids) < TOKENS
            assert call.finish == "cancelled"
            assert [label.use for label in tape.layers] == ["discarded"]  # type: ignore[attr-defined]
        sampled += len(ids)
    assert books_close(tmp_path).sampled == sampled
