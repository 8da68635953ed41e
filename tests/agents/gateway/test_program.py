"""Programs as agents: what they do is an episode, which is scored, replayed and ended like any other."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from asyncio.base_subprocess import BaseSubprocessTransport
from pathlib import Path
from typing import Any

import pytest
from openai import APIStatusError, AsyncOpenAI

from tapereel.agents import EngineError, Limits, rollout
from tapereel.agents.gateway import Endpoint, Program
from tapereel.agents.replay import replay
from tapereel.tapes import Status, StoreFailed, Tape
from tapereel.tapes.journal import Durability
from tapereel.tapes.steps import Exchange

from ...toy_envs import Echo
from .lab import RENDERER, SHORT, Told, embedded, until


def rolled(program: Any, engine: Any = None, task: str = "abc", **options: Any) -> Tape:
    return asyncio.run(rollout(Program(program), Echo(), task, engine=engine or Told(), sampling=SHORT, **options))


def command(code: str) -> list[str]:
    return [sys.executable, "-c", code]


async def chat(task: str, endpoint: Endpoint) -> str:
    """Asks for each letter in one conversation."""
    messages: list[Any] = []
    async with AsyncOpenAI(**endpoint._asdict(), max_retries=0) as client:
        for letter in task:
            messages.append({"role": "user", "content": letter})
            reply = await client.chat.completions.create(model="m", messages=messages)
            messages.append({"role": "assistant", "content": reply.choices[0].message.content})
    return "".join(m["content"][:1] for m in messages[1::2])


async def fan(task: str, endpoint: Endpoint) -> str:
    """Asks for all letters at once, in as many conversations."""
    async with AsyncOpenAI(**endpoint._asdict(), max_retries=0) as client:

        async def one(letter: str) -> str:
            reply = await client.chat.completions.create(model="m", messages=[{"role": "user", "content": letter}])
            return reply.choices[0].message.content or ""

        return "".join(await asyncio.gather(*map(one, task)))


def test_a_function_is_recorded_and_replayed_down_to_the_tokens():
    tape = rolled(chat, embedded())
    assert (tape.status, len(tape.calls), tape.trains) == (Status.FINISHED, 3, True)
    assert all(call.logprobs is not None for call in tape.calls)
    for again in (chat, fan):
        verdict = asyncio.run(replay(tape, Program(again), renderer=RENDERER))
        assert (verdict.outcome == "verified") == (again is chat), verdict
    assert verdict.divergence is not None


class Voter:
    """Asks one question as often as `order` has numbers, at once, and asks back each answer. The requests start in the
    order of these numbers. The first asker's answers are the program's."""

    def __init__(self, *order: int, back: str = "sure?") -> None:
        self.order, self.back = order, back

    async def __call__(self, task: str, endpoint: Endpoint) -> str:
        async with AsyncOpenAI(**endpoint._asdict(), max_retries=0) as client:

            async def one(place: int) -> str:
                messages: list[Any] = [{"role": "user", "content": task}]
                for text in (self.back, None):
                    await asyncio.sleep(0.05 * place)
                    reply = await client.chat.completions.create(model="m", messages=messages)
                    said = reply.choices[0].message.content or ""
                    messages += [{"role": "assistant", "content": said}, {"role": "user", "content": text}]
                return messages[1]["content"] + messages[3]["content"]

            return (await asyncio.gather(*map(one, self.order)))[0]


def test_equal_requests_at_once_are_replayed_whoever_asks_first():
    def answers(messages: list[Any]) -> str:
        asked = len(engine.requests)
        return f"say {asked}" if len(messages) == 1 else f"{messages[1]['content']} again"

    engine = Told(answers)
    tape = rolled(Voter(0, 1, 2), engine)
    assert str(tape[-1]) == "say 1say 1 again"
    for order in ((0, 1, 2), (2, 1, 0), (1, 2, 0)):
        verdict = asyncio.run(replay(tape, Program(Voter(*order)), renderer=RENDERER))
        assert verdict.outcome == "verified", verdict
        assert verdict.checked == {"calls": 6, "prompts": 6, "steps": 7}
    fewer = Program(Voter(0, 1))
    fewer.patience = 0.5
    assert asyncio.run(replay(tape, fewer, renderer=RENDERER)).outcome == "diverged"
    changed = asyncio.run(replay(tape, Program(Voter(0, 1, 2, back="really?")), renderer=RENDERER)).divergence
    assert changed is not None
    assert (changed.field, changed.recorded, changed.observed) == ("messages[2].content", "sure?", "really?")


def test_an_exchange_of_an_earlier_version_that_shows_less_is_verified():
    async def twice(task: str, endpoint: Endpoint) -> str:
        return await chat("a", endpoint) + await chat("a", endpoint)

    tape = rolled(twice)
    whole, shown = tape.model_dump_json(), '{"asked":"user: a","answered"'
    assert whole.count(shown) == 2
    earlier = shown.replace("user: a", "").join(whole.rsplit(shown, 1))
    old = Tape.of(json.dumps(record).encode() for record in json.loads(earlier)["records"])
    assert [step.asked for step in old if isinstance(step, Exchange)] == ["user: a", ""]
    assert asyncio.run(replay(old, Program(twice), renderer=RENDERER)).outcome == "verified"


def test_a_replay_says_where_a_program_asks_something_else():
    tape = rolled(chat)

    async def other(task: str, endpoint: Endpoint) -> str:
        return await chat(task[:2] + "x", endpoint)

    async def first(task: str, endpoint: Endpoint) -> str:
        return await chat("x" + task[1:], endpoint)

    async def longer(task: str, endpoint: Endpoint) -> str:
        return await chat(task + "d", endpoint)

    async def shorter(task: str, endpoint: Endpoint) -> str:
        return await chat(task[:2], endpoint)

    async def says(task: str, endpoint: Endpoint) -> str:
        return await chat(task, endpoint) + "!"

    places = {}
    for program in (other, first, longer, shorter, says):
        verdict = asyncio.run(replay(tape, Program(program), renderer=RENDERER))
        assert verdict.outcome == "diverged", program
        assert verdict.divergence is not None
        places[program.__name__] = (verdict.divergence.call, verdict.divergence.field)
    calls = [call.call for call in tape.calls]
    assert places["other"] == (calls[2], "messages[4].content")
    assert places["first"] == (calls[0], "messages[0].content")
    assert places["longer"][1] == "call"
    assert places["shorter"] == (None, "kind")
    assert places["says"] == (None, "answer.text")


def test_questions_asked_at_once_may_come_back_in_any_order():
    tape = rolled(fan, embedded(), task="abcdef")
    assert len({call.conversation for call in tape.calls}) == 6
    for order in (1, -1):

        async def again(task: str, endpoint: Endpoint, order: int = order) -> str:
            said = await fan(task[::order], endpoint)
            answers = [tape.call(call.call).text or "" for call in sorted(tape.calls, key=_asked(tape))]
            return "".join(answers) if order == -1 else said

        verdict = asyncio.run(replay(tape, Program(again), renderer=RENDERER))
        assert verdict.outcome == "verified", (order, verdict)


def _asked(tape: Tape) -> Any:
    return lambda call: call.messages[0]["content"]


def test_the_same_seed_gives_the_same_answers_in_whatever_order_they_are_asked():
    engine = embedded()

    async def backwards(task: str, endpoint: Endpoint) -> str:
        return (await fan(task[::-1], endpoint))[::-1]

    first, second = rolled(fan, engine, task="abcd", seed=3), rolled(backwards, engine, task="abcd", seed=3)
    texts = [{_asked(tape)(call): call.text for call in tape.calls} for tape in (first, second)]
    assert texts[0] == texts[1]
    assert {_asked(first)(call): call.seed for call in first.calls} == {
        _asked(second)(call): call.seed for call in second.calls
    }


def test_a_command_gets_its_task_and_what_it_prints_is_its_answer():
    tape = rolled(command("import sys; print(' ' + sys.stdin.read())"))
    assert (tape.status, tape.reward, str(tape.last)) == (Status.FINISHED, 1.0, "abc")
    tape = rolled([*command("import sys; print(sys.argv[1])"), "{task}"])
    assert tape.reward == 1.0
    tape = rolled(command("import os; print(os.environ['OPENAI_BASE_URL'].startswith('http://127.0.0.1:'))"))
    assert str(tape.last) == "True"


def test_a_command_finds_the_address_and_the_key_of_both_apis(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("ANTHROPIC_AUTH_TOKEN", "the user's own")
    code = (
        "import os; own = {k: v for k, v in os.environ.items() if k.startswith(('OPENAI_', 'ANTHROPIC_'))}\n"
        "assert own['OPENAI_BASE_URL'] == own['OPENAI_API_BASE'] == own['ANTHROPIC_BASE_URL'] + '/v1'\n"
        "assert own['OPENAI_API_KEY'] == own['ANTHROPIC_API_KEY']\n"
        "print('ANTHROPIC_AUTH_TOKEN' in own)"
    )
    tape = rolled(command(code))
    assert (tape.status, str(tape.last)) == (Status.FINISHED, "False"), tape.cause


def test_a_command_that_prints_its_key_prints_none_to_the_tape():
    code = "import os, sys; key = os.environ['OPENAI_API_KEY']; print(key); print(key, file=sys.stderr); sys.exit({})"
    assert str(rolled(command(code.format(0))).last) == "[key]"
    failed = rolled(command(code.format(3)))
    assert failed.cause is not None
    assert (failed.cause.type, failed.cause.error) == ("agent", "ProgramFailed")
    assert " 3: [key]" in (failed.cause.message or "")
    assert "sk-tape" not in failed.model_dump_json()


def test_what_a_program_says_is_recorded_without_known_secrets(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("HF_TOKEN", "hf_opensesame0123456789")
    monkeypatch.setenv("DATABASE_PASSWORD", "speak-friend-42")
    prints = command("import os; print(os.environ['HF_TOKEN'], os.environ['DATABASE_PASSWORD'], os.environ['PATH'])")

    async def says(task: str, endpoint: Endpoint) -> str:
        return f"{endpoint.api_key} {os.environ['DATABASE_PASSWORD']}"

    assert str(rolled(prints).last) == f"[secret] [secret] {os.environ['PATH']}"
    assert str(rolled(says).last) == "[key] [secret]"


def test_a_program_that_fails_is_the_agents_fault_and_scored_as_such():
    async def fails(task: str, endpoint: Endpoint) -> str:
        await chat(task, endpoint)
        raise KeyError("lost")

    tape = rolled(fails)
    assert tape.cause is not None
    assert (tape.status, tape.cause.type, tape.cause.error, tape.trains) == (Status.ERROR, "agent", "KeyError", True)
    assert len(tape.calls) == 3
    loud = rolled(command("print('x' * 2_000_000)"))
    assert loud.cause is not None
    assert "1048576" in (loud.cause.message or "")


def test_what_a_failed_program_printed_is_not_compared_in_a_replay():
    code = "import sys, uuid; sys.exit(f'{{uuid.uuid4()}} failed') if {} == 1 else sys.exit({})"
    tape = rolled(command(code.format(1, 1)))
    assert tape.cause is not None
    assert "failed" in (tape.cause.message or "")
    for exit_code, outcome in ((1, "verified"), (3, "diverged")):
        verdict = asyncio.run(replay(tape, Program(command(code.format(exit_code, exit_code)))))
        assert verdict.outcome == outcome, verdict


def test_an_engine_that_fails_is_the_models_fault():
    class Broken(Told):
        async def complete(self, request: Any) -> Any:
            raise EngineError("no weights")

    tape = rolled(chat, Broken())
    assert tape.cause is not None
    assert (tape.cause.type, tape.trains) == ("model", False)


def test_a_limit_ends_the_episode_whatever_the_program_makes_of_it():
    async def stubborn(task: str, endpoint: Endpoint) -> str:
        for _ in range(5):
            try:
                await chat(task, endpoint)
            except APIStatusError as error:
                refusals.append(error.status_code)
        return task

    refusals: list[int] = []

    tape = rolled(stubborn, limits=Limits(calls=2))
    assert tape.cause is not None
    assert (tape.status, tape.cause.type, len(tape.calls), tape.reward) == (Status.LIMIT, "turns", 2, None)
    assert refusals == [429] * 5
    within = rolled(chat, limits=Limits(calls=3))
    assert within.status is Status.FINISHED


@pytest.mark.parametrize("starting", [False, True])
def test_a_program_out_of_time_is_ended_with_all_that_it_started(
    starting: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    pids = tmp_path / "pids"
    cancelled = asyncio.Event()
    connect = BaseSubprocessTransport._connect_pipes

    async def connected_late(transport: BaseSubprocessTransport, waiter: asyncio.Future[None]) -> None:
        # As on a busy machine: the command runs before asyncio has connected its pipes.
        await cancelled.wait()
        await connect(transport, waiter)

    if starting:
        monkeypatch.setattr(BaseSubprocessTransport, "_connect_pipes", connected_late)
    code = (
        "import os, subprocess, sys, time\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
        f"open({str(pids)!r}, 'w').write(f'{{os.getpid()}} {{child.pid}}')\ntime.sleep(600)"
    )

    async def scene() -> None:
        running = asyncio.ensure_future(rollout(Program(command(code)), Echo(), "abc", engine=Told()))
        await until(lambda: pids.exists() and len(pids.read_text().split()) == 2)
        running.cancel()
        asyncio.get_running_loop().call_later(0.1, cancelled.set)
        with pytest.raises(asyncio.CancelledError):
            await running
        # They were killed; that they are gone takes the system a moment.
        await until(lambda: not any(_alive(pid) for pid in map(int, pids.read_text().split())))

    asyncio.run(scene())


LEAVES = """
import os, subprocess, sys
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], OPTIONS)
open(PIDS, "w").write(str(child.pid))
print("x" * 300_000 + sys.stdin.read())
"""


def left_running(tmp_path: Path, options: str) -> tuple[Tape, int]:
    """The tape of a program that answers while what it started goes on, and who that is."""
    pids = tmp_path / "pids"
    code = LEAVES.replace("OPTIONS", options).replace("PIDS", repr(str(pids)))
    return rolled(command(code), limits=Limits(agent_seconds=100, system_seconds=100)), int(pids.read_text())


@pytest.mark.parametrize("options", ["", "start_new_session=True", "start_new_session=True, stdout=-3, stderr=-3"])
def test_an_answer_counts_when_the_program_ends_whatever_it_left_running(tmp_path: Path, options: str):
    if options and sys.platform != "linux":
        pytest.skip("who left the session is found by /proc")
    tape, child = left_running(tmp_path, options)
    assert (tape.status, str(tape.last)) == (Status.FINISHED, "x" * 300_000 + "abc")
    asyncio.run(until(lambda: not _alive(child)))


def test_who_hides_from_the_end_goes_on_and_holds_nothing_up(tmp_path: Path):
    """As the documentation says: another session, and not the tape's key."""
    tape, child = left_running(tmp_path, "start_new_session=True, env={}")
    try:
        assert (tape.status, str(tape.last)) == (Status.FINISHED, "x" * 300_000 + "abc")
        assert _alive(child)
    finally:
        os.kill(child, signal.SIGKILL)


