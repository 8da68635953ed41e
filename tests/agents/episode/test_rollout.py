"""Rollout: one episode behind one boundary. Whatever goes wrong is a typed end, and no other episode is touched."""

from __future__ import annotations

import asyncio
import gc
import threading
from collections.abc import AsyncIterator
from typing import Any

import pytest

from tapereel.agents import (
    LLM,
    Agent,
    Capability,
    Completion,
    EngineError,
    EpisodeSpec,
    Limits,
    PromptTooLong,
    Request,
    ScriptedEngine,
    agent,
    delegate,
    rollout,
    rollout_group,
)
from tapereel.agents.engines import TeamEngine
from tapereel.agents.episode.seeds import derive_seed
from tapereel.agents.replay import replay
from tapereel.envs import Environment, Outcome
from tapereel.envs.environment import NotAnEnvironment
from tapereel.tapes import (
    Answer,
    CauseType,
    Observation,
    Reasoning,
    Status,
    Step,
    StoreFailed,
    Tape,
    Task,
    Text,
)
from tapereel.tapes.errors import BadArgument
from tapereel.tapes.journal import Durability

from ..worlds import Guess, GuessNumber, Hint, Player


def run(*args: Any, **options: Any) -> Tape:
    return asyncio.run(rollout(*args, **options))


def test_an_episode_and_what_the_model_was_asked():
    env = GuessNumber()
    tape = run(Player(), env, EpisodeSpec.of(7, seed=3, group="g", attempt=2), engine=ScriptedEngine(["5", "8", "7"]))
    assert (tape.status, tape.reward, tape.turns, env.closed) == (Status.FINISHED, pytest.approx(0.8), 3, 1)
    assert [e.by for e in tape.entries] == ["env", "player", "env", "player", "env", "player"]
    assert [e.turn for e in tape.entries] == [0, 0, 0, 1, 1, 2]
    assert [(r.step, r.value) for r in tape.rewards] == [(1, -0.1), (3, -0.1), (5, 1.0)]
    assert [m["content"] for m in tape.calls[-1].messages] == [
        "Guess the number. Answer with one digit.",
        "I think of a number from 1 to 9.",
        "5",
        "higher",
        "8",
        "lower",
    ]
    assert [c.keep_messages for c in tape.calls] == [0, 3, 5]
    assert [len(c.new_messages) for c in tape.calls] == [2, 1, 1]
    assert (tape.begin.group, tape.begin.attempt, tape.begin.task.private, tape.begin.task.bare) == ("g", 2, 7, True)
    assert [c.seed for c in tape.calls] == [derive_seed(3, "player", k) for k in range(3)]
    assert Tape.model_validate_json(tape.model_dump_json()) == tape


def test_nothing_private_reaches_a_prompt():
    canary = "CANARY-4711"

    class Watched(Environment[Answer]):
        async def reset(self, task: Task) -> Text:
            assert canary in str(task.private)
            return Text(text=str(task.public))

        async def step(self, action: Answer) -> Outcome:
            return Outcome(Text(text="go on"), reward={canary: 0.625}, metrics={f"m{canary}": 0.375})

        async def finish(self, status: Status) -> Outcome:
            return Outcome(reward={f"end{canary}": 1.0})

    @agent
    async def snoop(tape: Tape, llm: LLM) -> AsyncIterator[Any]:
        found = []
        for name in dir(tape):
            if name.startswith("_"):
                continue
            try:
                found.append(repr(getattr(tape, name)))
            except AttributeError:
                continue
        await llm(tape, system=" ".join(found))
        yield Answer(text=(await llm(tape.now())).text)

    seen: list[str] = []

    def model(request: Request) -> str:
        seen.append(repr(request))
        return "ok"

    tape = run(
        snoop,
        Watched,
        Task(public="q", private={"answer": canary}),
        engine=ScriptedEngine(model),
        limits=Limits(turns=3),
    )
    assert tape.reward == pytest.approx(2.875)
    assert len(seen) == 6
    for text in seen:
        assert canary not in text
        assert "0.625" not in text
        assert "0.375" not in text
    for call in tape.calls:
        assert canary not in str(call.messages)


