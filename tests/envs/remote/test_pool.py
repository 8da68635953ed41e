"""Environments in processes: what one does to its process, no other notices."""

from __future__ import annotations

import asyncio
import os
import random
import re
import sys
from collections.abc import AsyncIterator
from typing import Any

import psutil
import pytest

from tapereel.agents import ScriptedEngine, agent, rollout
from tapereel.envs import check_env
from tapereel.envs.checks.reexec import reexec
from tapereel.envs.load_named import load_named
from tapereel.envs.remote import Busy, Pool, RemoteEnvironment, Service, SessionLost, Unreachable
from tapereel.envs.remote.pool import Places
from tapereel.tapes import CauseType, Status, Tape

from .worlds import SIMULATOR, until

Simulator = load_named(SIMULATOR)
Move = load_named(SIMULATOR.replace("Simulator", "Move"))


@agent
async def mover(tape: Any, llm: Any) -> AsyncIterator[Any]:
    yield Move(number=int((await llm(tape)).text))


async def play(env: Any, *words: str, task: int = 0) -> Tape:
    return await rollout(mover, env, task, engine=ScriptedEngine(list(words)))


def cause(tape: Tape) -> tuple[CauseType, str | None, str]:
    assert tape.cause is not None
    return tape.cause.type, tape.cause.error, str(tape.cause.message)


@pytest.mark.ledger("X8")
def test_an_episode_in_a_process_is_as_one_here():
    async def check() -> None:
        with Pool(SIMULATOR, processes=1) as pool:
            tape = await play(pool, "4", "8", "9")
            assert (tape.status, tape.reward) == (Status.FINISHED, 21.0)
            assert f"process {os.getpid()}" not in str(tape.observations[0])
            assert [str(seen) for seen in tape.observations[1:]] == ["4", "12", "21"]
            assert tape.begin.env.config["environment"] == "Simulator"
            again = await play(pool, "9")
            assert again.observations[0] == tape.observations[0], "the same process serves the next episode"
            assert (pool.started, pool.killed) == (1, 0)
            verdict = await reexec(tape, pool)
            assert verdict.outcome == "verified", verdict

    asyncio.run(check())


BAD = [
    ("1", "Hung", r"Simulator.*`step`.*\b2 s\b"),
    ("2", "SessionLost", r"Simulator.*\b7\)"),
    ("3", "SessionLost", r"Simulator.*-11\)"),
    ("5", "Hung", r"\b2 s\b"),
    ("6", "ValueError", "six"),
]
"""What one does to its process, and how its tape tells it."""


@pytest.mark.ledger("X8")
def test_one_that_misbehaves_ends_alone_and_its_process_is_replaced():
    async def check() -> None:
        with Pool(SIMULATOR, processes=2, seconds=2.0) as pool:
            for killed, (word, error, told) in enumerate(BAD, start=1):
                bad, *good = await asyncio.gather(play(pool, "4", word), play(pool, "4", "9"), play(pool, "10", "9"))
                assert cause(bad)[:2] == (CauseType.ENVIRONMENT, error)
                assert re.search(told, cause(bad)[2])
                assert bad.rewards[0].value == 4.0
                assert [tape.status for tape in good] == [Status.FINISHED] * 2
                assert pool.killed == min(killed, 4), "what only raises costs no process"
            more = await asyncio.gather(play(pool, "9"), play(pool, "9"))
            assert [tape.status for tape in more] == [Status.FINISHED] * 2
            await until(lambda: len([p for p in psutil.process_iter() if is_worker(p)]) <= 2)  # one is still ending
        await until(lambda: not [p for p in psutil.process_iter() if is_worker(p)])

    asyncio.run(check())


def is_worker(process: psutil.Process) -> bool:
    """Also one whose parent died; of this test alone, and of this Python: CI tests two at the same time."""
    try:
        line = process.cmdline()
        ours = line[:1] == [sys.executable] and SIMULATOR in line
        return ours and process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_a_call_that_is_cut_off_costs_its_process():
    async def check() -> None:
        with Pool(SIMULATOR, processes=1) as pool:
            env = pool()
            env.rng = random.Random(0)
            await env.reset(0)
            step = asyncio.create_task(env.step(Move(number=1)))
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            step.cancel()
            with pytest.raises(asyncio.CancelledError):
                await step
            with pytest.raises(SessionLost):
                await env.step(Move(number=9))
            await env.close()
            assert (await play(pool, "9")).status is Status.FINISHED
            assert (pool.started, pool.killed) == (2, 1)

    asyncio.run(check())