def _alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_a_question_under_way_when_the_episode_is_given_up_is_recorded():
    bodies: list[bytes] = []

    class Kept:
        durability, media = Durability.OS, None
        append = staticmethod(bodies.append)

        async def durable(self) -> None:
            pass

    async def scene() -> None:
        engine = Told(lambda messages: "long answer")
        engine.gate.clear()
        running = asyncio.ensure_future(rollout(Program(chat), Echo(), "abc", engine=engine, journal=Kept()))
        await engine.begun.wait()
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running

    asyncio.run(scene())
    labels = [body for body in bodies if body.startswith(b'{"t":"label"')]
    tape = Tape.of(body for body in bodies if body not in labels)
    assert tape.status is Status.CANCELLED
    assert [(call.finish, call.text) for call in tape.calls] == [("cancelled", "lo")]
    assert len(labels) == 1


def test_a_program_that_takes_too_long_ends_at_the_limit_of_the_agents_time():
    async def sleeps(task: str, endpoint: Endpoint) -> str:
        await asyncio.Event().wait()
        return task

    tape = rolled(sleeps, limits=Limits(agent_seconds=0.05))
    assert tape.cause is not None
    assert (tape.status, tape.cause.type, tape.trains) == (Status.LIMIT, "agent_seconds", True)