class Raising(GuessNumber):
    def __init__(self, where: str, what: BaseException | None = None) -> None:
        super().__init__()
        self.where, self.what = where, what or ValueError("the plug was pulled")

    async def reset(self, task: int) -> Any:
        if self.where == "reset":
            raise self.what
        return "not an observation" if self.where == "reset type" else await super().reset(task)

    async def step(self, action: Guess) -> Any:
        if self.where == "step":
            raise self.what
        return {"reward": 1.0} if self.where == "step type" else await super().step(action)

    async def finish(self, status: Status) -> Any:
        if self.where == "finish":
            raise self.what
        return 1.0 if self.where == "finish type" else None

    async def close(self) -> None:
        await super().close()
        if self.where == "close":
            raise self.what


@pytest.mark.parametrize("where", ["reset", "reset type", "step", "step type", "finish", "finish type", "close"])
def test_a_broken_environment_is_a_typed_end(where):
    env = Raising(where)
    tape = run(Player(), env, 7, engine=ScriptedEngine(["7"]))
    fault = fault_of(tape, where)
    assert (fault.type, env.closed) == (CauseType.ENVIRONMENT, 1)
    assert tape.trains == (where == "close")
    assert fault.message
    assert fault.frame


def test_the_environments_own_timeout_error_stays_its_own():
    tape = run(Player(), Raising("step", TimeoutError("mine")), 7, engine=ScriptedEngine(["7"]))
    assert (tape.cause.error, tape.cause.message) == ("TimeoutError", "mine")


@pytest.mark.parametrize("where", ["reset", "step", "close"])
@pytest.mark.parametrize("blocking", [False, True])
def test_an_environment_that_hangs_ends_in_time(where, blocking):
    release = threading.Event()

    class Hanging(GuessNumber):
        pass

    Hanging.blocking = blocking

    async def hang(self: Any, *args: Any) -> Any:
        if blocking:
            release.wait()
        else:
            await asyncio.Event().wait()

    setattr(Hanging, where, hang)
    try:
        tape = run(Player(), Hanging(), 7, engine=ScriptedEngine(["7"]), limits=Limits(environment_seconds=1.0))
    finally:
        release.set()
    fault = fault_of(tape, where)
    assert (fault.type, fault.error) == (CauseType.ENVIRONMENT, "TimeoutError")
    assert where in fault.message
    assert " 1 s" in fault.message


def test_a_blocking_environment_runs_in_one_thread_of_its_own():
    threads = set()

    class Blocking(GuessNumber):
        blocking = True

        async def reset(self, task: int) -> Hint:
            threads.add(threading.current_thread())
            return await super().reset(task)

        async def step(self, action: Guess) -> Outcome:
            threads.add(threading.current_thread())
            return await super().step(action)

    tape = run(Player(), Blocking(), 7, engine=ScriptedEngine(["5", "7"]))
    assert tape.status is Status.FINISHED
    assert len(threads) == 1
    assert threading.main_thread() not in threads


def fault_of(tape: Tape, where: str) -> Any:
    """The environment's fault: the tape's end, or beside it where the episode had its result already."""
    if where != "close":
        assert tape.status is Status.ERROR
        return tape.cause
    assert tape.status is Status.FINISHED
    (fault,) = tape.end.beside
    return fault


def acting(act: Any) -> Agent:
    return type("Acting", (Agent,), {"act": act})()


async def _nothing(self: Any, tape: Tape, llm: LLM) -> AsyncIterator[Any]:
    return
    yield


async def _only_thought(self: Any, tape: Tape, llm: LLM) -> AsyncIterator[Any]:
    yield Reasoning(text="hm")


async def _raises(self: Any, tape: Tape, llm: LLM) -> AsyncIterator[Any]:
    yield Reasoning(text="hm")
    raise KeyError("lost")


async def _observes(self: Any, tape: Tape, llm: LLM) -> AsyncIterator[Any]:
    yield Hint(text="I decide what I see")


async def _coroutine(self: Any, tape: Tape, llm: LLM) -> Any:
    return Guess(number=1)


