"""Classes and functions written for TRL, unchanged, as environment and rewards."""

from __future__ import annotations

import asyncio
import json
import re
import sqlite3
from collections.abc import Callable
from typing import Any

import pytest

from tapereel.agents import ChatAgent, EmbeddedEngine, EpisodeSpec, Limits, Request, ScriptedEngine, rollout
from tapereel.agents.engines.embedded import char_tokenizer
from tapereel.agents.engines.embedded.tiny_model import tiny_model
from tapereel.agents.rendering import Renderer
from tapereel.envs import Outcome, Rewards, Taskset
from tapereel.envs.adapters import TRLEnvironment, trl_reward, trl_row
from tapereel.envs.adapters.trl import completion_ids
from tapereel.envs.rewards import rewarded
from tapereel.tapes import Answer, NotATape, Status, Tape, Text, ToolCalls
from tapereel.tapes.errors import BadArgument

# -- as somebody wrote them for GRPOTrainer ---------------------------------------------------------------------------


class WordGame:
    """Guess a word, letter by letter."""

    def reset(self, **kwargs) -> str | None:
        self.word, self.found = kwargs["word"], set()
        return f" It has {len(self.word)} letters."

    def guess(self, letter: str) -> str:
        """
        Guess a letter.

        Args:
            letter: The letter to guess.

        Returns:
            Where it stands in the word.
        """
        if len(letter) != 1:
            raise ValueError("one letter at a time")
        self.found.add(letter)
        return "".join(c if c in self.found else "_" for c in self.word)

    def get_reward(self) -> float:
        return len(self.found & set(self.word)) / len(set(self.word))

    def _hidden(self) -> str:
        return self.word


class Silent:
    def reset(self, **kwargs) -> None:
        return None


def exact(prompts, completions, word, **kwargs) -> list[float]:
    assert prompts[0][0]["role"] == "system"
    return [float(c[-1]["content"] == w) for c, w in zip(completions, word, strict=True)]


async def polite(completions, **kwargs) -> list[float | None]:
    return [None if "?" in c[-1]["content"] else 0.5 for c in completions]


def calls(completions, log_metric, log_extra, trainer_state=None) -> list[float]:
    assert trainer_state is None
    log_metric("calls", 1.0)
    log_extra("said", [c[-1]["content"] for c in completions])
    return [float(sum("tool_calls" in m for m in c)) for c in completions]


def long(completion_ids, **kwargs) -> list[float]:
    """The first example of TRL's documentation."""
    assert "trainer_state" not in kwargs
    return [float(len(ids)) for ids in completion_ids]


def late(completions, trainer_state, **kwargs) -> list[float]:
    return [float(trainer_state.global_step) for _ in completions]


def found(environments, completions) -> list[float]:
    return [float(len(environment.found)) for environment in environments]


def unsure(completions, **kwargs) -> list[float]:
    return [float("nan") for _ in completions]


# ---------------------------------------------------------------------------------------------------------------------