def test_a_store_that_fails_stops_the_episode_and_nothing_is_swallowed():
    class Full:
        durability, media = Durability.OS, None

        def __init__(self) -> None:
            self.left = 4

        def append(self, body: bytes) -> None:
            self.left -= 1
            if self.left < 0:
                raise StoreFailed("disk full")

        async def durable(self) -> None:
            pass

    with pytest.raises(StoreFailed, match="disk"):
        rolled(chat, journal=Full())


def test_the_runs_own_sampling_holds_where_it_is_told_to():
    async def greedy(task: str, endpoint: Endpoint) -> str:
        async with AsyncOpenAI(**endpoint._asdict(), max_retries=0) as client:
            asked: Any = [{"role": "user", "content": task}]
            reply = await client.chat.completions.create(model="m", messages=asked, temperature=0, max_tokens=2)
            return reply.choices[0].message.content or ""

    for follow, temperature in ((True, 0.0), (False, 1.0)):
        engine = Told()
        tape = asyncio.run(rollout(Program(greedy, follow=follow), Echo(), "a", engine=engine, sampling=SHORT))
        (call,) = tape.calls
        assert (call.sampling.temperature, call.sampling.max_tokens) == (temperature, 2)
        assert call.sampling.exact is not follow


def test_what_is_no_program_is_refused():
    for wrong in ("python agent.py", print, lambda task, endpoint: task):
        with pytest.raises(TypeError, match=r"\['python', 'agent\.py'\]"):
            Program(wrong)  # type: ignore[arg-type]


