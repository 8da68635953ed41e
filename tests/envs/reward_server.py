"""A reward model behind HTTP, in a process of its own: `python reward_server.py`; prints its port, then serves.

How it answers is in the path: `/score/MODE`. It counts what it is asked; `/asked` tells.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections import Counter
from typing import Any

from aiohttp import web

asked: Counter[str] = Counter()
bodies: list[Any] = []
tokens: list[str | None] = []


def worth(query: str) -> float:
    """The length of the last line: something that every test can compute."""
    return float(len(query.splitlines()[-1])) if query else 0.0


async def score(request: web.Request) -> web.StreamResponse:
    mode = request.match_info["mode"]
    asked[mode] += 1
    body = await request.json()
    bodies.append(body)
    tokens.append(request.headers.get("Authorization"))
    rewards: list[Any] = [worth(query) for query in body["queries"]]
    ids = list(body["ids"])
    if mode == "flaky" and asked[mode] % 3:
        return web.Response(status=503, text="warming up", headers={"Retry-After": "0"})
    if mode == "down":
        return web.Response(status=503, text="no luck", headers={"Retry-After": "0"})
    if mode == "hangup":
        assert request.transport is not None
        request.transport.close()
        return web.Response()
    if mode == "forbidden":
        return web.Response(status=403, text="not you")
    if mode == "turned":
        return web.json_response({"ids": ids[::-1], "rewards": rewards[::-1]})
    if mode == "others":
        return web.json_response({"ids": ["x", *ids[1:]], "rewards": rewards})
    if mode == "twice":
        return web.json_response({"ids": [ids[0]] * len(ids), "rewards": rewards})
    if mode == "short":
        return web.json_response({"rewards": rewards[:-1]})
    if mode == "nan":
        return web.Response(text=json.dumps({"rewards": [float("nan")] * len(rewards)}))
    if mode == "huge":
        return web.Response(text=json.dumps({"rewards": [10**400] * len(rewards)}))
    if mode == "text":
        return web.json_response({"rewards": ["good"] * len(rewards)})
    if mode == "html":
        return web.Response(text="<h1>hello</h1>")
    if mode == "bare":
        return web.json_response(rewards)
    if mode == "null":
        return web.json_response({"rewards": [None, *rewards[1:]]})
    if mode == "named":
        return web.json_response({"rewards": [{"length": r, "constant": 1.0} for r in rewards]})
    if mode == "endless":
        answer = web.StreamResponse()
        await answer.prepare(request)
        while True:
            await answer.write(b" " * (1 << 20))
    if mode == "slow":
        await asyncio.sleep(3600)
    return web.json_response({"rewards": rewards})


async def tell(request: web.Request) -> web.Response:
    return web.json_response({"asked": asked, "bodies": bodies, "tokens": tokens})


async def main() -> None:
    app = web.Application(client_max_size=1 << 26)
    app.add_routes([web.post("/score/{mode}", score), web.get("/asked", tell)])
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    print(runner.addresses[0][1], flush=True)
    await asyncio.to_thread(sys.stdin.read)


if __name__ == "__main__":
    asyncio.run(main())