@pytest.mark.ledger("X8")
def test_more_episodes_than_processes_wait_and_not_for_ever():
    async def check() -> None:
        with Pool(SIMULATOR, processes=2, patience=30.0) as pool:
            tapes = await asyncio.gather(*(play(pool, "4", "9") for _ in range(7)))
            assert {tape.status for tape in tapes} == {Status.FINISHED}
            assert pool.started <= 2
        with Pool(SIMULATOR, processes=1, patience=0.1) as pool:
            env = pool()
            await env.reset(0)
            with pytest.raises(Busy, match=r"\b1\b.*Simulator.*`processes`"):
                await pool().reset(0)
            await env.close()
            assert (await play(pool, "9")).status is Status.FINISHED

    asyncio.run(check())


def test_a_pool_that_is_closed_takes_no_more():
    async def check() -> None:
        with Pool(SIMULATOR, processes=1) as pool:
            env = pool()
            await env.reset(0)
        for late in (env, pool()):
            with pytest.raises(SessionLost):
                await late.reset(0)
            await late.close()

    asyncio.run(check())


def test_what_can_not_be_found_or_started_says_so(tmp_path: Any):
    with pytest.raises(ValueError, match="_local"):
        Pool(_local(), processes=1)
    with pytest.raises(ValueError, match=r"processes.*\b0\b"):
        Pool(SIMULATOR, processes=0)
    path = tmp_path / "breaks_elsewhere.py"
    path.write_text(
        "import os, sys\n"
        "from tapereel.envs.adapters.calculator import Calculator\n"
        "if sys.argv[0].endswith('host.py'): raise RuntimeError('no licence here')\n"
    )

    async def check() -> None:
        told = r"breaks_elsewhere\.py:Calculator.*\b1\)"
        with Pool(f"{path}:Calculator", processes=1) as pool, pytest.raises(Unreachable, match=told):
            await pool().reset(None)

    asyncio.run(check())


def _local() -> Any:
    class Local(Simulator):
        pass

    return Local


def test_what_fits_in_this_process_fits_through_the_pipe_of_another():
    async def check() -> None:
        with Pool(SIMULATOR, processes=1) as pool:
            tape = await play(pool, "10", "9")
            assert (tape.status, len(str(tape.observations[1]))) == (Status.FINISHED, 9_000_000), tape.cause

    asyncio.run(check())


def test_an_answer_that_is_too_long_is_not_read():
    async def check() -> None:
        with Pool(SIMULATOR, processes=1, largest=10_000) as pool:
            tape = await play(pool, "7")
            assert cause(tape)[:2] == (CauseType.ENVIRONMENT, "BadAnswer")
            assert "10000 bytes, the limit `largest`" in cause(tape)[2]
            assert (await play(pool, "9")).status is Status.FINISHED

    asyncio.run(check())


def test_check_env_goes_through_a_pool():
    with Pool(SIMULATOR, processes=4) as pool:
        report = check_env(pool, [0, 1], lambda seen, rng: Move(number=rng.choice([4, 8, 9])))
    # Which process it is stands in the first observation: the check sees that.
    assert report.checks["hangs"] == report.checks["close"] == report.checks["blocks"] == "ok"


def test_a_service_over_a_pool_has_as_many_places_as_processes():
    async def check() -> None:
        with Pool(SIMULATOR, processes=2, seconds=2.0) as pool:
            async with Service(pool).serving() as service:
                assert service.limits.sessions == 2
                tapes = await asyncio.gather(
                    *(
                        play(lambda: RemoteEnvironment(service.url, Simulator), *words)
                        for words in (("4", "1"), ("4", "2"), ("4", "9"))
                    )
                )
                assert [tape.cause.error if tape.cause else None for tape in tapes] == ["Hung", "SessionLost", None]
                assert {tape.cause.type for tape in tapes if tape.cause} == {CauseType.ENVIRONMENT}

    asyncio.run(check())


def test_places_are_given_in_turn_over_several_event_loops():
    places = Places(1)
    order: list[int] = []

    async def one(k: int) -> None:
        await places.acquire()
        order.append(k)
        await asyncio.sleep(0)
        places.release()

    async def check() -> None:
        await places.acquire()
        waiting = [asyncio.create_task(one(k)) for k in range(4)]
        gone = asyncio.create_task(one(99))
        await asyncio.sleep(0)
        gone.cancel()
        elsewhere = asyncio.create_task(asyncio.to_thread(lambda: asyncio.run(one(4))))
        places.release()
        await asyncio.gather(*waiting, elsewhere)
        assert order[:4] == [0, 1, 2, 3]
        assert order[4:] == [4]
        await asyncio.wait_for(places.acquire(), 60)

    asyncio.run(check())


def test_a_place_that_is_given_to_one_who_leaves_goes_to_the_next():
    async def check() -> None:
        places = Places(1)
        await places.acquire()
        first, second = (asyncio.create_task(places.acquire()) for _ in range(2))
        await asyncio.sleep(0)
        places.release()  # settles `first` in the next turn of the loop
        await asyncio.sleep(0)
        first.cancel()
        await asyncio.gather(first, return_exceptions=True)
        await asyncio.wait_for(second, 60)

    asyncio.run(check())
