"""An environment that misbehaves in ways that only another process survives."""

from __future__ import annotations

import os
import signal
import time

from tapereel.envs import Environment, Outcome
from tapereel.tapes import Action, Observation


class Shown(Observation, kind="simulator_shown"):
    text: str


class Move(Action, kind="simulator_move"):
    number: int


def hang() -> None:
    time.sleep(1000)


class Simulator(Environment[Move]):
    """Blocks its process: 1 hangs, 2 dies, 3 dies by a signal, 4 prints, 5 hangs with a child; 6 raises;
    7 says too much, and 10 much more; 9 ends."""

    blocking = True

    async def reset(self, task: int) -> Shown:
        self.total = task
        return Shown(text=f"process {os.getpid()}")

    async def step(self, action: Move) -> Outcome:
        number = action.number
        if number in (1, 5):
            if number == 5:
                os.fork()
            hang()
        if number == 2:
            os._exit(7)
        if number == 3:
            os.kill(os.getpid(), signal.SIGSEGV)
        if number == 4:
            print('{"t":"result","id":2}', flush=True)
        if number == 6:
            raise ValueError("six")
        if number == 7:
            return Outcome(Shown(text="x" * 20_000))
        if number == 10:
            return Outcome(Shown(text="x" * 9_000_000))
        self.total += number
        return Outcome(Shown(text=str(self.total)), reward=float(number), terminated=number == 9)
