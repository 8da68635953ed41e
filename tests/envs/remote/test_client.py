"""A remote environment is an environment: its tapes are those of a local one, and pass the same checks."""

from __future__ import annotations

import asyncio
import gc
import random
import re
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from tapereel.agents.replay import replay
from tapereel.envs import Environment, RestoreMismatch, Rewards, RewardSource, check_env
from tapereel.envs.checks.reexec import reexec
from tapereel.envs.remote import (
    PROTOCOL,
    ROUTE,
    Declared,
    Refused,
    RemoteEnvironment,
    RemoteFault,
    Service,
    ServiceLimits,
    SessionLost,
    Unreachable,
    WrongEnvironment,
)
from tapereel.envs.remote.channel import Channel
from tapereel.tapes import Answer, CauseType, Status, Tape
from tapereel.tapes.common import token_for
from tapereel.tapes.store import Store

from . import spelling
from .process import Served
from .worlds import Blurting, Deeds, Guess, GuessNumber, Secret, Telling, Waiting, play, player, say, told, until


@asynccontextmanager
async def served(
    make: Any = GuessNumber, here: Any = None, *, limits: dict[str, Any] | None = None, **options: Any
) -> AsyncIterator[Callable[[], RemoteEnvironment]]:
    """A factory of clients of a service in this process."""
    async with Service(make, limits=ServiceLimits(**(limits or {}))).serving() as service:
        yield lambda: RemoteEnvironment(service.url, here or make, **options)
        assert service.occupied == 0 or options.get("left", True)


EPISODES = [("5", "8", "7"), ("7",), ("1", "x"), ("2", "0"), ("2", "word")]


@pytest.mark.parametrize("words", EPISODES, ids=["".join(words) for words in EPISODES])
def test_the_tape_is_the_one_of_a_local_environment(words: tuple[str, ...]):
    async def both() -> tuple[Tape, Tape]:
        async with served() as remote:
            return await play(GuessNumber, *words, seed=3), await play(remote, *words, seed=3)

    local, remote = asyncio.run(both())
    assert told(local) == told(remote)
    assert remote.begin.env.name == "RemoteEnvironment"
    assert remote.begin.env.config["environment"] == "GuessNumber"


class Scored(GuessNumber):
    rewards = Rewards([RewardSource(score=lambda tape: float(len(tape.actions)), name="length", weight=0.5)])


def test_sources_that_look_at_the_tape_score_on_this_side():
    async def check() -> None:
        async with served(Scored) as remote:
            local, far = await play(Scored, "5", "7"), await play(remote, "5", "7")
            assert told(local) == told(far)
            assert ("length", 2.0) in [(reward.name, reward.value) for reward in far.rewards]

    asyncio.run(check())


class OfTheInstance(GuessNumber):
    def __init__(self) -> None:
        self.rewards = Rewards([RewardSource(score=lambda tape: 1.0, name="late")])


def test_rewards_of_a_single_instance_are_refused_there_and_not_lost():
    async def check() -> None:
        assert [r.name for r in (await play(OfTheInstance, "7")).rewards][-1] == "late"
        async with served(OfTheInstance) as remote:
            far = await play(remote, "7")
        assert far.cause is not None
        assert re.search(r"OfTheInstance.*\(late\)", str(far.cause.message))

    asyncio.run(check())


def test_what_the_environment_declares_holds_here_too():
    env = RemoteEnvironment("http://127.0.0.1:1/", Deeds)
    assert (env.effect, env.blocking, env.url) == ("idempotent", False, "http://127.0.0.1:1")
    asyncio.run(env.close())


def test_its_tapes_are_replayed_reexecuted_and_forked():
    async def check() -> None:
        async with served() as remote:
            tape = await play(remote, "5", "8", "7")
            assert (await replay(tape, player)).outcome == "verified"
            assert (await reexec(tape, remote)).outcome == "verified"
            assert (await reexec(tape, GuessNumber)).outcome == "verified"
            assert (await reexec(await play(GuessNumber, "2", "0"), remote)).outcome == "verified"
            child = await play(remote, "5", "8", "7", fork=tape.at_turn(2))
            assert (child.status, child.turns) == (Status.FINISHED, 3)
            assert (await reexec(child, remote)).outcome == "verified"

    asyncio.run(check())


class Snapshots(GuessNumber):
    """Comes back by what a tape says, not by acting again."""

    async def restore(self, task: int, tape: Tape) -> None:
        self.secret, self.turns = task, tape.turns
        assert [step.kind for step in tape] == ["remote_hint", "remote_guess", "remote_hint"]
        if tape.begin.task.given != task or tape.id == "refuse":
            raise RestoreMismatch("not so")