async def _unasked(self: Any, tape: Tape, llm: LLM) -> AsyncIterator[Any]:
    yield Guess(number=int((await llm(tape)).text))


async def _exits(self: Any, tape: Tape, llm: LLM) -> AsyncIterator[Any]:
    yield Reasoning(text="hm")
    raise SystemExit("bye")


@pytest.mark.parametrize("act", [_nothing, _only_thought, _raises, _observes, _coroutine, _unasked, _exits])
def test_a_broken_agent_is_a_typed_end_that_still_trains(act):
    tape = run(acting(act), GuessNumber(), 7, engine=None)
    assert (tape.status, tape.cause.type) == (Status.ERROR, CauseType.AGENT)
    assert tape.trains


class Failing:
    name = "failing"
    renderer = None
    context = None
    can: frozenset[Capability] = frozenset()

    def __init__(self, *answers: Any) -> None:
        self.answers = list(answers)

    async def complete(self, request: Request) -> Completion:
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return Completion(text=answer)

    def forget(self, cache_key: str) -> None:
        pass

    async def close(self) -> None:
        pass


def test_the_models_failure_is_the_models_and_retries_are_on_the_tape(monkeypatch):
    tape = run(Player(), GuessNumber(), 7, engine=Failing(EngineError("down")))
    assert (tape.status, tape.cause.type) == (Status.ERROR, CauseType.MODEL)
    assert tape.calls[0].finish == "error"
    assert tape.calls[0].attempts[0].error == "EngineError: down"
    flaky = Failing(EngineError("503", retry=True), "7")

    async def at_once(seconds: float) -> None:
        assert seconds == 0.5

    monkeypatch.setattr("tapereel.agents.episode.llm.asyncio.sleep", at_once)
    tape = run(Player(), GuessNumber(), 7, engine=flaky)
    assert tape.status is Status.FINISHED
    assert [a.error for a in tape.calls[0].attempts] == ["EngineError: 503", None]


def test_a_prompt_that_is_too_long_is_the_limit_of_context():
    tape = run(Player(), GuessNumber(), 7, engine=Failing(PromptTooLong("9 tokens over")))
    assert (tape.status, tape.cause.type) == (Status.LIMIT, CauseType.CONTEXT)
    assert tape.trains


def test_turns_are_limited():
    tape = run(Player(), GuessNumber(), 7, engine=ScriptedEngine(lambda r: "1"), limits=Limits(turns=4))
    assert (tape.status, tape.cause.type, tape.turns) == (Status.LIMIT, CauseType.TURNS, 4)


class Counting(ScriptedEngine):
    async def complete(self, request: Request) -> Completion:
        from tapereel.tapes.records import Usage

        done = await super().complete(request)
        return Completion(text=done.text, usage=Usage(completion_tokens=10))


def test_tokens_are_limited_and_the_limit_latches_whatever_the_agent_swallows():
    async def stubborn(self: Any, tape: Tape, llm: LLM) -> AsyncIterator[Any]:
        for _ in range(50):
            try:
                await llm(tape)
            except BaseException:
                continue
        yield Guess(number=1)

    tape = run(acting(stubborn), GuessNumber(), 7, engine=Counting(lambda r: "1"), limits=Limits(tokens=25))
    assert (tape.status, tape.cause.type, len(tape.calls)) == (Status.LIMIT, CauseType.TOKENS, 3)


def test_seconds_are_limited():
    class Slow(Failing):
        async def complete(self, request: Request) -> Completion:
            await asyncio.Event().wait()
            raise AssertionError

    tape = run(Player(), GuessNumber(), 7, engine=Slow(), limits=Limits(agent_seconds=0.05, system_seconds=0.05))
    assert (tape.status, tape.cause.type) == (Status.LIMIT, CauseType.SECONDS)
    assert not tape.trains