def test_nothing_listens_when_no_program_runs():
    ports = []

    async def program(task: str, endpoint: Endpoint) -> str:
        ports.append(int(endpoint.base_url.split(":")[2].split("/")[0]))
        return task

    async def scene() -> None:
        tapes = await asyncio.gather(*(rollout(Program(program), Echo(), "a", engine=Told()) for _ in range(3)))
        assert [tape.reward for tape in tapes] == [1.0] * 3
        for port in set(ports):
            with pytest.raises(OSError, match=r"refused|Connect call failed"):
                await asyncio.open_connection("127.0.0.1", port)

    asyncio.run(scene())
    assert len(set(ports)) <= 3


@pytest.mark.parametrize("kind", ["a function", "a command"])
def test_a_proxy_in_the_environment_is_not_asked_for_the_gateway(kind: str, monkeypatch: pytest.MonkeyPatch):
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy", "NO_PROXY", "no_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    for name in ("NO_PROXY", "no_proxy"):
        monkeypatch.delenv(name)
    code = (
        "import openai; print(openai.OpenAI(max_retries=0).chat.completions.create(model='any', messages=[{'role': "
        "'user', 'content': 'say it'}]).choices[0].message.content)"
    )

    async def asking(task: str, endpoint: Any) -> str:
        async with AsyncOpenAI(max_retries=0, **endpoint._asdict()) as client:
            asked: Any = [{"role": "user", "content": "say it"}]
            return (await client.chat.completions.create(model="any", messages=asked)).choices[0].message.content or ""

    program = Program(asking if kind == "a function" else [sys.executable, "-c", code])
    tape = asyncio.run(rollout(program, Echo(), "it", engine=Told(lambda messages: "it")))
    assert (tape.status, tape.reward) == ("finished", 1.0), tape.cause
