"""ChatAgent: answers read as actions, misreadings that the model sees, tool calls in three forms; groups; replay."""

from __future__ import annotations

import asyncio
import json
import re
from typing import Any

import pytest

from tapereel.agents import (
    Capability,
    ChatAgent,
    Completion,
    Diverged,
    EngineError,
    EpisodeSpec,
    ReplayEngine,
    Request,
    ScriptedEngine,
    agent,
    rollout,
    rollout_group,
)
from tapereel.agents.rendering import Renderer
from tapereel.envs import Environment, Outcome
from tapereel.tapes import Action, Answer, CauseType, ParseError, Status, Text, ToolCalls, ToolResult, ToolResults
from tapereel.tapes.errors import UsageError
from tapereel.tapes.steps import Prompt, read_step

from ..families import tokenizer
from ..worlds import Guess, GuessNumber, Player


def run(*args: Any, **options: Any) -> Any:
    return asyncio.run(rollout(*args, **options))


def test_a_misread_answer_is_a_thought_that_the_model_sees():
    seen: list[list[tuple[str, str]]] = []
    answers = iter(["seven", "7"])

    def model(request: Request) -> str:
        seen.append([(m["role"], m["content"]) for m in request.messages])
        return next(answers)

    chat = ChatAgent("Guess.", parse=lambda text: Guess(number=int(text)))
    tape = run(chat, GuessNumber(), 7, engine=ScriptedEngine(model))
    assert tape.status is Status.FINISHED
    assert [type(s) for s in tape[1:]] == [ParseError, Guess]
    assert seen[1][-2:] == [("assistant", "seven"), ("user", "invalid literal for int() with base 10: 'seven'")]


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        ("<tool_call>" + "[" * 100_000 + "</tool_call>", " 64 "),
        ('{"name": "w_guess", "arguments": ' + '{"a": ' * 400 + "1" + "}" * 401, " 64 "),
        ('{"name": "w_guess", "arguments": "' + "[" * 100_000 + '"}', " 64 "),
        (r'{"name": "w_guess", "arguments": {"number": "\ud800"}}', "surrogate"),
        ('{"name": "w_guess", "arguments": {"number": NaN}}', "NaN"),
        ('{"name": "w_guess", "arguments": {"number": 1e999}}', "1e999"),
        ('{"name": "w_guess", "arguments": {"number": ' + "9" * 5000 + "}}", "5000"),
        ('<tool_call>{"function": []}</tool_call>', '"name" and "arguments"'),
    ],
)
def test_json_that_nobody_could_record_is_misread_too(answer: str, says: str):
    answers = iter([answer, '{"name": "w_guess", "arguments": {"number": 7}}'])
    tape = run(ChatAgent(actions=[Guess]), GuessNumber(), 7, engine=ScriptedEngine(lambda request: next(answers)))
    assert tape.status is Status.FINISHED, tape.cause
    assert [type(s) for s in tape[1:]] == [ParseError, Guess]
    assert says in tape[1].problem


def test_a_system_prompt_alone_makes_an_agent_that_answers_with_text():
    seen: list[list[tuple[str, str]]] = []

    def model(request: Request) -> str:
        seen.append([(m["role"], m["content"]) for m in request.messages])
        return '{"no": "call"}'

    tape = run(ChatAgent("Be brief."), GuessNumber(), 7, engine=ScriptedEngine(model))
    assert [type(s) for s in tape[1:2]] == [Answer]
    assert tape[1].text == '{"no": "call"}'
    assert seen[0][0] == ("system", "Be brief.")


def test_a_second_system_prompt_is_a_warning(caplog):
    messages = ({"role": "system", "content": "You are a judge."}, {"role": "user", "content": "Guess."})

    class Told(GuessNumber):
        async def reset(self, task: int) -> Prompt:
            await super().reset(task)
            return Prompt(text="Guess.", messages=messages)

    for system, warned in ((None, 0), ("Be brief.", 1)):
        tape = run(ChatAgent(system, name="judge"), Told(), 7, engine=ScriptedEngine(["7"]))
        assert len(tape.calls[0].messages) == 2 + warned
        assert sum("'judge'" in r.getMessage() and "system prompt" in r.getMessage() for r in caplog.records) == warned


def test_parse_and_actions_exclude_each_other():
    with pytest.raises(ValueError, match=r"`parse`.*`actions`"):
        ChatAgent(actions=[Guess], parse=lambda text: Guess(number=1))


def test_the_kind_of_a_parse_error_on_tape_stays_misread():
    assert ParseError.kind == "misread"
    assert type(read_step("thought", "misread", {"problem": "not a number"})) is ParseError


