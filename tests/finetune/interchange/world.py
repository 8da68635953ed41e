"""Tapes to export: sampled by a micro model over two turns, and of text with a call of a tool."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

from tapereel.agents import ChatAgent, Completion, EmbeddedEngine, EpisodeSpec, Request, ScriptedEngine, rollout
from tapereel.envs.adapters import TRLEnvironment, trl_row
from tapereel.tapes import Answer, Sampling, Tape, Task, ToolCalls
from tapereel.tapes.store import Store

from ..loop.lab import RENDERER, Letters, Speaker, model

GROUPS, SIZE = 2, 3


class Dice:
    def reset(self, **_: Any) -> str:
        return " Roll."

    def roll(self, sides: int) -> int:
        """Roll a die."""
        return sides - 1

    def get_reward(self) -> float:
        return 0.5


class Roller(ScriptedEngine):
    """Calls the tool as an API does, then answers."""

    def __init__(self) -> None:
        super().__init__(lambda request: "It is five.")

    async def complete(self, request: Request) -> Completion:
        if any(m["role"] == "tool" for m in request.messages):
            return await super().complete(request)
        call = {"name": "roll", "arguments": json.dumps({"sides": 6})}
        calls = ({"id": "call_0", "type": "function", "function": call},)
        return Completion(text="", tool_calls=calls, finish="tool_calls")


async def _record(store: Store) -> None:
    engine = EmbeddedEngine(model(), RENDERER, version="base:0")
    for group in range(GROUPS):
        for attempt in range(SIZE):
            await rollout(
                Speaker(),
                Letters,
                EpisodeSpec.of(
                    Task(private="ab", bare=True, id="x"),
                    seed=10 * group + attempt,
                    group=f"g{group}",
                    attempt=attempt,
                    sampling=Sampling(max_tokens=3),
                ),
                engine=engine,
                journal=store.writer,
            )
    agent = ChatAgent(actions=[ToolCalls], plain=Answer)
    row = {"prompt": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Six sides."}]}
    await rollout(
        agent,
        lambda: TRLEnvironment(Dice),
        EpisodeSpec.of(trl_row(row), split="demo"),
        engine=Roller(),
        journal=store.writer,
    )
    await store.writer.durable()


def record(path: Path) -> Path:
    """A run with six sampled tapes in two groups, and one of text with a call of a tool."""
    with Store.create(path, durability="os") as store:
        asyncio.run(_record(store))
    return path


def tapes_of(path: Path) -> list[Tape]:
    with Store.open(path) as store:
        return list(store.tapes(closed=True))


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]
