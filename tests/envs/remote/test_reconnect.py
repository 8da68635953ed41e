"""Connections that break: the episode goes on where it was, and nothing acts twice."""

from __future__ import annotations

import asyncio
import random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tapereel.envs.remote import RemoteEnvironment, Service, ServiceLimits, SessionLost
from tapereel.envs.remote.env_protocol import SESSION
from tapereel.tapes import Status

from .worlds import Direction, Guess, GuessNumber, Waiting, Wire, play, told, until

WORDS = ("1", "9", "2", "8", "3", "7")


async def through(cuts: list[tuple[Direction, int, int] | None]) -> tuple[Wire, dict[str, object], int]:
    """An episode over a wire with these cuts: what its tape tells, and how many steps were carried out."""
    async with Service(GuessNumber).serving() as service, Wire(service.port, cuts).laid() as wire:
        before = GuessNumber.acted
        tape = await play(RemoteEnvironment(wire.url, GuessNumber), *WORDS, seed=5)
        return wire, told(tape), GuessNumber.acted - before


CUT = st.tuples(st.sampled_from(["up", "down"]), st.integers(1, 8), st.sampled_from([0, 1, 10, 200, 1 << 16]))
CUTS = st.lists(CUT, max_size=4)


@given(CUTS)
@settings(max_examples=25, suppress_health_check=[HealthCheck.too_slow])
def test_wherever_a_connection_breaks_the_tape_is_the_same(cuts: list[tuple[Direction, int, int]]):
    async def both() -> None:
        local = told(await play(GuessNumber, *WORDS, seed=5))
        _, remote, acted = await through([*cuts])
        assert remote == local
        assert acted == len(WORDS)

    asyncio.run(both())


def test_a_step_whose_answer_was_lost_is_not_taken_again():
    # Chunks down: the handshake, the greeting (they may come as one), the answers to reset and to the first step.
    wire, remote, acted = asyncio.run(through([("down", 4, 0), ("down", 4, 3)]))
    assert wire.connections >= 2
    assert acted == len(WORDS)
    assert remote["status"] is Status.FINISHED


def test_a_step_that_is_being_taken_is_not_taken_beside_itself():
    """The connection breaks while the environment works; the answer comes on the next one."""
    go = asyncio.Event()
    taken = []

    class Working(GuessNumber):
        async def step(self, action: Guess):  # type: ignore[override]
            taken.append(action.number)
            await go.wait()
            return await super().step(action)

    async def check() -> None:
        async with Service(Working).serving() as service, Wire(service.port, []).laid() as wire:
            env = RemoteEnvironment(wire.url, Working)
            env.rng = random.Random(0)
            await env.reset(7)
            step = asyncio.create_task(env.step(Guess(number=7)))
            await until(lambda: taken)
            assert env._channel is not None
            env._channel._socket._response.connection.transport.abort()  # type: ignore[union-attr]
            await until(lambda: wire.connections == 2)
            go.set()
            assert (await step).terminated
            assert taken == [7]
            await env.close()

    asyncio.run(check())


def test_a_session_waits_for_its_client_and_no_longer():
    async def check() -> None:
        limits = ServiceLimits(window_seconds=0.05)
        async with Service(GuessNumber, limits=limits).serving() as service:
            closed = GuessNumber.closed
            env = RemoteEnvironment(service.url, GuessNumber)
            env.rng = random.Random(0)
            await env.reset(7)
            await env._hang_up()
            await until(lambda: GuessNumber.closed > closed and service.occupied == 0)
            with pytest.raises(SessionLost, match="restarted"):
                await env.step(Guess(number=7))
            await env.close()

    asyncio.run(check())


def test_a_server_that_ends_says_so_and_lets_calls_finish():
    async def check() -> None:
        async with Service(GuessNumber).serving() as service:
            env = RemoteEnvironment(service.url, GuessNumber)
            env.rng = random.Random(0)
            await env.reset(7)
            closed = GuessNumber.closed
        assert GuessNumber.closed == closed + 1
        with pytest.raises(SessionLost, match=r"\bshut\b"):
            await env.step(Guess(number=7))
        await env.close()

    asyncio.run(check())


def test_a_call_that_runs_when_the_server_ends_has_its_grace():
    async def check() -> None:
        service = Service(Waiting, limits=ServiceLimits(grace_seconds=0.05))
        async with service.serving():
            env = RemoteEnvironment(service.url, Waiting)
            await env.reset(7)
            step = asyncio.create_task(env.step(Guess(number=1)))
            await until(lambda: any(session.busy for session in service.sessions.values()))
        with pytest.raises(SessionLost, match=r"\bshut\b"):
            await step
        await env.close()

    asyncio.run(check())


def test_the_session_of_another_server_is_not_taken_for_ours():
    async def check() -> None:
        async with Service(GuessNumber).serving() as one, Service(GuessNumber).serving() as two:
            env = RemoteEnvironment(one.url, GuessNumber)
            env.rng = random.Random(0)
            await env.reset(7)
            await env._hang_up()
            env.url = two.url
            with pytest.raises(SessionLost):
                await env.step(Guess(number=7))
            await env.close()

    asyncio.run(check())
    assert SESSION.isprintable()
