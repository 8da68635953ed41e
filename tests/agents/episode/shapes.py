"""Twenty-one ordinary shapes of agents, and what the model reads in the turn after.

    python -m tests.agents.episode.shapes      writes the table into docs/concepts/conversations.md

Each agent plays two turns against a script. A test compares the page with what is found, and plays the same shapes with
a model in this process and with a hosted one.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from tapereel.agents import LLM, Agent, ChatAgent, Engine, Request, ScriptedEngine, agent, delegate, rollout
from tapereel.agents.gateway import Endpoint, Program
from tapereel.envs import Environment, Outcome
from tapereel.envs.adapters import ToolEnvironment
from tapereel.tapes import Action, Answer, ParseError, Sampling, Step, Tape, Task, Thought, ToolCalls
from tapereel.tapes.messages import text_of

from ..rendering.templates_table import page

PAGE = Path(__file__).resolve().parents[3] / "docs" / "concepts" / "conversations.md"
BEGIN = "<!-- made by tests/agents/episode/shapes.py -->\n"
TURNS = 2


class Note(Thought):
    text: str


class Pick(Action, kind="shape_pick"):
    """Pick a number."""

    number: int


class Room(Environment[Action]):
    """The episode is worth what it was made with."""

    def __init__(self, worth: float = 1.0, turns: int = TURNS) -> None:
        self.worth, self.turns = worth, turns

    async def reset(self, task: object) -> str:
        self.turn = 0
        return "Where to?"

    async def step(self, action: Action) -> Outcome:
        self.turn += 1
        over = self.turn == self.turns
        return Outcome("And now?", reward=self.worth if over else None, terminated=over)


class Till(ToolEnvironment):
    """Two tools. The second answer without a call ends the episode."""

    def __init__(self) -> None:
        super().__init__([price, stock])

    async def answered(self, text: str) -> Outcome:
        return Outcome(reward=1.0, terminated=True)


def price(fruit: str) -> str:
    """The price of one fruit."""
    return f"{fruit} costs 50"


def stock(fruit: str) -> str:
    """How many there are."""
    return f"7 of {fruit}"


def called(name: str) -> str:
    return f'<tool_call>{{"name": "{name}", "arguments": {{"fruit": "pear"}}}}</tool_call>'


Steps = AsyncIterator[Step]


@agent
async def one_call(tape: Tape, llm: LLM) -> Steps:
    yield Answer(text=(await llm(tape)).text)


@agent
async def best_of(tape: Tape, llm: LLM) -> Steps:
    replies = [await llm(tape) for _ in range(3)]
    yield Answer(text=max(replies, key=lambda reply: len(reply.text)).text)


@agent
async def vote(tape: Tape, llm: LLM) -> Steps:
    replies = await asyncio.gather(*(llm(tape, conversation=f"voter {k}") for k in range(3)))
    texts = [reply.text for reply in replies]
    yield Answer(text=max(texts, key=texts.count))


@agent
async def reflect(tape: Tape, llm: LLM) -> Steps:
    yield Note(text=(await llm(tape)).text)
    yield Answer(text=(await llm(tape.now(), system="Improve it.")).text)


@agent
async def grade(tape: Tape, llm: LLM) -> Steps:
    reply = await llm(tape)
    await llm(tape, messages=[{"role": "user", "content": f"Grade this: {reply.text}"}])
    yield Answer(text=reply.text)


@agent
async def route(tape: Tape, llm: LLM) -> Steps:
    expert = (await llm(tape, system="Which expert?", conversation="router")).text
    yield Answer(text=(await llm(tape, system=f"You are the {expert}.")).text)


@agent
async def guard(tape: Tape, llm: LLM) -> Steps:
    reply = await llm(tape)
    yield Answer(text="stay" if reply.text == "jump" else reply.text)


@agent
async def plan_act(tape: Tape, llm: LLM) -> Steps:
    yield Note(text=(await llm(tape, system="Plan.")).text)
    yield Answer(text=(await llm(tape.now(), system="Act.")).text)


@agent
async def two_prompts(tape: Tape, llm: LLM) -> Steps:
    action = await llm(tape, system="Say where to go.")
    await llm(tape, system="Describe the weather.")
    yield Answer(text=action.text)


@agent
async def sub_agent(tape: Tape, llm: LLM) -> Steps:
    async for step in delegate("driver", one_call, tape, llm):
        yield step


@agent
async def advised(tape: Tape, llm: LLM) -> Steps:
    async for step in delegate("adviser", adviser, tape, llm):
        yield step
    yield Answer(text=(await llm(tape.now())).text)


@agent
async def adviser(tape: Tape, llm: LLM) -> Steps:
    yield Note(text=(await llm(tape)).text)


@agent
async def parsed(tape: Tape, llm: LLM) -> Steps:
    yield Pick(number=int((await llm(tape)).text.split()[-1]))


@agent
async def mapped(tape: Tape, llm: LLM) -> Steps:
    reply = await llm(tape)
    yield llm.read_from(Pick(number=["left", "right"].index(reply.text)), reply)


@agent
async def think_answer(tape: Tape, llm: LLM) -> Steps:
    thought, _, answer = (await llm(tape)).text.partition(" -> ")
    yield Note(text=thought)
    yield Answer(text=answer)


@agent
async def few_shot(tape: Tape, llm: LLM) -> Steps:
    shown = [{"role": "user", "content": "Here?"}, {"role": "assistant", "content": "here"}]
    yield Answer(text=(await llm(tape, messages=[*shown, *tape.messages()])).text)


@agent
async def note_before(tape: Tape, llm: LLM) -> Steps:
    yield Note(text="I look first.")
    yield Answer(text=(await llm(tape.now())).text)


@agent
async def note_after(tape: Tape, llm: LLM) -> Steps:
    reply = await llm(tape)
    yield Note(text="Checked by code.")
    yield Answer(text=reply.text)


@agent
async def retry(tape: Tape, llm: LLM) -> Steps:
    reply = await llm(tape)
    if not reply.text.isalpha():
        yield ParseError(problem="Write one word.")
        reply = await llm(tape.now())
    yield Answer(text=reply.text)


@agent
async def two_actions(tape: Tape, llm: LLM) -> Steps:
    yield Answer(text=(await llm(tape)).text)
    yield Answer(text="and another")


@agent
async def half_the_calls(tape: Tape, llm: LLM) -> Steps:
    reply = await llm(tape, tools=[price, stock])
    if reply.tool_calls:
        yield Note(text="One at a time.")
        yield ToolCalls(calls=reply.tool_calls[:1])
    else:
        yield Answer(text=reply.text)


async def ask_twice(task: str, endpoint: Endpoint) -> str:
    from openai import AsyncOpenAI

    said: list[Any] = [{"role": "user", "content": "Where to?"}]
    async with AsyncOpenAI(**endpoint._asdict()) as client:
        for _ in range(TURNS):
            answer = await client.chat.completions.create(model="m", messages=said)
            text = answer.choices[0].message.content
            said += [{"role": "assistant", "content": text}, {"role": "user", "content": "And now?"}]
    return text or ""


@dataclass(frozen=True)
class Shape:
    name: str
    agent: Agent
    answers: tuple[str, ...]
    """The model's answers in the first turn."""
    first: str
    """The second turn's prompt shows this agent's conversation."""
    env: Callable[[], Environment[Any]] = Room
    in_order: bool = True
    """Whether the requests are made one after the other."""
    last: tuple[str, ...] = ()
    """The answers in the second turn, if they are others."""

    @property
    def script(self) -> tuple[str, ...]:
        return (*self.answers, *(self.last or self.answers))


