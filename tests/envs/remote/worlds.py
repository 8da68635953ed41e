"""Environments that are served in these tests, players for them, and a wire that can be cut."""

from __future__ import annotations

import asyncio
import random
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Literal

from tapereel.agents import EpisodeSpec, ScriptedEngine, agent, rollout
from tapereel.envs import Environment, Outcome
from tapereel.envs.remote import Service
from tapereel.tapes import Action, Observation, Status, Tape
from tapereel.tapes.common import token_for
from tapereel.tapes.common.access_token import private_file, token_path

SIMULATOR = f"{Path(__file__).with_name('simulator.py')}:Simulator"
"""As a process of a pool finds it."""


class Hint(Observation, kind="remote_hint"):
    text: str
    noise: float


class Secret(Observation, kind="remote_secret"):
    text: str


class Guess(Action, kind="remote_guess"):
    number: int


class Give(Action, kind="remote_give_up"):
    why: str = ""


class GuessNumber(Environment[Guess | Give]):
    """A task is the number. What `rng` draws is shown, so that another generator would be seen."""

    acted = 0
    """Steps carried out, of all instances."""
    closed = 0

    async def reset(self, task: int) -> Hint:
        self.secret, self.turns = task, 0
        return self._hint("a number from 1 to 9")

    async def step(self, action: Guess | Give) -> Outcome:
        GuessNumber.acted += 1
        self.turns += 1
        if isinstance(action, Give):
            return Outcome(truncated=True, metrics={"turns": float(self.turns)})
        if action.number == 0:
            raise KeyError("no zero here")
        if action.number == self.secret:
            return Outcome(reward={"right": 1.0, "fast": 0.5 / self.turns}, terminated=True)
        return Outcome(self._hint("higher" if action.number < self.secret else "lower"), reward=-0.1)

    async def finish(self, status: Status) -> Outcome | None:
        return Outcome(metrics={"turns": float(self.turns)}) if status is Status.FINISHED else None

    async def close(self) -> None:
        GuessNumber.closed += 1

    def _hint(self, text: str) -> Hint:
        return Hint(text=text, noise=self.rng.gauss(0, 1))


class Blurting(GuessNumber):
    """Shows a kind of observation that it doesn't declare."""

    async def step(self, action: Guess | Give) -> Outcome:
        return Outcome(Secret(text="not declared"))


class Telling(Blurting):
    """Declares it."""

    kinds = (Secret,)


class Deeds(GuessNumber):
    effect = "idempotent"


def making() -> GuessNumber:
    return GuessNumber()


class Waiting(Environment[Guess]):
    """A guess of 1 waits for as long as it may; 2 exits the interpreter; others end the episode."""

    async def reset(self, task: int) -> Hint:
        return Hint(text="go", noise=0.0)

    async def step(self, action: Guess) -> Outcome:
        if action.number == 1:
            await asyncio.Event().wait()
        if action.number == 2:
            sys.exit(3)
        return Outcome(reward=float(action.number), terminated=True)


@agent
async def player(tape: Any, llm: Any) -> AsyncIterator[Action]:
    """Says numbers; `x` gives up."""
    text = (await llm(tape)).text
    yield Give(why="bored") if text == "x" else Guess(number=int(text))


def say(seen: Observation, rng: random.Random) -> Action:
    """A policy for check_env."""
    return Guess(number=rng.randint(1, 9))


async def play(
    env: Environment[Any] | Callable[[], Environment[Any]],
    *words: str,
    task: Any = 7,
    journal: Any = None,
    **fields: Any,
) -> Tape:
    """One episode of the player."""
    spec = EpisodeSpec.of(task, **fields)
    return await rollout(player, env, spec, engine=ScriptedEngine(list(words)), journal=journal)


def told(tape: Tape) -> dict[str, Any]:
    """What a tape says of its environment, without when and where it ran."""
    cause = tape.cause
    return {
        "steps": [(step.kind, step.model_dump()) for step in tape],
        "status": tape.status,
        "reward": tape.reward,
        "rewards": [(r.step, r.name, r.value, r.weight) for r in tape.rewards],
        "cause": None if cause is None else (cause.type, cause.error),
    }


Direction = Literal["up", "down"]


async def until(condition: Callable[[], Any]) -> None:
    """Let others work until it holds."""
    while not condition():  # noqa: ASYNC110 - what is waited for is a state, of which nobody tells
        await asyncio.sleep(0.001)


def bearer(service: Service) -> dict[str, str]:
    """What a client that is none of ours sends."""
    return {"Authorization": f"Bearer {service.token}"}


class Wire:
    """A TCP relay in front of a service. `cuts` says, of each connection in turn, in which direction and at which
    chunk it breaks (and how many bytes of that chunk still pass); None: it holds."""

    def __init__(self, port: int, cuts: list[tuple[Direction, int, int] | None]) -> None:
        self.port = port
        self.cuts = cuts
        self.connections = 0
        self.url = ""

    @asynccontextmanager
    async def laid(self) -> AsyncIterator[Wire]:
        server = await asyncio.start_server(self._relay, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        # The service's clients find its token by the address that they use, which is the relay's.
        token = token_for(f"http://127.0.0.1:{self.port}")
        if token is not None:
            private_file(token_path(self.url), token)
        try:
            yield self
        finally:
            server.close()
            await server.wait_closed()

    async def _relay(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        cut = self.cuts[self.connections] if self.connections < len(self.cuts) else None
        self.connections += 1
        far_reader, far_writer = await asyncio.open_connection("127.0.0.1", self.port)
        pumps = [
            asyncio.create_task(self._pump(reader, far_writer, "up", cut)),
            asyncio.create_task(self._pump(far_reader, writer, "down", cut)),
        ]
        await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
        for pump in pumps:
            pump.cancel()
        await asyncio.gather(*pumps, return_exceptions=True)
        for one in (writer, far_writer):
            one.transport.abort()

    async def _pump(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        direction: Direction,
        cut: tuple[Direction, int, int] | None,
    ) -> None:
        chunk = 0
        while data := await reader.read(1 << 16):
            chunk += 1
            if cut is not None and cut[:2] == (direction, chunk):
                writer.write(data[: cut[2]])
                await writer.drain()
                return
            writer.write(data)
            await writer.drain()
