"""OpenEnv's own client against a server of ours; runs in the environment that `openenv_env.py` makes.

    python openenv_client.py URL '{"seed": 3}' '[{"number": 5}, {"number": 7}]'
    python openenv_client.py URL steps N '{"number": 5}'

Prints one JSON object: what came, or how many seconds N steps took.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from typing import Any

from openenv.core import GenericEnvClient  # pyright: ignore[reportMissingImports]


async def episode(url: str, arguments: dict[str, Any], actions: list[dict[str, Any]]) -> dict[str, Any]:
    """Each result of one episode, and the state at its end."""
    async with GenericEnvClient(base_url=url) as env:
        results = [await env.reset(**arguments)]
        error = None
        for action in actions:
            try:
                results.append(await env.step(action))
            except RuntimeError as raised:
                error = str(raised)
        state = await env.state()
    return {"results": [[r.observation, r.reward, r.done] for r in results], "state": state, "error": error}


async def steps(url: str, count: int, action: dict[str, Any]) -> dict[str, Any]:
    """Seconds for so many steps in one session."""
    async with GenericEnvClient(base_url=url) as env:
        await env.reset()
        await env.step(action)
        began, busy = time.perf_counter(), time.process_time()
        for _ in range(count):
            await env.step(action)
        return {"seconds": time.perf_counter() - began, "cpu": time.process_time() - busy}


if __name__ == "__main__":
    if sys.argv[2] == "steps":
        found = asyncio.run(steps(sys.argv[1], int(sys.argv[3]), json.loads(sys.argv[4])))
    else:
        found = asyncio.run(episode(sys.argv[1], json.loads(sys.argv[2]), json.loads(sys.argv[3])))
    print(json.dumps(found))