ROW = {"prompt": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Guess."}], "word": "ada"}


def says(*answers: str | tuple[str, ...]) -> ScriptedEngine:
    """A tuple is calls of `guess` with these letters."""

    def answer(request: Request) -> str:
        said = answers[sum(m["role"] == "assistant" for m in request.messages)]
        if isinstance(said, str):
            return said
        return "".join(
            f"<tool_call>{json.dumps({'name': 'guess', 'arguments': {'letter': letter}})}</tool_call>"
            for letter in said
        )

    return ScriptedEngine(answer)


def play(engine: ScriptedEngine, env: Callable[[], TRLEnvironment], row: dict[str, Any] = ROW) -> Tape:
    agent = ChatAgent(actions=[ToolCalls], plain=Answer)
    return asyncio.run(rollout(agent, env, trl_row(row), engine=engine))


def test_an_environment_class_and_its_reward_functions() -> None:
    tape = play(says(("a", "zz"), "ada"), lambda: TRLEnvironment(WordGame, rewards=[exact, polite, calls]))
    assert tape.status is Status.FINISHED, tape.cause
    assert [m["role"] for m in tape.messages(path="agent")] == [
        "system",
        "user",
        "assistant",
        "tool",
        "tool",
        "assistant",
    ]
    assert tape.messages(path="agent")[1]["content"] == "Guess. It has 3 letters."
    (results,) = [step.results for step in tape if step.kind == "tool_results"]  # type: ignore[attr-defined]
    assert [(r.content, r.error) for r in results] == [("a_a", False), ("ValueError: one letter at a time", True)]
    assert {reward.name: reward.value for reward in tape.rewards} == {
        "WordGame": 0.5,
        "exact": 1.0,
        "polite": 0.5,
        "calls": 1.0,
    }
    assert tape.rewards[-1].evidence == {"metrics": {"calls": 1.0}, "extra": {"said": ["ada"]}}
    assert tape.begin.env.config["rewards"] == ["exact", "polite", "calls"]


def test_the_tools_are_the_public_methods_with_their_descriptions() -> None:
    tape = play(says("?"), lambda: TRLEnvironment(WordGame))
    (tool,) = tape[0].tools
    function = tool["function"]
    assert (function["name"], function["description"]) == ("guess", "Guess a letter.")
    assert function["parameters"]["properties"] == {"letter": {"type": "string", "description": "The letter to guess."}}


def test_none_is_no_score() -> None:
    tape = play(says("?"), lambda: TRLEnvironment(Silent, rewards=[polite]))
    assert tape.reward is None
    assert tape.status is Status.FINISHED


def test_the_answers_stay_hidden_from_the_agent() -> None:
    seen: list[str] = []

    def answer(request: Request) -> str:
        seen.append(json.dumps(list(request.messages)) + json.dumps(request.tools))
        return "x"

    play(ScriptedEngine(answer), lambda: TRLEnvironment(WordGame), {**ROW, "word": "canary"})
    assert seen
    assert "canary" not in seen[0]
    assert "_hidden" not in seen[0]


def test_a_row_chooses_its_environment() -> None:
    tape = play(says("x"), lambda: TRLEnvironment({"a": Silent, "b": WordGame}), {**ROW, "environment": "b"})
    assert [reward.name for reward in tape.rewards] == ["WordGame"]
    tape = play(says("x"), lambda: TRLEnvironment({"a": Silent}), {**ROW, "environment": "z"})
    assert tape.cause is not None
    assert tape.cause.message == "the row names the environment 'z'; there are 'a'"


def test_a_prompt_of_text_gives_completions_of_text() -> None:
    def length(prompts: list[str], completions: list[str], **_: Any) -> list[float]:
        assert prompts == ["How?"]
        return [float(len(c)) for c in completions]

    tape = play(says("four"), lambda: TRLEnvironment(rewards=[length]), {"prompt": "How?"})
    assert tape.reward == 4.0


def test_a_completion_of_text_is_all_that_followed_the_prompt() -> None:
    def seen(completions: list[str], **_: Any) -> list[float]:
        got.extend(completions)
        return [1.0]

    got: list[str] = []
    env, agent = lambda: TRLEnvironment(WordGame, rewards=[seen]), ChatAgent(actions=[ToolCalls], plain=Answer)
    asyncio.run(rollout(agent, env, trl_row({**ROW, "prompt": "Guess."}), engine=says(("a",)), limits=Limits(turns=1)))
    call = '<tool_call>{"name": "guess", "arguments": {"letter": "a"}}</tool_call>'
    assert got == [f"{call}\na_a"], "never the tool's result alone"


def test_a_completion_has_what_the_model_wrote_beside_its_calls() -> None:
    def seen(prompts: list[Any], completions: list[Any], **_: Any) -> list[float]:
        got.append((prompts[0], completions[0]))
        return [1.0]

    def spoken(content: str, **more: Any) -> dict[str, Any]:
        return {"role": "assistant", "content": content, **more}

    got: list[Any] = []
    env, agent = lambda: TRLEnvironment(WordGame, rewards=[seen]), ChatAgent(actions=[ToolCalls], plain=Answer)
    call, broken = (
        '<tool_call>{"name": "guess", "arguments": {"letter": "a"}}</tool_call>',
        "Hm. <tool_call>{</tool_call>",
    )
    answers = [f"<think>\nso\n</think>\n\nAn a? {call}", broken, "<think>yes</think>\n\nada"]
    asyncio.run(rollout(agent, env, trl_row(ROW), engine=ScriptedEngine(answers)))
    ((prompt, completion),) = got
    assert prompt == [ROW["prompt"][0], {"role": "user", "content": "Guess. It has 3 letters."}]
    guess = {"type": "function", "function": {"name": "guess", "arguments": {"letter": "a"}}}
    assert completion[:3] == [
        spoken("An a?", reasoning_content="so", tool_calls=[guess]),
        {"role": "tool", "name": "guess", "content": "a_a"},
        spoken(broken),
    ]
    assert [completion[3]["role"], *completion[4:]] == ["user", spoken("ada", reasoning_content="yes")]

    asyncio.run(rollout(agent, env, trl_row(ROW), engine=ScriptedEngine([call, *[broken] * 3])))
    assert got[1][1][2::2] == [spoken(broken)] * 3, "the last one ends the episode"
    engine = ScriptedEngine(["ada"], renderer=Renderer(char_tokenizer()))
    asyncio.run(rollout(agent, env, trl_row(ROW), engine=engine, limits=Limits(context=8)))
    assert got[2][1] == [spoken("")], "an episode without an answer"


@pytest.mark.parametrize("column", ["completions", "prompts", "log_metric", "log_extra", "environments"])
def test_a_column_never_replaces_what_a_reward_function_gets(column: str) -> None:
    def right(completions: list[str], word: list[str], **_: Any) -> list[float]:
        return [float(c == w) for c, w in zip(completions, word, strict=True)]

    tape = play(says("WRONG"), lambda: TRLEnvironment(rewards=[right]), {"prompt": "q", column: "2", "word": "2"})
    assert tape.reward is None
    assert column in str(tape.cause)


def test_a_column_without_a_value_is_passed_as_none() -> None:
    def right(completions: list[str], answer: list[str | None], hint: Any = "none", **_: Any) -> list[float]:
        got.append((answer, hint))
        return [1.0]

    got: list[Any] = []
    tape = play(says("4"), lambda: TRLEnvironment(rewards=[right]), {"prompt": "q", "answer": None, "hint": None})
    assert tape.reward == 1.0, tape.cause
    assert got == [([None], [None])]


def test_a_row_has_the_same_reward_with_and_without_trl_row() -> None:
    def right(prompts: list[str], completions: list[str], answer: list[str], **_: Any) -> list[float]:
        got.append((prompts, completions))
        return [float(c == a) for c, a in zip(completions, answer, strict=True)]

    got: list[Any] = []
    row, agent = {"prompt": "1+2?", "answer": "3"}, ChatAgent(actions=[ToolCalls], plain=Answer)
    for task in (row, trl_row(row)):
        env = lambda: TRLEnvironment(rewards=[right])  # noqa: E731
        assert asyncio.run(rollout(agent, env, task, engine=says("3"))).reward == 1.0
    assert got == [(["1+2?"], ["3"])] * 2


def test_recorded_tapes_are_scored_by_a_reward_function_later() -> None:
    tape = play(says(("a",), "ada"), lambda: TRLEnvironment(WordGame))
    source = trl_reward(exact, weight=2.0)
    assert (source.name, source.weight) == ("exact", 2.0)
    (record,) = asyncio.run(Rewards([source]).score(tape, layer="later"))
    assert (record.name, record.value, record.weight) == ("exact", 1.0, 2.0)


def sampled(env: Callable[[], TRLEnvironment], **options: Any) -> Tape:
    """An episode of a model with tokens, which says anything."""

    async def episode() -> Tape:
        tokenizer = char_tokenizer()
        engine = EmbeddedEngine(tiny_model(tokenizer, "micro"), Renderer(tokenizer), version="run:0", slots=2)
        try:
            agent = ChatAgent(parse=lambda text: Answer(text=text), max_tokens=6)
            return await rollout(agent, env, trl_row(ROW), engine=engine, **options)
        finally:
            await engine.close()

    return asyncio.run(episode())


class Twice(TRLEnvironment):
    """Wants two answers, with a word of its own between them."""

    async def step(self, action: Any) -> Outcome:
        outcome = await super().step(action)
        self.again = not getattr(self, "again", False)
        return Outcome(observation=Text(text="Go on."), metrics=outcome.metrics) if self.again else outcome


def test_a_reward_function_gets_the_ids_that_were_sampled_after_the_prompt() -> None:
    tape = sampled(lambda: TRLEnvironment(rewards=[long]))
    assert tape.reward == len(tape.calls[0].completion or ()) > 0, tape.cause
    (record,) = asyncio.run(Rewards([trl_reward(long)]).score(tape, layer="later"))
    assert record.value == tape.reward


def test_the_ids_of_several_turns_are_one_sequence_with_what_was_said_between() -> None:
    tape = sampled(lambda: Twice(rewards=[long]), seed=3)
    first, last = tape.calls
    whole = [*last.prompt, *(last.completion or ())]
    assert completion_ids(tape) == whole[len(first.prompt) :]
    assert len(completion_ids(tape)) > len(first.completion or ()) + len(last.completion or ())
    assert tape.reward == len(completion_ids(tape))
    fork = asyncio.run(
        rollout(
            ChatAgent(parse=lambda text: Answer(text=text)),
            lambda: Twice(),
            EpisodeSpec.of(trl_row(ROW), fork=tape.at_turn(1)),
            engine=ScriptedEngine(["first", "x"]),
        )
    )
    with pytest.raises(NotATape, match=rf"{fork.id}.*\bids\b"):
        completion_ids(fork)


@pytest.mark.parametrize(
    ("function", "sentence"),
    [
        (long, r"\blong\b.*`completion_ids`.*\bcall\b"),
        (late, r"\blate\b.*`trainer_state`.*TRL"),
    ],
)
def test_what_a_function_asks_for_and_is_not_there_is_named_and_never_none(function: Any, sentence: str) -> None:
    tape = play(says("ada"), lambda: TRLEnvironment(rewards=[function]))
    assert tape.reward is None
    assert tape.cause is not None
    assert re.search(sentence, tape.cause.message or "")


def test_the_environments_are_given_while_the_episode_runs_and_refused_by_name_later() -> None:
    tape = play(says(("a",), "ada"), lambda: TRLEnvironment(WordGame, rewards=[found]))
    assert {reward.name: reward.value for reward in tape.rewards} == {"WordGame": 0.5, "found": 1.0}
    (record,) = asyncio.run(Rewards([trl_reward(found)]).score(tape, layer="later"))
    assert record.failed
    assert "`environments`" in str(record.evidence)


def test_nan_is_no_score_either() -> None:
    tape = play(says("x"), lambda: TRLEnvironment(rewards=[unsure]))
    assert (tape.reward, tape.status) == (None, Status.FINISHED)


def test_rewards_that_a_run_names_come_beside_those_of_the_instance() -> None:
    def brief(tape: Tape) -> float:
        return 0.25

    made = rewarded(lambda: TRLEnvironment(rewards=[polite]), Rewards([brief]))
    tape = play(says("x"), made)  # type: ignore[arg-type]
    assert {reward.name: reward.value for reward in tape.rewards} == {"polite": 0.5, "brief": 0.25}


@pytest.mark.parametrize(
    ("row", "sentence"),
    [
        ({"goal": 1}, "`prompt`.*'goal'"),
        ({}, r"`prompt`.*\{\}"),
        ([1], r"`prompt`.*\[1\]"),
        ({"prompt": 5}, r"\b5\b.*`role`"),
        ({"prompt": []}, r"\[\].*`role`"),
        ({"prompt": [{"role": "user"}]}, r"\[\{'role': 'user'\}\].*`content`"),
    ],
)
def test_a_row_without_a_prompt_is_refused_where_it_is_written(row: Any, sentence: str) -> None:
    with pytest.raises(BadArgument, match=sentence):
        trl_row(row)
    assert trl_row({"prompt": None, "goal": 1}).public == {"prompt": None}


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ([0.1, 0.2], r"BadArgument: .*\[0\.1, 0\.2\]"),
        (0.5, r"BadArgument: .*\b0\.5\b"),
    ],
)
def test_a_function_that_breaks_the_contract_ends_the_episode_unscored(given: Any, sentence: str) -> None:
    def wrong(completions: Any, **_: Any) -> Any:
        return given

    tape = play(says("x"), lambda: TRLEnvironment(rewards=[wrong]))
    assert tape.reward is None
    assert tape.cause is not None
    assert tape.cause.type == "environment"
    assert re.search(sentence, tape.cause.message or "")