def test_an_environment_restores_in_its_own_way_there():
    async def check() -> None:
        async with served(Snapshots) as remote:
            parent = await play(remote, "5", "8", "7", tape_id="parent")
            before = GuessNumber.acted
            child = await play(remote, "5", "7", fork=parent.at_turn(1))
            assert child.status is Status.FINISHED
            assert GuessNumber.acted == before + 1
            other = await play(remote, "5", "8", "7", tape_id="refuse")
            child = await play(remote, "5", "7", fork=other.at_turn(1))
            assert child.cause is not None
            assert (child.cause.error, child.cause.message) == ("RestoreMismatch", "not so")
            child = await play(remote, "5", "7", fork=other.at_turn(1), unverified="I insist")
            assert child.status is Status.FINISHED

    asyncio.run(check())


def test_the_default_restore_compares_there():
    async def check() -> None:
        async with served() as remote:
            tape = await play(remote, "5", "8", "7", seed=1)
            other = await play(remote, "5", "8", "7", seed=2)
            env = remote()
            env.rng = random.Random(other.begin.env_seed)
            with pytest.raises(RestoreMismatch, match=f"observation.*{tape.id}"):
                await env.restore(7, tape.at_turn(1))
            await env.close()

    asyncio.run(check())


def test_check_env_finds_nothing_wrong_with_it():
    async def check() -> None:
        async with served() as remote:
            report = await asyncio.to_thread(check_env, remote, [3, 7, 9], say)
            assert report.ok, str(report)
            assert set(report.checks.values()) == {"ok"}, str(report)

    asyncio.run(check())


def test_an_undeclared_kind_is_the_fault_of_the_environment():
    async def check() -> None:
        async with served(Blurting) as remote:
            tape = await play(remote, "5")
            assert tape.cause is not None
            assert (tape.cause.type, tape.cause.error) == (CauseType.ENVIRONMENT, "TypeError")
            assert re.search("Secret.*`kinds`", str(tape.cause.message))
        async with served(Telling) as remote:
            tape = await play(remote, "5")
            assert Secret(text="not declared") in list(tape)

    asyncio.run(check())


def test_an_action_of_another_kind_never_leaves():
    async def check() -> None:
        async with served() as remote:
            env = remote()
            await begun(env)
            with pytest.raises(TypeError, match=r"remote_give_up, remote_guess.*'answer'"):
                await env.step(Answer(text="5"))
            assert (await env.step(Guess(number=7))).terminated
            await env.close()

    asyncio.run(check())


async def begun(env: Environment[Any]) -> Environment[Any]:
    env.rng = random.Random(0)
    await env.reset(7)
    return env


@pytest.mark.parametrize(("there", "told_of"), [(Telling, "remote_secret"), (Deeds, "'idempotent'")])
def test_another_environment_than_the_one_asked_for_is_refused(there: Any, told_of: str):
    async def check() -> None:
        async with served(there, GuessNumber) as remote:
            tape = await play(remote, "7")
            assert tape.cause is not None
            assert tape.cause.error == "WrongEnvironment"
            assert told_of in str(tape.cause.message)

    asyncio.run(check())
    assert issubclass(WrongEnvironment, TypeError)


def test_the_interpreter_is_not_ended_by_an_environment():
    async def check() -> None:
        async with served(Waiting) as remote:
            tape = await play(remote, "2")
            assert tape.cause is not None
            assert (tape.cause.error, tape.cause.type) == ("SystemExit", CauseType.ENVIRONMENT)
            assert (await play(remote, "7")).reward == 7.0

    asyncio.run(check())


def test_a_call_that_hangs_there_ends_that_episode_alone():
    async def check() -> None:
        async with served(Waiting, limits={"call_seconds": 1.0}) as remote:
            hung, fine = await asyncio.gather(play(remote, "1"), play(remote, "7"))
            assert hung.cause is not None
            assert hung.cause.error == "Hung"
            assert re.search(r"Waiting\.step.*\b1 s\b", str(hung.cause.message))
            assert fine.reward == 7.0

    asyncio.run(check())


def test_a_call_that_is_cut_off_is_given_up_there():
    async def check() -> None:
        async with Service(Waiting).serving() as service:
            env = await begun(RemoteEnvironment(service.url, Waiting))
            step = asyncio.create_task(env.step(Guess(number=1)))
            await until(lambda: any(session.busy for session in service.sessions.values()))
            step.cancel()
            with pytest.raises(asyncio.CancelledError):
                await step
            with pytest.raises(SessionLost, match="unknown"):
                await env.step(Guess(number=7))
            await env.close()
            assert not service.sessions.values()

    asyncio.run(check())