def test_cancelling_closes_the_tape_records_the_partial_answer_and_reaches_the_caller():
    bodies: list[bytes] = []

    class Memory:
        durability, media = Durability.TAPE, None

        def append(self, body: bytes) -> None:
            bodies.append(body)

        async def durable(self) -> None:
            pass

    class Partial(Failing):
        async def complete(self, request: Request) -> Completion:
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                assert request.on_partial is not None
                request.on_partial(Completion(text="hal"))
                raise
            raise AssertionError

    env = GuessNumber()

    async def main() -> None:
        task = asyncio.create_task(rollout(Player(), env, 7, engine=Partial(), journal=Memory()))
        for _ in range(20):
            await asyncio.sleep(0)
        assert len(bodies) == 2
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(main())
    tape = Tape.of(bodies)
    assert (tape.status, tape.calls[0].finish, tape.calls[0].text) == (Status.CANCELLED, "cancelled", "hal")
    assert env.closed == 1


def test_a_failing_store_is_loud():
    class Broken:
        durability, media = Durability.TAPE, None

        def append(self, body: bytes) -> None:
            raise StoreFailed("no space left")

        async def durable(self) -> None:
            pass

    with pytest.raises(StoreFailed, match="space"):
        run(Player(), GuessNumber(), 7, engine=ScriptedEngine(["7"]), journal=Broken())


class Diary:
    """Notes the order of what is written, made durable and done."""

    def __init__(self, durability: Durability) -> None:
        self.durability, self.media = durability, None
        self.events: list[str] = []

    def append(self, body: bytes) -> None:
        self.events.append(body.split(b'"t":"')[1].split(b'"')[0].decode())

    async def durable(self) -> None:
        self.events.append("durable")


@pytest.mark.parametrize(
    ("effect", "durability", "waits"),
    [
        ("irreversible", Durability.TAPE, True),
        ("idempotent", Durability.TAPE, True),
        ("pure", Durability.STEP, True),
        ("pure", Durability.TAPE, False),
    ],
)
def test_an_action_with_an_effect_is_durable_before_it_is_done(effect, durability, waits):
    diary = Diary(durability)

    class Launch(GuessNumber):
        async def step(self, action: Guess) -> Outcome:
            diary.events.append("LAUNCH")
            return await super().step(action)

    Launch.effect = effect
    tape = run(Player(), Launch(), 7, engine=ScriptedEngine(["7"]), journal=diary)
    before = ["begin", "step", "call", "step", *(["durable"] if waits else []), "LAUNCH"]
    assert diary.events == [*before, "reward", "end", "durable"]
    assert tape.begin.env.effect == effect


def test_sub_agents_speak_under_their_path_with_conversations_of_their_own():
    class Searcher(Agent):
        async def act(self, tape: Tape, llm: LLM) -> AsyncIterator[Any]:
            yield Reasoning(text=(await llm(tape, system="search")).text)

    class Planner(Agent):
        def __init__(self) -> None:
            self.searcher = Searcher()

        async def act(self, tape: Tape, llm: LLM) -> AsyncIterator[Any]:
            yield Reasoning(text=(await llm(tape, system="plan")).text)
            async for step in delegate("searcher", self.searcher, tape, llm):
                yield step
            yield Guess(number=int((await llm(tape.now(), system="plan")).text))

    seen: list[tuple[str, list[str]]] = []

    def model(request: Request) -> str:
        seen.append((request.path, [f"{m['role']}:{m['content']}" for m in request.messages]))
        return {0: "look", 1: "found 7", 2: "7"}[len(seen) - 1]

    tape = run(Planner(), GuessNumber(), 7, engine=ScriptedEngine(model))
    assert tape.status is Status.FINISHED
    assert [e.by for e in tape.entries] == ["env", "planner", "planner/searcher", "planner"]
    start = "user:I think of a number from 1 to 9."
    assert seen == [
        ("planner", ["system:plan", start]),
        ("planner/searcher", ["system:search", start, "user:look"]),
        ("planner", ["system:plan", start, "assistant:look", "user:found 7"]),
    ]
    assert [c.keep_messages for c in tape.calls] == [0, 0, 3]
    assert "searcher" in str(tape.begin.agent.config)
    assert tape.messages() == tape.messages(path="planner")
    assert [message["role"] for message in tape.messages()] == ["user", "assistant", "user", "assistant"]
    with pytest.raises(BadArgument, match=r"'sercher'.*'planner', 'planner/searcher'"):
        tape.messages(path="sercher")


