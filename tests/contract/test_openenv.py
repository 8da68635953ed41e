"""Both sides of OpenEnv's protocol against the real package: its echo server, and its client.

`tests/contract/openenv_env.py` makes its environment.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest

from tapereel.agents import EpisodeSpec, ScriptedEngine, agent, rollout
from tapereel.envs import check_env
from tapereel.envs.checks.reexec import reexec
from tapereel.envs.remote import Busy, OpenEnvAction, OpenEnvironment, Refused, Service
from tapereel.tapes import Action, Status

from ..envs.remote.worlds import GuessNumber, Waiting
from .openenv_env import PLACES, PYTHON
from .openenv_lab import CLIENT, Echoed, Say, echo_server

pytestmark = [pytest.mark.contract, pytest.mark.timeout(200)]


@pytest.fixture(scope="module")
def echo(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    if not PYTHON.exists():
        pytest.fail("there is no environment with OpenEnv: run python -m tests.contract.openenv_env")
    with echo_server(tmp_path_factory.mktemp("openenv") / "log") as url:
        yield url


def client(url: str) -> OpenEnvironment:
    return OpenEnvironment(url, action=Say, observation=Echoed)


@agent
async def speaker(tape: Any, llm: Any) -> AsyncIterator[Action]:
    yield Say(message=(await llm(tape)).text)


def test_an_episode_in_openenv_s_echo_environment(echo: str) -> None:
    async def run() -> None:
        tape = await rollout(
            speaker, lambda: client(echo), None, engine=ScriptedEngine(["hello", "you", "there"]), limits=None
        )
        assert tape.status is Status.ERROR, "the script is at its end: the echo environment never ends an episode"
        assert tape.observations[0] == Echoed(echoed_message="Echo environment ready!", message_length=0)
        assert tape.observations[1:] == [
            Echoed(echoed_message=word, message_length=len(word)) for word in ("hello", "you", "there")
        ]
        assert [reward.value for reward in tape.rewards] == pytest.approx([0.5, 0.3, 0.5])

    asyncio.run(run())


def test_its_tapes_are_carried_out_again_and_check_env_is_content(echo: str) -> None:
    async def run() -> None:
        from tapereel.agents import Limits

        tape = await rollout(
            speaker, lambda: client(echo), 5, engine=ScriptedEngine(["hello", "you"]), limits=Limits(turns=2)
        )
        assert tape.status is Status.LIMIT
        verdict = await reexec(tape, lambda: client(echo))
        assert verdict.outcome == "verified", verdict
        child = await rollout(
            speaker,
            lambda: client(echo),
            EpisodeSpec.of(5, fork=tape.at_turn(1), limits=Limits(turns=2)),
            engine=ScriptedEngine(["hello", "else"]),
        )
        assert child.observations[-1] == Echoed(echoed_message="else", message_length=4)

    asyncio.run(run())
    report = check_env(
        lambda: client(echo), [None, 1], lambda seen, rng: Say(message="x" * rng.randint(1, 5)), timeout=60.0
    )
    assert report.ok, str(report)


def test_without_classes_plain_objects_go_and_come(echo: str) -> None:
    async def run() -> None:
        env = OpenEnvironment(echo)
        assert (await env.reset(None)).data["message_length"] == 0  # type: ignore[attr-defined]
        outcome = await env.step(OpenEnvAction(data={"message": "hi"}))
        assert outcome.observation.data == {"echoed_message": "hi", "message_length": 2}  # type: ignore[union-attr]
        assert outcome.reward == pytest.approx(0.2)
        with pytest.raises(Refused, match="VALIDATION_ERROR"):
            await env.step(OpenEnvAction(data={"wrong": 1}))
        await env.close()

    asyncio.run(run())


def test_a_full_server_is_asked_again_when_there_is_place(echo: str) -> None:
    async def run() -> None:
        taken = [client(echo) for _ in range(PLACES)]
        for env in taken:
            await env.reset(None)
        late = OpenEnvironment(echo, patience=0.3)
        with pytest.raises(Busy, match="CAPACITY_REACHED"):
            await late.reset(None)
        patient = client(echo)
        waiting = asyncio.create_task(patient.reset(None))
        await taken[0].close()
        assert isinstance(await waiting, Echoed)
        await asyncio.gather(patient.close(), *(env.close() for env in taken[1:]))

    asyncio.run(run())


def with_token(service: Service) -> str:
    """The address for a client that sends no header: the token is the password in it."""
    return f"http://tapereel:{service.token}@127.0.0.1:{service.port}"


async def openenv_plays(url: str, arguments: dict[str, Any], actions: list[dict[str, Any]]) -> dict[str, Any]:
    """What OpenEnv's client saw."""
    process = await asyncio.create_subprocess_exec(
        PYTHON, CLIENT, url, json.dumps(arguments), json.dumps(actions), stdout=subprocess.PIPE
    )
    out, _ = await asyncio.wait_for(process.communicate(), 100)
    assert process.returncode == 0
    return json.loads(out)


def test_openenv_s_client_plays_in_an_environment_of_ours(echo: str) -> None:
    async def run() -> None:
        async with Service(GuessNumber, tasks=[7]).serving() as service:
            actions = [
                {"kind": "remote_guess", "number": 5},
                {"kind": "remote_guess", "number": 0},
                {"kind": "remote_guess", "number": 7},
            ]
            told = await openenv_plays(with_token(service), {"seed": 3, "episode_id": "one"}, actions)
            again = await openenv_plays(with_token(service), {"seed": 3, "episode_id": "one"}, actions)
        assert told == again
        (first, _, _), (second, reward, done), last = told["results"]
        assert (first["text"], second["text"], reward, done) == ("a number from 1 to 9", "higher", -0.1, False)
        assert last == [{}, 1.0 + 0.5 / 3, True]
        assert "KeyError: 'no zero here' (code: EXECUTION_ERROR)" in told["error"]
        assert told["state"] == {"episode_id": "one", "step_count": 2}

    asyncio.run(run())


def test_with_one_kind_of_action_no_kind_is_needed(echo: str) -> None:
    async def run() -> None:
        async with Service(Waiting).serving() as service:
            told = await openenv_plays(with_token(service), {}, [{"number": 7}])
        assert told["results"] == [[{"text": "go", "noise": 0.0}, None, False], [{}, 7.0, True]]

    asyncio.run(run())


def test_an_action_that_is_none_is_told_to_openenv_s_client(echo: str) -> None:
    async def run() -> None:
        async with Service(Waiting).serving() as service:
            told = await openenv_plays(with_token(service), {}, [{"number": "x"}])
        assert "(code: VALIDATION_ERROR)" in told["error"]

    asyncio.run(run())