def test_what_is_no_environment_class_is_named() -> None:
    class Bare:
        pass

    class Painter:
        def reset(self, **_: Any) -> Any:
            return [{"type": "image"}]

    tape = play(says("x"), lambda: TRLEnvironment(Bare))
    assert tape.cause is not None
    assert re.search("Bare.*`reset`", tape.cause.message or "")
    tape = play(says("x"), lambda: TRLEnvironment(Painter))
    assert tape.cause is not None
    assert re.search(r"Painter\.reset.*\blist\b", tape.cause.message or "")


def test_rows_become_tasks() -> None:
    tasks = Taskset([ROW, {**ROW, "word": "bob"}], row=trl_row)
    assert [task.private for task in tasks] == [{"word": "ada"}, {"word": "bob"}]
    assert tasks[0].public == {"prompt": ROW["prompt"]}


class Rows:
    def __init__(self) -> None:
        self.db = sqlite3.connect(":memory:")

    def reset(self, **kwargs: Any) -> None:
        self.db.execute("create table t (x)")

    def add(self) -> str:
        """Add a row."""
        self.db.execute("insert into t values (1)")
        return "added"

    def get_reward(self) -> float:
        return self.db.execute("select count(*) from t").fetchone()[0]

    def close(self) -> None:
        self.db.close()


def test_an_environment_class_is_made_reset_called_and_closed_in_one_thread():
    call = '<tool_call>{"name": "add", "arguments": {}}</tool_call>'
    row = {"prompt": "Add two rows."}
    agent = ChatAgent(actions=[ToolCalls], plain=Answer)
    tape = asyncio.run(rollout(agent, TRLEnvironment(Rows), trl_row(row), engine=ScriptedEngine([call + call, "done"])))
    assert (tape.status, tape.reward, tape.cause) == (Status.FINISHED, 2.0, None)