def test_a_scripted_agent_needs_no_engine_and_its_words_are_calls():
    @agent
    async def always_seven(tape: Tape, llm: LLM) -> AsyncIterator[Any]:
        yield Reasoning(text="seven, as ever")
        yield Guess(number=7)

    tape = run(always_seven, GuessNumber(), 7)
    assert tape.status is Status.FINISHED
    assert [(c.engine, c.text) for c in tape.calls] == [("authored", "seven, as ever"), ("authored", "7")]
    assert [e.calls for e in tape.entries] == [(), ((tape.calls[0].call, 0, 0),), ((tape.calls[1].call, 0, 0),)]


def test_a_fork_goes_on_from_a_turn():
    parent = run(Player(), GuessNumber(), 7, engine=ScriptedEngine(["5", "8", "7"]))
    seen: list[list[str]] = []

    def model(request: Request) -> str:
        seen.append([m["content"] for m in request.messages])
        return "7"

    child = run(
        Player(), GuessNumber(), EpisodeSpec.of(7, fork=parent.at_turn(1), seed=9), engine=ScriptedEngine(model)
    )
    assert child.status is Status.FINISHED
    assert child.turns == 2
    assert child.reward == 1.0
    assert seen == [["Guess the number. Answer with one digit.", "I think of a number from 1 to 9.", "5", "higher"]]
    assert (child.calls[0].base, child.calls[0].keep_messages) == (parent.calls[0].call, 3)
    assert child.begin.parent.digest == parent.at_turn(1).digest
    wrong = run(Player(), GuessNumber(), EpisodeSpec.of(3, fork=parent.at_turn(1)), engine=ScriptedEngine(["3"]))
    assert (wrong.status, wrong.cause.error) == (Status.ERROR, "RestoreMismatch")


class Shapes(Agent):
    """Asks as ordinary agents do: with few-shot messages, a note of its own, two calls a turn, a sub-agent."""

    def __init__(self) -> None:
        self.helper = Player()

    async def act(self, tape: Tape, llm: LLM) -> AsyncIterator[Any]:
        shots = [
            {"role": "user", "content": "1?"},
            {"role": "assistant", "content": "1"},
            {"role": "user", "content": "?"},
        ]
        yield Reasoning(text="A note of mine.")
        both = [await llm(tape, messages=shots), await llm(tape, conversation="critic", messages=shots[:1])]
        yield Reasoning(text=" ".join(reply.text for reply in both))
        async for step in delegate("helper", self.helper, tape, llm):
            yield step


ANSWERS = ["a", "b", "1", "c", "d", "2", "e", "f", "7"]


def asked(tape: Tape) -> list[str | None]:
    return [call.text for call in tape.calls if call.engine != "authored"]


def test_a_list_of_answers_is_in_order_within_each_episode_and_its_forks():
    engine = ScriptedEngine(ANSWERS)

    async def several() -> list[Tape]:
        return await asyncio.gather(*(rollout(Shapes(), GuessNumber(), 7, engine=engine) for _ in range(3)))

    tapes = asyncio.run(several())
    assert [asked(tape) for tape in tapes] == [ANSWERS] * 3
    fork = run(Shapes(), GuessNumber(), EpisodeSpec.of(7, fork=tapes[0].at_turn(1)), engine=engine)
    assert asked(fork) == ANSWERS[3:]
    again = run(Shapes(), GuessNumber(), EpisodeSpec.of(7, fork=fork.at_turn(2)), engine=engine)
    assert asked(again) == ANSWERS[6:]


def test_each_engine_of_a_team_counts_its_own_requests():
    helper = ScriptedEngine(ANSWERS[2::3])
    own = ScriptedEngine(answer for answer in ANSWERS if not answer.isdigit())
    tape = run(Shapes(), GuessNumber(), 7, engine=TeamEngine({"": own, "shapes/helper": helper}))
    assert asked(tape) == ANSWERS


