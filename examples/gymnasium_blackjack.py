"""Blackjack from gymnasium, played by an agent that asks a model: one tape per hand, many hands at once.

The model here is scripted (hit below 17), so that the example runs anywhere; put an engine in its place to play with a
real one. Needs `pip install "tapereel[gym]"`.
"""

import asyncio
import json

from tapereel.agents import ChatAgent, Request, ScriptedEngine, rollout
from tapereel.envs import GymAction, GymEnvironment, Taskset
from tapereel.tapes import Tape

SYSTEM = """You play blackjack. You are shown [your sum, the dealer's card, 1 if you hold a usable ace].
Answer with one digit: 1 to take another card, 0 to stop."""


def model(request: Request) -> str:
    mine, _dealer, _ace = json.loads(request.messages[-1]["content"])
    return "1" if mine < 17 else "0"


async def play(hands: int) -> list[Tape]:
    player = ChatAgent(SYSTEM, parse=lambda text: GymAction(value=int(text)), name="player")
    engine = ScriptedEngine(model)
    # A task is the seed of a hand, so the same hands can be played again by another agent.
    tasks = Taskset(range(hands))
    return await asyncio.gather(
        *(rollout(player, lambda: GymEnvironment("Blackjack-v1"), task, engine=engine) for task in tasks)
    )


if __name__ == "__main__":
    tapes = asyncio.run(play(hands=200))
    for step in max(tapes, key=len):
        print(f"{step.kind}: {step}")
    rewards = [tape.reward for tape in tapes if tape.reward is not None]
    print(f"{len(tapes)} hands, mean reward {sum(rewards) / len(rewards):+.2f}")