def test_what_fails_in_close_is_told():
    class Sticky(GuessNumber):
        async def close(self) -> None:
            raise OSError("it sticks")

    async def check() -> None:
        async with served(Sticky) as remote:
            env = await begun(remote())
            with pytest.raises(RemoteFault, match="it sticks"):
                await env.close()
            await env.close()

    asyncio.run(check())


def test_an_episode_that_is_cancelled_while_it_closes_has_its_end(tmp_path: Path):
    closing = asyncio.Event()

    class Lingering(GuessNumber):
        async def close(self) -> None:
            closing.set()
            await asyncio.Event().wait()

    async def check() -> None:
        with Store.create(tmp_path / "run", durability="os") as store:
            episode = asyncio.create_task(play(Lingering, "7", tape_id="t", journal=store.writer))
            await closing.wait()
            episode.cancel()
            with pytest.raises(asyncio.CancelledError):
                await episode
        with Store.open(tmp_path / "run") as store:
            assert store.tape("t").status is Status.CANCELLED

    asyncio.run(check())


def test_nobody_there_is_told_after_the_patience():
    async def check() -> None:
        async with Service(GuessNumber).serving() as service:
            url = service.url
        env = RemoteEnvironment(url, GuessNumber, patience=0.3)
        with pytest.raises(Unreachable, match=r"\b0\.3 s"):
            await env.reset(7)
        with pytest.raises(SessionLost, match=r"\b0\.3 s"):
            await env.step(Guess(number=7))
        await env.close()

    asyncio.run(check())


def test_a_message_longer_than_the_server_takes_is_not_sent():
    class Wordy(GuessNumber):
        async def reset(self, task: Any) -> Any:
            return await super().reset(7)

    async def check() -> None:
        declared = Declared.of(GuessNumber)
        service = Service(Wordy, declared=declared, limits=ServiceLimits(message_bytes=20_000))
        async with service.serving() as service:
            env = RemoteEnvironment(service.url, declared)
            env.rng = random.Random(0)
            with pytest.raises(ValueError, match=r"\b20000\b.*message_bytes"):
                await env.reset("x" * 30_000)
            await env.close()

    asyncio.run(check())


@pytest.mark.parametrize("url", ["127.0.0.1:80", "ftp://x", "http://user:secret@x", "http://x?token=secret", ""])
def test_an_address_that_is_none_or_holds_a_secret(url: str):
    with pytest.raises(ValueError, match=r"wss://|key_variable=") as caught:
        RemoteEnvironment(url, GuessNumber)
    assert "secret" not in str(caught.value)


def test_a_token_is_read_when_it_is_needed(monkeypatch: pytest.MonkeyPatch):
    async def check() -> None:
        async with Service(GuessNumber, token="s3cret-of-16-chars!").serving() as service:

            def client() -> RemoteEnvironment:
                return RemoteEnvironment(service.url, GuessNumber, key_variable="ENV_TOKEN", patience=0.2)

            monkeypatch.setenv("ENV_TOKEN", "s3cret-of-16-chars!")
            tape = await play(client, "7")
            assert tape.status is Status.FINISHED
            assert b"s3cret" not in b"".join(tape.bodies)
            for value, told_of in (("another-token-here", "401"), ("", "ENV_TOKEN")):
                monkeypatch.setenv("ENV_TOKEN", value)
                with pytest.raises(Refused, match=told_of) as caught:
                    await client().reset(7)
                assert "another-token" not in str(caught.value)

    asyncio.run(check())


def test_who_is_cancelled_while_closing_leaves_no_connection_open(tmp_path: Path, recwarn: pytest.WarningsRecorder):
    async def cut(url: str, moment: int) -> bool:
        headers = {"Authorization": f"Bearer {token_for(url)}"}
        channel = await Channel.open(url + ROUTE, headers=headers, largest=1 << 20, protocols=(PROTOCOL,))
        closing = asyncio.create_task(channel.close())
        for _ in range(moment):
            await asyncio.sleep(0)
        closing.cancel()
        (found,) = await asyncio.gather(closing, return_exceptions=True)
        return isinstance(found, asyncio.CancelledError)

    with Served(f"{spelling.__file__}:Spelling", tmp_path / "log") as server:
        moments = 1
        while asyncio.run(cut(server.url, moments)):
            moments += 1
    assert moments > 3, "it was cut at every await before it was done"
    gc.collect()  # what nobody closed complains here
    assert not [warning for warning in recwarn if "nclosed" in str(warning.message)]