def test_too_many_misreadings_are_the_agents_error():
    chat = ChatAgent(parse=lambda text: Guess(number=int(text)), misreads=1)
    tape = run(chat, GuessNumber(), 7, engine=ScriptedEngine(["a", "b"]))
    assert (tape.status, tape.cause.type, tape.cause.error) == (Status.ERROR, CauseType.AGENT, "TooManyParseErrors")
    assert "'b'" in tape.cause.message


@pytest.mark.ledger("X11")
@pytest.mark.parametrize(
    "answer",
    [
        '{"name": "w_guess", "arguments": {"number": 7}}',
        'I say <tool_call>\n{"name": "w_guess", "arguments": "{\\"number\\": 7}"}\n</tool_call>',
    ],
)
def test_action_classes_are_tools(answer):
    offered: list[Any] = []

    def model(request: Request) -> str:
        offered.append(request.tools)
        return answer

    tape = run(ChatAgent("Play.", actions=[Guess]), GuessNumber(), 7, engine=ScriptedEngine(model))
    assert tape.status is Status.FINISHED
    assert offered[0][0]["function"]["name"] == "w_guess"
    assert offered[0][0]["function"]["parameters"]["required"] == ["number"]
    assert tape.calls[0].tools.schemas == offered[0]


def test_tools_are_spelled_out_once_per_tape():
    answers = [json.dumps({"name": "w_guess", "arguments": {"number": n}}) for n in (5, 7)]
    tape = run(ChatAgent(actions=[Guess]), GuessNumber(), 7, engine=ScriptedEngine(answers))
    first, second = (c.tools for c in tape.calls)
    assert first.hash == second.hash
    assert first.schemas is not None
    assert second.schemas is None


@pytest.mark.ledger("X11")
@pytest.mark.parametrize(
    ("answer", "problem"),
    [
        ("hello", 'w_guess, as {"name": ..., "arguments": {...}}'),
        ('{"name": "w_guess", "arguments": {"number": "x"}}', "number: "),
        ('{"name": "other", "arguments": {}}', 'w_guess, as {"name": ..., "arguments": {...}}'),
        ('<tool_call>{"name": "other", "arguments": {}}</tool_call>', "'other'"),
        ('{"name": "w_guess", ', "line 1 column "),
        ("[1]", '{"name": ..., "arguments": {...}}'),
        ('<tool_call>{"arguments": 3}</tool_call>', '"name" and "arguments"'),
    ],
)
def test_what_was_wrong_is_told(answer, problem):
    engine = ScriptedEngine([answer, '{"name": "w_guess", "arguments": {"number": 7}}'])
    tape = run(ChatAgent(actions=[Guess]), GuessNumber(), 7, engine=engine)
    assert tape.status is Status.FINISHED
    assert problem in str(tape[1])


def test_parallel_tool_calls_are_one_action_and_their_results_one_observation():
    class Tools(Environment[ToolCalls]):
        async def reset(self, task: str) -> Text:
            return Text(text=task)

        async def step(self, action: ToolCalls) -> Outcome:
            results = tuple(ToolResult(id=c.id, name=c.name, content=str(c.arguments["x"])) for c in action.calls)
            return Outcome(ToolResults(results=results), reward=1.0, truncated=len(results) == 1)

    calls = tuple(
        {"id": f"c{k}", "type": "function", "function": {"name": "f", "arguments": f'{{"x": {k}}}'}} for k in (1, 2)
    )

    class Parsed:
        name, renderer, context = "parsed", None, None
        can: frozenset[Capability] = frozenset()
        asked: list[Request] = []  # noqa: RUF012

        async def complete(self, request: Request) -> Completion:
            self.asked.append(request)
            return Completion(text="", tool_calls=calls if len(self.asked) == 1 else calls[:1], finish="tool_calls")

        def forget(self, cache_key: str) -> None:
            pass

        async def close(self) -> None:
            pass

    engine = Parsed()
    schema = {
        "type": "function",
        "function": {"name": "f", "description": "", "parameters": {"type": "object", "properties": {}}},
    }
    tape = run(ChatAgent(actions=[ToolCalls], tools=[schema]), Tools(), "go", engine=engine)
    assert tape.status is Status.TRUNCATED
    roles = [(m["role"], m["content"]) for m in engine.asked[1].messages]
    assert roles == [("user", "go"), ("assistant", ""), ("tool", "1"), ("tool", "2")]
    assert engine.asked[1].messages[1]["tool_calls"] == list(calls)
    assert engine.asked[1].messages[2]["tool_call_id"] == "c1"


