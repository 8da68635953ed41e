"""OpenEnv's protocol, our client against our server; the package's own sides are in tests/contract/test_openenv.py."""

from __future__ import annotations

import asyncio
import json
import random
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import numpy as np
import pytest

from tapereel.agents import ScriptedEngine, agent, rollout
from tapereel.envs import check_env
from tapereel.envs.remote import (
    OpenEnvAction,
    OpenEnvironment,
    OpenEnvObservation,
    Service,
    ServiceLimits,
    SessionLost,
)
from tapereel.envs.remote.openenv import _arguments
from tapereel.tapes import Action, Observation, Picture, Status, Task

from .worlds import Blurting, Guess, GuessNumber, Telling, Waiting, bearer, until


class Number(Action, kind="openenv_number"):
    number: int


def serve(check: Any, make: Any = GuessNumber, tasks: Any = None, **limits: Any) -> None:
    async def main() -> None:
        service = Service(make, limits=ServiceLimits(**limits), tasks=tasks)
        async with service.serving():
            await check(service)

    asyncio.run(main())


def guess(number: int) -> OpenEnvAction:
    return OpenEnvAction(data={"kind": "remote_guess", "number": number})


@agent
async def player(tape: Any, llm: Any) -> AsyncIterator[Action]:
    yield guess(int((await llm(tape)).text))


def test_an_episode_over_openenv_s_protocol():
    async def check(service: Service) -> None:
        engine = ScriptedEngine(["5", "7"])
        tape = await rollout(player, lambda: OpenEnvironment(service.url), {"task": 7}, engine=engine)
        assert tape.status is Status.FINISHED
        assert [r.value for r in tape.rewards] == [-0.1, 1.25]
        assert isinstance(tape.observations[0], OpenEnvObservation)
        assert tape.observations[0].data["text"] == "a number from 1 to 9"
        await until(lambda: service.occupied == 0)

    serve(check)


def test_the_seed_makes_the_episode_and_draws_the_task():
    async def check(service: Service) -> None:
        seen = []
        for seed in (1, 1, 2, 3, 4):
            env = OpenEnvironment(service.url)
            first = await env.reset({"seed": seed})
            told = [(await env.step(guess(5))).observation for _ in range(2)]
            seen.append((first, told))
            await env.close()
        assert seen[0] == seen[1]
        assert len({str(one) for one in seen}) == 4

    serve(check, tasks=[1, 9])


def test_one_connection_plays_one_episode_after_the_other():
    async def check(service: Service) -> None:
        closed = GuessNumber.closed
        async with (
            aiohttp.ClientSession(headers=bearer(service)) as http,
            http.ws_connect(service.url + "/ws") as socket,
        ):

            async def ask(**message: Any) -> Any:
                await socket.send_json(message)
                return await socket.receive_json()

            for _ in range(2):
                shown = await ask(type="reset", data={"seed": 3, "task": 7, "episode_id": "e", "unknown": 1})
                assert (shown["type"], shown["data"]["done"], shown["data"]["reward"]) == ("observation", False, None)
                assert (await ask(type="state"))["data"] == {"episode_id": "e", "step_count": 0}
                action = {"kind": "remote_guess", "number": 7, "metadata": {}}
                last = await ask(type="step", data=action)
                assert last["data"] == {"observation": {}, "reward": 1.5, "done": True}
                assert (await ask(type="state"))["data"]["step_count"] == 1
            assert GuessNumber.closed == closed + 1
            assert service.occupied == 1
            await socket.send_json({"type": "close"})
            assert (await socket.receive()).type is aiohttp.WSMsgType.CLOSE
        await until(lambda: GuessNumber.closed == closed + 2)

    serve(check)


@asynccontextmanager
async def opened(service: Service) -> AsyncIterator[aiohttp.ClientWebSocketResponse]:
    async with aiohttp.ClientSession(headers=bearer(service)) as http, http.ws_connect(f"{service.url}/ws") as socket:
        yield socket


@pytest.mark.parametrize(
    ("message", "code", "told"),
    [
        ("{", "VALIDATION_ERROR", "JSON"),
        ('{"type":"fly"}', "UNKNOWN_TYPE", "'fly'"),
        ("[]", "VALIDATION_ERROR", "obj"),
        ('{"type":"step","data":{"number":1}}', "VALIDATION_ERROR", "`kind`"),
        ('{"type":"step","data":{"kind":"os.system"}}', "VALIDATION_ERROR", "'os.system'"),
        ('{"type":"step","data":{"kind":"remote_guess","number":"x"}}', "VALIDATION_ERROR", "number"),
        ('{"type":"step","data":{"kind":"remote_guess","number":0}}', "EXECUTION_ERROR", "KeyError"),
        ('{"type":"reset","data":{"seed":-1}}', "VALIDATION_ERROR", "seed"),
    ],
)
def test_what_it_can_not_do_it_says_in_openenv_s_codes(message: str, code: str, told: str):
    async def check(service: Service) -> None:
        async with (
            aiohttp.ClientSession(headers=bearer(service)) as http,
            http.ws_connect(service.url + "/ws") as socket,
        ):
            await socket.send_json({"type": "reset", "data": {"task": 7}})
            await socket.receive_json()
            await socket.send_str(message)
            answer = await socket.receive_json()
            assert (answer["type"], answer["data"]["code"]) == ("error", code)
            assert told in answer["data"]["message"]

    serve(check)