def test_a_retried_request_gets_the_answer_of_its_place(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("tapereel.agents.episode.llm.BACKOFF", 0.0)

    class Shaky(ScriptedEngine):
        seen = 0

        async def complete(self, request: Request) -> Completion:
            self.seen += 1
            found = await super().complete(request)
            if self.seen % 2:
                raise EngineError("busy", retry=True)
            return found

    assert asked(run(Player(), GuessNumber(), 7, engine=Shaky(["5", "8", "7"]))) == ["5", "8", "7"]


@pytest.mark.parametrize("task", [{"deck": [1, 2, 3]}, Task(private={"deck": [1, 2, 3]}, public={"seen": [1]})])
def test_each_attempt_gets_a_task_of_its_own(task: object):
    class Deck(Environment):
        async def reset(self, task: Any) -> str:
            deck = (task.private if isinstance(task, Task) else task)["deck"]
            return str(deck.pop())

        async def step(self, action: Answer) -> Outcome:
            return Outcome(reward=1.0, terminated=True)

    @agent
    async def spoils(tape: Tape, llm: LLM) -> AsyncIterator[Any]:
        assert tape.task in (None, {"seen": [1]})
        if isinstance(tape.task, dict):
            tape.task["seen"].append(2)
        yield Answer(text="x")

    before = Task.of(task).hash
    tapes = asyncio.run(rollout_group(spoils, Deck, task, n=3, engine=ScriptedEngine([])))
    assert [(str(tape[0]), tape.reward) for tape in tapes] == [("3", 1.0)] * 3
    assert {before, Task.of(task).hash} == {tape.begin.task_hash for tape in tapes}


def test_a_factory_that_returns_an_instance_again_is_refused():
    env = GuessNumber()
    run(Player(), lambda: env, 7, engine=ScriptedEngine(["7"]))
    with pytest.raises(NotAnEnvironment, match="GuessNumber"):
        run(Player(), lambda: env, 7, engine=ScriptedEngine(["7"]))


def test_bad_episodes_touch_no_other(caplog):
    async def main() -> list[Tape]:
        engine = ScriptedEngine(lambda r: "7")
        jobs = [
            rollout(Player(), Raising("step") if k % 3 == 0 else GuessNumber(), 7, engine=engine) for k in range(30)
        ]
        return list(await asyncio.gather(*jobs))

    tapes = asyncio.run(main())
    assert [t.status for t in tapes] == [Status.ERROR if k % 3 == 0 else Status.FINISHED for k in range(30)]
    assert sum("the plug was pulled" in r.message for r in caplog.records) <= 1


def test_an_episode_is_freed_without_a_garbage_collection():
    async def main() -> int:
        found = 0
        for _ in range(2):  # the first episode fills caches
            gc.collect()
            await rollout(Player(), GuessNumber(), 7, engine=ScriptedEngine(["5", "7"]))
            await asyncio.sleep(0.01)  # the tasks of its code end
            found = gc.collect()
        return found

    gc.disable()
    try:
        assert asyncio.run(main()) == 0
    finally:
        gc.enable()


class Board(Observation):
    cells: list[int]


class Reusing(Environment):
    """Changes and returns one observation object in every step."""

    async def reset(self, task: object) -> Board:
        self.board = Board(cells=[0, 0])
        return self.board

    async def step(self, action: Answer) -> Outcome:
        self.board.cells[sum(self.board.cells)] = 1
        return Outcome(self.board, terminated=all(self.board.cells))


class Reading(Agent):
    name = "reading"

    def __init__(self) -> None:
        self.seen: list[list[list[int]]] = []

    async def act(self, tape: Tape, llm: LLM) -> AsyncIterator[Step]:
        self.seen.append([list(one.cells) for one in tape.observations if isinstance(one, Board)])
        yield Answer(text="go")


def test_what_an_agent_saw_stays_if_the_environment_changes_its_object_later():
    agent = Reading()
    tape = asyncio.run(rollout(agent, Reusing(), 1))
    assert agent.seen == [[[0, 0]], [[0, 0], [1, 0]]]
    assert asyncio.run(replay(tape, Reading())).outcome == "verified"
