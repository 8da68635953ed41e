"""Agents of every shape that a tape can have, the worlds they act in, and an event loop that deals its tasks anew."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any, TypeVar

from tapereel.agents import (
    LLM,
    Agent,
    ChatAgent,
    Completion,
    EngineError,
    EpisodeSpec,
    Limits,
    ModelFailed,
    Request,
    ScriptedEngine,
    agent,
    delegate,
    rollout,
)
from tapereel.agents.engines.embedded import char_tokenizer
from tapereel.agents.rendering import Renderer
from tapereel.envs import Environment, Outcome
from tapereel.tapes import Answer, Reasoning, Sampling, Tape, Task, Text, ToolCalls

ResultT = TypeVar("ResultT")
RENDERER = Renderer(char_tokenizer())


class Counting(Environment[Any]):
    """Asks for `task` answers, and scores each by its length."""

    async def reset(self, task: int) -> Text:
        self.left = task
        return Text(text=f"say {task} things ({self.rng.randrange(1000)})")

    async def step(self, action: Any) -> Outcome:
        self.left -= 1
        if self.left <= 0:
            return Outcome(reward=1.0, terminated=True)
        return Outcome(Text(text=f"{self.left} left ({self.rng.randrange(1000)})"), reward=float(len(str(action))))


class Breaks(Counting):
    async def step(self, action: Any) -> Outcome:
        if self.left == 1:
            raise OSError("the world broke")
        return await super().step(action)


def word(request: Request) -> str:
    """An answer that depends on everything that was asked, and on the seed."""
    rng = random.Random(f"{request.seed}/{[m['content'] for m in request.messages]}/{request.tools}")
    return "".join(rng.choices("abcdefgh", k=rng.randrange(1, 6)))


class Speaker(Agent):
    async def act(self, tape: Tape, llm: LLM) -> AsyncIterator[Any]:
        yield Answer(text=(await llm(tape, system="Speak.")).text)


class Thinker(Agent):
    """Thinks aloud, with a call for each thought."""

    async def act(self, tape: Tape, llm: LLM) -> AsyncIterator[Any]:
        yield Reasoning(text=(await llm(tape, system="Think.", temperature=0.5, max_tokens=9)).text)
        yield Reasoning(text="a thought of its own")
        yield Answer(text=(await llm(tape.now(), system="Think.")).text)


class Planner(Agent):
    """Lets two sub-agents speak, one after the other; the second speaks without a model."""

    def __init__(self) -> None:
        self.searcher = Thinker()

    async def act(self, tape: Tape, llm: LLM) -> AsyncIterator[Any]:
        async for step in delegate("searcher", self.searcher, tape, llm):
            if isinstance(step, Reasoning):
                yield step
        yield Reasoning(text=f"so: {(await llm(tape.now(), system='Plan.')).text}")
        yield Answer(text="done")


class Debate(Agent):
    """Three sub-agents think at once; whoever has finished is heard first."""

    async def act(self, tape: Tape, llm: LLM) -> AsyncIterator[Any]:
        heard: asyncio.Queue[tuple[str, str]] = asyncio.Queue()

        async def speak(name: str, times: int) -> None:
            view = tape.now().within(f"{tape.scope}/{name}")
            said = ""
            for _ in range(times):
                said += (await llm(view, system=f"You are {name}. You said: {said}")).text
            await heard.put((name, said))

        async with asyncio.TaskGroup() as tasks:
            for k, name in enumerate("abc"):
                tasks.create_task(speak(name, k + 1))
        first = [heard.get_nowait() for _ in range(3)]
        yield Reasoning(text=f"{first}")
        yield Answer(text=(await llm(tape.now(), system=f"{first}")).text)


class Vote(Agent):
    """The same question five times at once; the answers are counted."""

    async def act(self, tape: Tape, llm: LLM) -> AsyncIterator[Any]:
        replies = await asyncio.gather(*(llm(tape, system="Vote.", conversation=str(k)) for k in range(5)))
        yield Answer(text=" ".join(reply.text for reply in replies))


class Racer(Agent):
    """Takes the answer that comes first and gives up on the other."""

    async def act(self, tape: Tape, llm: LLM) -> AsyncIterator[Any]:
        racing = {asyncio.ensure_future(llm(tape, system=name, conversation=name)) for name in ("fast", "slow")}
        done, late = await asyncio.wait(racing, return_when=asyncio.FIRST_COMPLETED)
        for task in late:
            task.cancel()
        await asyncio.gather(*late, return_exceptions=True)
        yield Answer(text=done.pop().result().text)


class TwoMinds(Agent):
    """Keeps two conversations of its own."""

    async def act(self, tape: Tape, llm: LLM) -> AsyncIterator[Any]:
        yield Reasoning(text=(await llm(tape, system="Left.", conversation="left")).text)
        yield Answer(text=(await llm(tape.now(), system="Right.", conversation="right")).text)


class Given(Agent):
    """Takes time, randomness and ids from the door."""

    async def act(self, tape: Tape, llm: LLM) -> AsyncIterator[Any]:
        yield Reasoning(text=f"{llm.now(tape).isoformat()} {llm.uuid(tape)}")
        dice = llm.random(tape)
        reply = await llm(tape.now(), system=f"Roll {dice.random()}")
        yield Answer(text=f"{reply.text} {llm.now(tape).isoformat()} {llm.random(tape).randrange(100)}")


class Stubborn(Agent):
    """Asks again when the model fails, and tells what it heard."""

    async def act(self, tape: Tape, llm: LLM) -> AsyncIterator[Any]:
        try:
            reply = await llm(tape, system="Fail, please.")
        except ModelFailed as error:
            yield Reasoning(text=str(error))
            reply = await llm(tape.now(), system="Again.")
        yield Answer(text=reply.text)


class Scripted(Agent):
    """Asks no model at all."""

    async def act(self, tape: Tape, llm: LLM) -> AsyncIterator[Any]:
        yield Reasoning(text=f"turn {tape.turns}")
        yield Answer(text="my own words")


@agent
async def fails_later(tape: Tape, llm: LLM) -> AsyncIterator[Any]:
    reply = await llm(tape)
    if tape.turns == 2:
        raise KeyError("no such thing")
    yield Answer(text=reply.text)


def parse_short(text: str) -> Answer:
    if len(text) > 3:
        raise ValueError("at most three letters")
    return Answer(text=text)


TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": f"to {name}",
            "parameters": {"type": "object", "properties": {"what": {"type": "string"}}},
        },
    }
    for name in ("look", "take")
]


def tool_words(request: Request) -> str:
    name = random.Random(request.seed).choice(["look", "take", "jump"])
    return f'{{"name": "{name}", "arguments": {{"what": "{word(request)}"}}}}' if name != "jump" else "I jump"


def flaky(request: Request) -> str:
    if "Fail, please." in str(request.messages[0]["content"]):
        raise EngineError("out of memory")
    return word(request)


class Unequal(ScriptedEngine):
    """Answers the slow question long after all others."""

    async def complete(self, request: Request) -> Completion:
        for _ in range(500 if request.messages[0]["content"] == "slow" else 1):
            await asyncio.sleep(0)
        return await super().complete(request)


WORLDS: dict[str, tuple[Callable[[], Agent], Callable[[], Environment[Any]], Any, Callable[[Request], str], Any]] = {
    "one speaker": (Speaker, Counting, 3, word, {}),
    "thoughts": (Thinker, Counting, 3, word, {}),
    "sub-agents": (Planner, Counting, 2, word, {}),
    "concurrent sub-agents": (Debate, Counting, 3, word, {}),
    "one question five times": (Vote, Counting, 2, word, {}),
    "a race": (Racer, Counting, 3, word, {}),
    "two conversations": (TwoMinds, Counting, 3, word, {}),
    "time and chance": (Given, Counting, 3, word, {}),
    "a failing model": (Stubborn, Counting, 2, flaky, {"retries": 0}),
    "no model": (Scripted, Counting, 3, word, {}),
    "misread answers": (lambda: ChatAgent("Short!", parse=parse_short, misreads=6), Counting, 3, word, {}),
    "misread too often": (lambda: ChatAgent("Short!", parse=parse_short, misreads=0), Counting, 9, word, {}),
    "tools": (
        lambda: ChatAgent("Use tools.", actions=[ToolCalls, Answer], tools=TOOLS, misreads=9),
        Counting,
        3,
        tool_words,
        {},
    ),
    "an agent that raises": (lambda: fails_later, Counting, 5, word, {}),
    "a world that breaks": (Speaker, Breaks, 3, word, {}),
    "a model that dies": (
        Speaker,
        Counting,
        3,
        lambda request: flaky(request) if len(request.messages) < 4 else (_ for _ in ()).throw(EngineError("gone")),
        {"retries": 1},
    ),
    "limit of turns": (Thinker, Counting, 9, word, {"limits": Limits(turns=2)}),
    "limit of tokens": (Thinker, Counting, 9, word, {"limits": Limits(tokens=20)}),
    "limit of context": (Thinker, Counting, 25, word, {"limits": Limits(context=160)}),
    "short answers": (Thinker, Counting, 2, word, {"sampling": Sampling(max_tokens=7, temperature=0.3)}),
}
"""name -> (agent, environment, task, model, fields of the spec)."""


def record(name: str, *, tokens: bool = False, **changes: Any) -> Tape:
    """An episode in that world."""
    make, env, task, model, options = WORLDS[name]
    engine = (Unequal if name == "a race" else ScriptedEngine)(model, renderer=RENDERER if tokens else None)
    options = {"seed": 7, "env_seed": 3, **options, **changes}
    spec = EpisodeSpec.of(Task(private=task, bare=True), **options)
    return asyncio.run(rollout(make(), env, spec, engine=engine))


class ShuffledLoop(asyncio.SelectorEventLoop):
    """Runs what is ready in any order: what an agent may rely on is what awaits guarantee, and nothing else."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.dice = random.Random(seed)

    def _run_once(self) -> None:
        self.dice.shuffle(self._ready)  # type: ignore[attr-defined]
        super()._run_once()  # type: ignore[misc]


def run_shuffled(work: Coroutine[Any, Any, ResultT], seed: int) -> ResultT:
    """`asyncio.run`, with tasks dealt anew in every round."""
    with asyncio.Runner(loop_factory=lambda: ShuffledLoop(seed)) as runner:
        return runner.run(work)