def test_a_full_service_says_so_in_the_protocol_and_has_place_later():
    async def check(service: Service) -> None:
        first = OpenEnvironment(service.url)
        await first.reset({"task": 7})
        async with (
            aiohttp.ClientSession(headers=bearer(service)) as http,
            http.ws_connect(service.url + "/ws") as socket,
        ):
            assert (await socket.receive_json())["data"]["code"] == "CAPACITY_REACHED"
        second = OpenEnvironment(service.url)
        waiting = asyncio.create_task(second.reset({"task": 7}))
        await first.close()
        await waiting
        assert (await second.step(guess(7))).reward == 1.5
        await second.close()

    serve(check, sessions=1)


def test_schemas_and_names_are_told():
    async def check(service: Service) -> None:
        async with aiohttp.ClientSession(headers=bearer(service)) as http:
            async with http.get(service.url + "/schema") as answer:
                schema = await answer.json()
            async with http.get(service.url + "/metadata") as answer:
                assert (await answer.json())["name"] == "GuessNumber"
            async with http.get(service.url + "/health") as answer:
                assert (await answer.json())["status"] == "healthy"
        assert [one["title"] for one in schema["action"]["anyOf"]] == ["Guess", "Give"]
        assert schema["observation"]["title"] == "Hint"

    serve(check)


def test_the_kind_of_an_observation_is_told_where_there_are_several():
    async def check(service: Service) -> None:
        env = OpenEnvironment(service.url)
        assert (await env.reset({"task": 7})).data["kind"] == "remote_hint"  # type: ignore[attr-defined]
        assert (await env.step(guess(1))).observation == OpenEnvObservation(
            data={"text": "not declared", "kind": "remote_secret"}
        )
        await env.close()

    serve(check, Telling)


def test_an_environment_s_fault_is_told_as_one():
    async def check(service: Service) -> None:
        tape = await rollout(player, lambda: OpenEnvironment(service.url), {"task": 7}, engine=ScriptedEngine(["5"]))
        assert tape.cause is not None
        assert tape.cause.error == "RemoteFault"
        assert re.search("Secret.*`kinds`", str(tape.cause.message))

    serve(check, Blurting)


def test_a_connection_that_breaks_ends_the_episode():
    async def check(service: Service) -> None:
        env = OpenEnvironment(service.url)
        await env.reset({"task": 7})
        (session,) = service.sessions.values()
        for socket in list(service._sockets):
            socket._req.transport.abort()  # type: ignore[union-attr]
        with pytest.raises(ConnectionError, match="OpenEnv"):
            await env.step(guess(7))
        with pytest.raises(SessionLost):
            await env.step(guess(7))
        await env.close()
        assert session.id

    serve(check)


def test_check_env_goes_through_it():
    async def check(service: Service) -> None:
        def factory() -> OpenEnvironment:
            return OpenEnvironment(service.url)

        report = await asyncio.to_thread(
            check_env, factory, [{"task": 3}, {"task": 7}], lambda seen, rng: guess(rng.randint(1, 9))
        )
        assert report.ok, str(report)

    serve(check)


@pytest.mark.parametrize(
    ("task", "arguments"),
    [
        (None, {}),
        (3, {"seed": 3}),
        ({"a": 1}, {"a": 1}),
        (Task(public={"q": 1}, private={"seed": 2}), {"q": 1, "seed": 2}),
        (Task(private=5), {"seed": 5}),
        ("text", None),
        (True, None),
        ([1], None),
    ],
)
def test_a_task_is_what_reset_takes(task: Any, arguments: dict[str, Any] | None):
    if arguments is None:
        with pytest.raises(TypeError, match=f"OpenEnvironment.*{re.escape(repr(task))}"):
            _arguments(task)
    else:
        assert _arguments(task) == arguments


def test_a_call_that_hangs_ends_the_session_and_frees_its_place():
    async def check(service: Service) -> None:
        async with opened(service) as socket:

            async def ask(**message: Any) -> Any:
                await socket.send_json(message)
                return (await socket.receive_json())["data"]

            await ask(type="reset", data={"task": 7})
            assert (await ask(type="step", data={"number": 1}))["code"] == "EXECUTION_ERROR"
            await until(lambda: service.occupied == 0)
            assert (await ask(type="reset", data={"task": 7}))["code"] == "EXECUTION_ERROR"
            assert service.occupied == 0

    serve(check, Waiting, call_seconds=0.2)


class Drawn(Action, kind="openenv_drawn"):
    picture: Picture


def test_pictures_are_refused_by_name():
    async def check(service: Service) -> None:
        picture = Picture.of(np.zeros((20, 30, 3), "uint8"))
        env = OpenEnvironment(service.url, action=Drawn)
        with pytest.raises(TypeError, match=picture.name):
            await env.reset(Task(public={"task": 7, "picture": picture}))
        await env.reset({"task": 7})
        with pytest.raises(TypeError, match=picture.name):
            await env.step(Drawn(picture=picture))
        await env.close()

    serve(check)


def test_what_a_model_reads_of_an_observation():
    assert str(OpenEnvObservation(data={"text": "hello"})) == "hello"
    assert json.loads(str(OpenEnvObservation(data={"a": 1, "b": [2]}))) == {"a": 1, "b": [2]}


def test_your_own_classes_are_read_and_sent():
    class Typed(Observation, kind="openenv_typed"):
        text: str
        noise: float

    async def check(service: Service) -> None:
        env = OpenEnvironment(service.url, action=Number, observation=Typed)
        env.rng = random.Random(0)
        assert await env.reset({"task": 7}) == Typed(text="go", noise=0.0)
        outcome = await env.step(Number(number=7))
        assert (outcome.observation, outcome.reward, outcome.terminated) == (None, 7.0, True)
        with pytest.raises(TypeError, match=r"openenv_number.*Guess"):
            await env.step(Guess(number=7))
        await env.close()

    serve(check, Waiting)
