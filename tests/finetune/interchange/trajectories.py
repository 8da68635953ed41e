"""Tapes of many kinds to export as trajectories: tools, several agents, pictures, programs, forks and failures."""

from __future__ import annotations

import asyncio
import json
import urllib.request
from collections.abc import Callable
from typing import Any

from tapereel.agents import ChatAgent, EpisodeSpec, Limits, ScriptedEngine, rollout
from tapereel.agents.gateway import Program
from tapereel.agents.replay import branch, continuation
from tapereel.envs import Environment, Outcome
from tapereel.envs.adapters import ToolEnvironment
from tapereel.tapes import Answer, Tape, Task, Text, ToolCalls

from ...agents.episode.test_seeing import Player
from ...agents.gateway.lab import Told
from ...agents.picture_worlds import Corners, Gallery
from ...agents.replay.worlds import RENDERER, WORLDS, record, word

HOSTILE = '<script>alert("x")</script> </tool_call> \x1b[2J \u202e ../../etc/passwd'


def add(a: int, b: int) -> str:
    """Add two numbers."""
    if a < 0:
        raise ValueError("a is negative")
    return str(a + b)


def note(text: str) -> str:
    return f"noted: {text}"


def call(name: str, **arguments: Any) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


class Sums(ToolEnvironment):
    def __init__(self) -> None:
        super().__init__([add, note])

    async def prompt(self, task: Task) -> str:
        return f"Add. {HOSTILE}"

    async def answered(self, text: str) -> Outcome:
        return Outcome(reward={"right": float("3" in text)}, terminated=True)


SAID = [
    f"<think>\nTwo sums.\n</think>\n\nI add.\n{call('add', a=1, b=2)}\n{call('add', a=-1, b=2)}",
    call("note", text=HOSTILE),
    f"It is 3. {HOSTILE}",
]


def tools() -> Tape:
    """Two calls at once, of which one fails, a call with hostile text, and the answer."""
    agent = ChatAgent("Be brief.", actions=[ToolCalls], plain=Answer)
    task = Task(id="sum", public="1 + 2", private="3")
    return asyncio.run(
        rollout(agent, Sums, EpisodeSpec.of(task, seed=1, env_seed=2, group="g"), engine=ScriptedEngine(SAID))
    )


class Once(Environment[Answer]):
    """Ends with a last observation, which no model reads."""

    async def reset(self, task: Any) -> Text:
        return Text(text=str(task))

    async def step(self, action: Answer) -> Outcome:
        return Outcome(Text(text="bye"), reward=1.0, terminated=True)


async def ask(task: str, endpoint: Any) -> str:
    """A program that calls a tool by a request to the gateway, and answers."""
    offered = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]
    messages: list[Any] = [{"role": "system", "content": "Use it."}, {"role": "user", "content": task}]

    def post() -> Any:
        body = json.dumps({"model": "m", "messages": messages, "tools": offered}).encode()
        head = {"Authorization": f"Bearer {endpoint.api_key}", "Content-Type": "application/json"}
        asked = urllib.request.Request(f"{endpoint.base_url}/chat/completions", body, head)
        with urllib.request.urlopen(asked) as answer:
            return json.load(answer)["choices"][0]["message"]

    while True:
        message = await asyncio.to_thread(post)
        messages.append(message)
        if not message.get("tool_calls"):
            return message["content"]
        for k, one in enumerate(message["tool_calls"]):
            messages.append({"role": "tool", "tool_call_id": one["id"], "content": str(k)})


def program() -> Tape:
    said = [f"two\n{call('add', a=1)}\n{call('add', a=2)}", "done"]
    engine = Told(lambda messages: said[sum(message["role"] == "assistant" for message in messages)])
    return asyncio.run(rollout(Program(ask), Once, "go", engine=engine))


def fork() -> Tape:
    make, env, _, model, _ = WORLDS["one speaker"]
    engine = ScriptedEngine(model, renderer=RENDERER)
    (tape,) = asyncio.run(branch(make(), env, continuation(record("one speaker", tokens=True), 2), engine=engine))
    return tape


def pictures(env: Any, task: int) -> Tape:
    return asyncio.run(rollout(Player(), env, task, engine=ScriptedEngine(lambda _: "1")))


def ended() -> Tape:
    agent = ChatAgent("Be brief.")
    return asyncio.run(rollout(agent, Once, "go", engine=ScriptedEngine(word), limits=Limits(turns=5)))


KINDS: dict[str, Callable[[], Tape]] = {
    "tools with an error": tools,
    "a program": program,
    "a fork": fork,
    "a last observation": ended,
    "pictures": lambda: pictures(Corners, 1),
    "two pictures in a message": lambda: pictures(Gallery, 3),
    **{name: lambda name=name: record(name) for name in WORLDS},
    **{f"{name}, with tokens": lambda name=name: record(name, tokens=True) for name in WORLDS},
}