def test_a_group_shares_task_environment_seed_and_id_and_retries_once():
    made: list[float] = []

    class Dice(GuessNumber):
        async def reset(self, task: int) -> Any:
            made.append(self.rng.random())
            if len(made) == 1:
                raise ValueError("first one breaks")
            return await super().reset(task)

    tapes = asyncio.run(
        rollout_group(Player(), Dice, EpisodeSpec.of(7, seed=1), n=4, engine=ScriptedEngine(lambda r: "7"))
    )
    assert len(tapes) == 5
    assert len(set(made)) == 1
    assert sum(t.trains for t in tapes) == 4
    assert len({t.begin.group for t in tapes}) == 1
    assert len({t.begin.seed for t in tapes}) == 5
    assert sorted(t.begin.attempt for t in tapes if t.trains) == [0, 1, 2, 3]


def test_replay_gives_the_recorded_answers_and_finds_a_changed_prompt():
    tape = run(Player(), GuessNumber(), 7, engine=ScriptedEngine(["5", "8", "7"]), seed=4)
    engine = ReplayEngine(tape)
    again = run(Player(), GuessNumber(), 7, engine=engine, seed=4)
    assert list(again) == list(tape)
    assert engine.left == 0

    class Other(Player):
        async def act(self, tape: Any, llm: Any) -> Any:
            reply = await llm(tape, system="Guess the number!")
            yield Guess(number=int(reply.text))

    bad = run(type("Player", (Other,), {})(), GuessNumber(), 7, engine=ReplayEngine(tape), seed=4)
    assert (bad.status, bad.cause.type) == (Status.ERROR, CauseType.MODEL)
    assert "`messages[0].content`" in bad.cause.message
    longer = run(Player(), GuessNumber(), 9, engine=ReplayEngine(tape), seed=4)
    assert "`messages[5].content`" in longer.cause.message
    assert "'lower'" in longer.cause.message
    assert "'higher'" in longer.cause.message
    assert issubclass(Diverged, EngineError)


def test_a_call_in_a_thought_that_the_prompt_opened_is_not_made():
    """DeepSeek's template ends a prompt with `<think>`: an answer that is cut off in the thought has no mark of it."""
    call = '{"name": "w_guess", "arguments": {"number": 7}}'
    model = ScriptedEngine([f"<tool_call>{call}</tool_call>", f"no.</think>{call}"], renderer=Renderer(tokenizer("r1")))
    tape = run(ChatAgent(actions=[Guess]), GuessNumber(), 7, engine=model)
    assert [type(s) for s in tape[1:]] == [ParseError, Guess]


class Named(Action):
    x: int


@pytest.mark.parametrize(
    ("more", "says"),
    [
        ({"max_tokens": 0}, r"ChatAgent\(\): max_tokens is 0"),
        ({"max_tokens": -1}, "max_tokens is -1"),
        ({"temperature": -1.0}, "temperature is -1"),
        ({"temperature": float("nan")}, "temperature is nan"),
        ({"tools": [{}]}, "can't be offered"),
        ({"tools": [{"type": "function"}]}, "can't be offered"),
        ({"name": ""}, "agent name '' is invalid"),
        ({"name": "a/b"}, "agent name 'a/b' is invalid"),
        ({"name": "env"}, "agent name 'env' is invalid"),
        ({"actions": [Named, Named]}, "two of the `actions`"),
    ],
)
def test_arguments_that_no_call_could_use_are_refused_at_once(more: dict[str, Any], says: str):
    with pytest.raises(UsageError, match=says):
        ChatAgent(**more)


def test_an_agent_that_wants_calls_where_no_tool_is_offered_says_what_to_do():
    tape = run(ChatAgent(actions=[ToolCalls]), GuessNumber, 7, engine=ScriptedEngine(["left"] * 3))
    assert tape.cause is not None
    assert re.search(r"no tool is offered.*ToolEnvironment.*`tools`.*plain=Answer", str(tape.cause.message))
    assert "call of one of: ," not in str(tape.messages())


def test_a_function_that_does_not_yield_asynchronously_is_no_agent():
    async def returns(tape: Any, llm: Any) -> Any:
        return Answer(text=(await llm(tape)).text)

    def sync(tape: Any, llm: Any) -> Any:
        yield Answer(text="x")

    for function in (returns, sync):
        with pytest.raises(UsageError, match=rf"{function.__name__} must be `async def` with `yield`"):
            agent(function)