SHAPES = [
    Shape("one call", one_call, ("left",), "one_call"),
    Shape("the longest of three", best_of, ("up", "left", "on"), "best_of"),
    Shape("the vote of three, each in its own conversation", vote, ("left", "up", "left"), "vote", in_order=False),
    Shape("draft, then improve", reflect, ("left?", "left!"), "reflect"),
    Shape("answer, then grade it with `messages=`", grade, ("left", "Score: 9"), "grade"),
    Shape("route, then answer", route, ("pilot", "left"), "route"),
    Shape("a guard that replaces `jump`", guard, ("jump",), "guard"),
    Shape("plan, then act", plan_act, ("Go home.", "left"), "plan_act"),
    Shape("two prompts, and the action is the first answer", two_prompts, ("left", "rain"), "two_prompts"),
    Shape("a sub-agent acts", sub_agent, ("left",), "sub_agent/driver"),
    Shape("a sub-agent advises", advised, ("Mind the step.", "left"), "advised"),
    Shape("a number parsed from the answer", parsed, ("I take 7",), "parsed"),
    Shape("`read_from`: a number that isn't in the answer", mapped, ("right",), "mapped"),
    Shape("thought and action from one answer", think_answer, ("Home is near -> left",), "think_answer"),
    Shape("examples before the conversation", few_shot, ("left",), "few_shot"),
    Shape("a note before the call", note_before, ("left",), "note_before"),
    Shape("a note after the call", note_after, ("left",), "note_after"),
    Shape("`ParseError`, then another try", retry, ("42", "left"), "retry"),
    Shape("two actions in a turn", two_actions, ("left",), "two_actions"),
    Shape(
        "`ChatAgent` calls two tools", ChatAgent(), (called("price") + called("stock"),), "agent", Till, last=("Done.",)
    ),
    Shape(
        "a note, and one of two calls is made",
        half_the_calls,
        (called("price") + called("stock"),),
        "half_the_calls",
        Till,
        last=("Done.",),
    ),
    Shape("a program behind the gateway", Program(ask_twice), ("left",), "program", partial(Room, turns=1)),
]


def play(shape: Shape, engine: Engine | None = None) -> Tape:
    task = Task(public="Where to?", private="left")
    engine = engine or ScriptedEngine(shape.script)
    return asyncio.run(rollout(shape.agent, shape.env(), task, engine=engine, sampling=Sampling(max_tokens=24)))


def second(shape: Shape) -> tuple[Tape, list[dict[str, Any]]]:
    """The tape, and the messages of the second turn's first request."""
    asked: list[list[dict[str, Any]]] = []

    def policy(request: Request) -> str:
        asked.append([*request.messages])
        return shape.script[len(asked) - 1]

    tape = play(shape, ScriptedEngine(policy))
    return tape, asked[len(shape.answers)] if len(asked) > len(shape.answers) else []


def written(messages: list[dict[str, Any]]) -> str:
    return "<br>".join(
        f"{one['role']}: {text_of(one)}".replace("|", "\\|").replace("<tool", "&lt;tool").replace("</tool", "&lt;/tool")
        for one in messages
    )


def table() -> str:
    lines = ["| agent | answers of its turn | what the next turn's first request contains |", "|---|---|---|"]
    for shape in SHAPES:
        tape, messages = second(shape)
        answers = "<br>".join(written([{"role": "", "content": text}])[2:] for text in shape.answers)
        found = written(messages) if messages else f"none: `{tape.cause.error}`" if tape.cause is not None else "none"
        lines.append(f"| {shape.name} | {answers} | {found} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text("utf-8"), table(), begin=BEGIN, name=str(PAGE)), "utf-8")
