"""Episodes of every example: the agent replays them, and the environment executes them again.

Runs in a process of its own for each example, as `python -m tests.agents.replay.scenes hello.py`: two examples may
both define a `Hint`.
"""

from __future__ import annotations

import asyncio
import json
import random
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tapereel.agents import Agent, Request, ScriptedEngine, rollout
from tapereel.agents.engines import TeamEngine
from tapereel.agents.replay import replay
from tapereel.envs import Environment
from tapereel.envs.checks.reexec import reexec
from tapereel.envs.load_named import load_named
from tapereel.tapes import Sampling, Tape

EXAMPLES = Path(__file__).resolve().parents[3] / "examples"
Scene = tuple[Agent, Callable[[], Environment[Any]], list[Tape]]


def named(file: str, name: str) -> Any:
    return load_named(f"{EXAMPLES / file}:{name}")


async def played(
    agent: Agent, env: Callable[[], Environment[Any]], tasks: Any, engine: Any, **options: Any
) -> list[Tape]:
    every = [rollout(agent, env, task, engine=engine, seed=k, **options) for k, task in enumerate(tasks)]
    return await asyncio.gather(*every)


def hello() -> Scene:
    player, env = named("hello.py", "Player")(), named("hello.py", "GuessNumber")
    engine = ScriptedEngine(lambda request: str(1 + request.seed % 9))
    return player, env, asyncio.run(played(player, env, range(1, 10), engine))


def digits() -> Scene:
    player, env = named("digits.py", "player"), named("digits.py", "Digits")
    engine = ScriptedEngine(named("digits.py", "counting"))
    return player, env, asyncio.run(played(player, env, named("digits.py", "tasks")(), engine))


def flat_grpo() -> Scene:
    player, env = named("flat_grpo.py", "player"), named("flat_grpo.py", "FindDigit")
    tokenizer = named("flat_grpo.py", "char_tokenizer")("0123456789?<>")
    model = named("flat_grpo.py", "tiny_model")(tokenizer, "micro", seed=0, context=32)
    engine = named("flat_grpo.py", "BatchedEngine")(model, named("flat_grpo.py", "Renderer")(tokenizer))
    return player, env, asyncio.run(played(player, env, range(10), engine, sampling=Sampling(max_tokens=1)))


def gymnasium_blackjack() -> Scene:
    tapes = asyncio.run(named("gymnasium_blackjack.py", "play")(hands=20))
    chat, action = named("gymnasium_blackjack.py", "ChatAgent"), named("gymnasium_blackjack.py", "GymAction")
    player = chat(named("gymnasium_blackjack.py", "SYSTEM"), parse=lambda text: action(value=int(text)), name="player")
    gym = named("gymnasium_blackjack.py", "GymEnvironment")
    return player, lambda: gym("Blackjack-v1"), tapes


def mcp_agent() -> Scene:
    def looks_it_up(request: Request) -> str:
        last = request.messages[-1]
        if last["role"] == "tool":
            return str(last["content"])
        call = {"name": "lookup", "arguments": {"word": str(last["content"]).split(" of ")[1].split("?")[0]}}
        return f"<tool_call>{json.dumps(call)}</tool_call>"

    asker, env = named("mcp_agent.py", "asker"), named("mcp_agent.py", "Codes")
    tasks = [*named("mcp_agent.py", "tasks")()] * 4
    return asker, env, asyncio.run(played(asker, env, tasks, ScriptedEngine(looks_it_up)))


def two_agents() -> Scene:
    env = named("two_agents.py", "Hidden")
    engines = {
        named("two_agents.py", "GUIDE"): ScriptedEngine(lambda request: request.messages[-1]["content"].upper()),
        named("two_agents.py", "SEEKER"): ScriptedEngine(lambda request: "abcd"[request.seed % 4]),
    }
    pair = named("two_agents.py", "Pair")()
    return pair, env, asyncio.run(played(pair, env, named("two_agents.py", "tasks")() * 3, TeamEngine(engines)))


SCENES = {
    "hello.py": hello,
    "digits.py": digits,
    "flat_grpo.py": flat_grpo,
    "mcp_agent.py": mcp_agent,
    "gymnasium_blackjack.py": gymnasium_blackjack,
    "two_agents.py": two_agents,
}
"""The gateway's programs replay in tests/gateway."""


def main(name: str) -> None:
    agent, env, tapes = SCENES[name]()
    with asyncio.Runner() as runner:  # one loop, in which a server that episodes share is started once
        for tape in random.Random(0).sample(tapes, len(tapes)):
            for verdict in (runner.run(replay(tape, agent)), runner.run(reexec(tape, env))):
                assert verdict.outcome == "verified", verdict
    print(f"{name}: {len(tapes)} tapes verified")


if __name__ == "__main__":
    main(sys.argv[1])
