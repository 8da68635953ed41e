"""What the gateway costs: recorded requests a second, milliseconds added to the raw upstream, memory over a long run.

    python benchmarks/gateway.py                      a short look: some seconds
    python benchmarks/gateway.py --requests 50000     memory over a long run
    python benchmarks/gateway.py --stream             milliseconds to the first byte, and CPU for each streamed token

The upstream is a stub that answers at once with 20 token ids and log-probs. `raw` serves it with aiohttp and nothing
else; `gateway` serves it with tapes, ten questions of a growing conversation each, begun, scored and ended over HTTP,
with token ids rendered and everything written to a run directory. Each server is a process of its own, and so is the
client, which speaks HTTP by hand so as not to be what is measured. CPU time is the server's; on a busy machine it is
the number to read. Afterwards the books must close. `raw` is measured on 5,000 requests at most.

With `--stream` the upstream gives 200 tokens, one in each turn of the event loop, to 16 clients at once; half of the
tapes ask for streams, half for whole answers, and what streaming costs is the difference.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import os
import statistics
import sys
import tempfile
import time
from array import array
from pathlib import Path
from typing import Any

TURNS = 10
TOKEN = "the-token-of-the-benchmark"
QUESTION = "what comes after this, and what then?"
ANSWER = "nineteen letters ok"
HEAD = "Host: 127.0.0.1\r\nContent-Type: application/json\r\n"
LONGER = 10
"""How many times as long an answer is that is streamed."""


def engine(times: int = 1) -> Any:
    """The upstream, and the renderer with which the gateway makes token ids of what it is asked. Its answer is repeated
    so many times; more than once, it takes a turn of the event loop for each token."""
    from tapereel.agents import Completion, ScriptedEngine
    from tapereel.agents.engines.embedded.tiny_model import char_tokenizer
    from tapereel.agents.rendering.renderer import Renderer

    tokenizer = char_tokenizer("abcdefghijklmnopqrstuvwxyz ,.?")
    renderer = Renderer(tokenizer)
    text = ANSWER * times
    ids = array("i", [*tokenizer(text, add_special_tokens=False)["input_ids"], renderer.end_ids[0]])
    made = Completion(text=text, ids=ids, logprobs=array("f", [-1.0] * len(ids)), spans=(("stub:0", 0, len(ids)),))

    class Stub(ScriptedEngine):
        name = "stub"

        async def complete(self, request: Any) -> Completion:
            for k in range(len(ids) if times > 1 else 0):
                if request.listener is not None:
                    request.listener.tokens(ids[k : k + 1])
                await asyncio.sleep(0)
            return made

    return Stub([], renderer=renderer)


async def serve(kind: str, out: str) -> None:
    """Serve until stdin ends; says the port first."""
    gc.freeze()  # as the command line does
    gc.set_threshold(50_000, 20, 20)
    stdin = asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)
    if kind == "raw":
        from aiohttp import web

        upstream = engine()

        async def chat(request: web.Request) -> web.Response:
            asked = json.loads(await request.read())
            answer = await upstream.complete(asked)
            message = {"role": "assistant", "content": answer.text}
            choice = {"index": 0, "message": message, "finish_reason": "stop", "logprobs": None}
            return web.json_response(
                {
                    "id": "x",
                    "object": "chat.completion",
                    "created": 0,
                    "model": asked["model"],
                    "choices": [choice],
                    "usage": {},
                }
            )

        app = web.Application()
        app.router.add_post("/v1/chat/completions", chat)
        runner = web.AppRunner(app, access_log=None)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        print(runner.addresses[0][1], flush=True)
        await stdin
        await runner.cleanup()
        return
    from tapereel.agents.gateway import Control
    from tapereel.tapes.store.store import Store

    with Store.create(out) as store:
        control = Control(TOKEN, engine(LONGER if kind == "long" else 1), journal=store.writer)
        async with control.serving() as gateway:
            print(gateway.port, flush=True)
            await stdin


class Connection:
    """HTTP/1.1 over one connection, one request after the other."""

    def __init__(self, port: int) -> None:
        self.port = port

    async def open(self) -> Connection:
        self.reader, self.writer = await asyncio.open_connection("127.0.0.1", self.port)
        return self

    async def post(self, path: str, body: Any, key: str) -> Any:
        data = json.dumps(body).encode()
        head = f"POST {path} HTTP/1.1\r\n{HEAD}Authorization: Bearer {key}\r\nContent-Length: {len(data)}\r\n\r\n"
        self.writer.write(head.encode() + data)
        told = await self.reader.readuntil(b"\r\n\r\n")
        length = int(told.lower().partition(b"content-length:")[2].split(b"\r\n")[0])
        answer = json.loads(await self.reader.readexactly(length))
        if not told.startswith(b"HTTP/1.1 200"):
            raise RuntimeError(f"{path}: {told!r} {answer}")
        return answer

    async def stream(self, path: str, body: Any, key: str) -> float:
        """Reads a stream to its end; the moment at which its first byte came."""
        data = json.dumps({**body, "stream": True}).encode()
        head = f"POST {path} HTTP/1.1\r\n{HEAD}Authorization: Bearer {key}\r\nContent-Length: {len(data)}\r\n\r\n"
        self.writer.write(head.encode() + data)
        told = await self.reader.readuntil(b"\r\n\r\n")
        first = time.perf_counter()
        if not told.startswith(b"HTTP/1.1 200"):
            raise RuntimeError(f"{path}: {told!r}")
        while size := int(await self.reader.readline(), 16):
            await self.reader.readexactly(size + 2)
        await self.reader.readexactly(2)
        return first


async def long_episode(there: Connection, stream: bool, took: list[float]) -> None:
    """As many questions, each of its own; appends the seconds until the first byte of each answer came."""
    begun = await there.post("/tapereel/tapes", {"task": "t"}, TOKEN)
    for k in range(TURNS):
        body = {"model": "m", "messages": [{"role": "user", "content": f"{QUESTION}{'?' * k}"}]}
        started = time.perf_counter()
        if stream:
            took.append(await there.stream("/v1/chat/completions", body, begun["key"]) - started)
        else:
            await there.post("/v1/chat/completions", body, begun["key"])
            took.append(time.perf_counter() - started)
    await there.post(f"/tapereel/tapes/{begun['tape']}/end", {}, TOKEN)


async def episode(there: Connection, kind: str, took: list[float]) -> None:
    """Ten questions of one conversation; appends the seconds of each."""
    key = "none"
    if kind == "gateway":
        begun = await there.post("/tapereel/tapes", {"task": "t"}, TOKEN)
        key = begun["key"]
    messages: list[Any] = []
    for _ in range(TURNS):
        messages.append({"role": "user", "content": QUESTION})
        started = time.perf_counter()
        answer = await there.post("/v1/chat/completions", {"model": "m", "messages": messages}, key)
        took.append(time.perf_counter() - started)
        messages.append(answer["choices"][0]["message"])
    if kind == "gateway":
        await there.post(f"/tapereel/tapes/{begun['tape']}/rewards", {"rewards": {"right": 1.0}}, TOKEN)
        await there.post(f"/tapereel/tapes/{begun['tape']}/end", {}, TOKEN)


class Server:
    """A server process, and what it used so far."""

    async def start(self, kind: str, out: str) -> int:
        self.process = await asyncio.create_subprocess_exec(
            sys.executable,
            __file__,
            "--serve",
            kind,
            "--out",
            out,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
        )
        assert self.process.stdout is not None
        return int(await self.process.stdout.readline())

    @property
    def cpu(self) -> float:
        """Seconds."""
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    @property
    def rss(self) -> float:
        """MiB."""
        lines = Path(f"/proc/{self.process.pid}/status").read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith("VmRSS")) / 1024

    async def stop(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        await self.process.wait()


async def measure(kind: str, requests: int, clients: int, out: str) -> dict[str, float]:
    """Latency of one client alone, then throughput of many, with memory as it goes."""
    server = Server()
    port = await server.start(kind, out)
    alone: list[float] = []
    there = await Connection(port).open()
    for _ in range(40):
        await episode(there, kind, alone)
    alone = alone[len(alone) // 4 :]
    took: list[float] = []
    left = requests // TURNS
    marks = {requests // TURNS * k // 5: k for k in range(1, 5)}
    told: dict[str, float] = {"rss_0": server.rss}

    async def client() -> None:
        nonlocal left
        there = await Connection(port).open()
        while left > 0:
            left -= 1
            await episode(there, kind, took)
            if left in marks:
                told[f"rss_{100 - 20 * marks[left]}"] = server.rss

    cpu, started = server.cpu, time.perf_counter()
    await asyncio.gather(*(client() for _ in range(clients)))
    seconds = time.perf_counter() - started
    told.update(
        per_second=len(took) / seconds,
        cpu_ms=(server.cpu - cpu) / len(took) * 1e3,
        rss_100=server.rss,
        median_ms=statistics.median(alone) * 1e3,
        requests=len(took),
    )
    await server.stop()
    return told


async def compare(requests: int, clients: int) -> None:
    """Print what both cost."""
    with tempfile.TemporaryDirectory() as folder:
        found = {
            "raw": await measure("raw", min(requests, 5000), clients, f"{folder}/raw"),
            "gateway": await measure("gateway", requests, clients, f"{folder}/gateway"),
        }
        from tapereel.tapes.store.store import Store

        with Store.open(f"{folder}/gateway") as store:
            books = store.books()
        size = sum(path.stat().st_size for path in store.folder.glob("*.jsonl"))
    print(f"{requests:,} requests, {TURNS} a tape, {clients} clients, 20 tokens an answer")
    for kind, told in found.items():
        print(
            f"{kind:8} {told['per_second']:8,.0f} requests/s  {told['cpu_ms']:6.3f} ms of CPU each "
            f"({1e3 / told['cpu_ms']:,.0f} a core)  median alone {told['median_ms']:.2f} ms"
        )
    raw, gateway = found["raw"], found["gateway"]
    print(
        f"added at the median: {gateway['median_ms'] - raw['median_ms']:.2f} ms; "
        f"CPU added: {gateway['cpu_ms'] - raw['cpu_ms']:.3f} ms"
    )
    print(
        "memory of the gateway, MiB, after 0, 20, 40, 60, 80, 100 % of the requests: "
        + ", ".join(f"{gateway[f'rss_{k}']:.0f}" for k in range(0, 101, 20))
    )
    print(
        f"{books.begun:,} tapes, {books.sampled:,} tokens sampled, {size / 1e6:.0f} MB; the books "
        + ("close" if books.closes else f"DON'T CLOSE: {books.findings[:3]}")
    )


async def compare_streams(requests: int, clients: int) -> None:
    """Print what streaming costs."""
    tokens = LONGER * len(ANSWER) + 1
    cpu, alone = {}, {}
    with tempfile.TemporaryDirectory() as folder:
        server = Server()
        port = await server.start("long", f"{folder}/long")
        one = await Connection(port).open()
        for stream in (False, True):
            for _ in range(5):
                await long_episode(one, stream, alone.setdefault(stream, []))
            started, took = server.cpu, []
            left = requests // TURNS

            async def client(stream: bool = stream, took: list[float] = took) -> None:
                nonlocal left
                there = await Connection(port).open()
                while left > 0:
                    left -= 1
                    await long_episode(there, stream, took)

            await asyncio.gather(*(client() for _ in range(clients)))
            cpu[stream] = (server.cpu - started) / len(took) * 1e3
        rss = server.rss
        await server.stop()
    print(f"{requests:,} answers of {tokens} tokens, {clients} clients, whole and streamed")
    print(
        f"one client alone: {statistics.median(alone[True]) * 1e3:.2f} ms to the first byte of a stream, "
        f"{statistics.median(alone[False]) * 1e3:.2f} ms to a whole answer"
    )
    print(
        f"CPU of the server: {cpu[False]:.2f} ms for a whole answer, {cpu[True]:.2f} ms for a streamed one, "
        f"{(cpu[True] - cpu[False]) / tokens * 1e3:.0f} microseconds for each token; {rss:.0f} MiB"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=5000)
    parser.add_argument("--clients", type=int, default=16)
    parser.add_argument("--stream", action="store_true")
    parser.add_argument("--serve", choices=["raw", "gateway", "long"], help=argparse.SUPPRESS)
    parser.add_argument("--out", default="", help=argparse.SUPPRESS)
    args = parser.parse_args()
    work = compare_streams if args.stream else compare
    asyncio.run(serve(args.serve, args.out) if args.serve else work(args.requests, args.clients))


if __name__ == "__main__":
    main()
