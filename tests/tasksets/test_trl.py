"""Classes and functions written for TRL, unchanged, as environment and rewards."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

import pytest

from tapereel.agents import ChatAgent, Request, ScriptedEngine, rollout
from tapereel.envs import Taskset
from tapereel.envs.trl import TRLEnvironment, trl_reward, trl_row
from tapereel.finetune.trl_prompts import Ask, Asked
from tapereel.tapes import Answer, Status, Tape, Task, ToolCalls

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


def calls(completions, trainer_state, log_metric) -> list[float]:
    log_metric("calls", 1.0)
    return [float(sum("tool_calls" in m for m in c)) for c in completions]


# ---------------------------------------------------------------------------------------------------------------------

ROW = {"prompt": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Guess."}], "word": "ada"}


def says(*answers: str | tuple[str, ...]) -> ScriptedEngine:
    """A tuple is calls of `guess` with these letters."""

    def answer(request: Request) -> str:
        said = answers[sum(m["role"] == "assistant" for m in request.messages)]
        if isinstance(said, str):
            return said
        return "".join(f"<tool_call>{json.dumps({'name': 'guess', 'arguments': {'letter': letter}})}</tool_call>"
                       for letter in said)  # fmt: skip

    return ScriptedEngine(answer)


def play(engine: ScriptedEngine, env: Callable[[], TRLEnvironment], row: dict[str, Any] = ROW) -> Tape:
    agent = ChatAgent(actions=[ToolCalls], plain=Answer)
    return asyncio.run(rollout(agent, env, trl_row(row), engine=engine))


def test_an_environment_class_and_its_reward_functions() -> None:
    tape = play(says(("a", "zz"), "ada"), lambda: TRLEnvironment(WordGame, rewards=[exact, polite, calls]))
    assert tape.status is Status.FINISHED, tape.cause
    assert [m["role"] for m in tape.messages(path="agent")] == ["system", "user", "assistant", "tool", "tool",
                                                                  "assistant"]  # fmt: skip
    assert tape.messages(path="agent")[1]["content"] == "Guess. It has 3 letters."
    (results,) = [step.results for step in tape if step.kind == "tool_results"]  # type: ignore[attr-defined]
    assert [(r.content, r.error) for r in results] == [("a_a", False), ("ValueError: one letter at a time", True)]
    found = {reward.name: reward.value for reward in tape.rewards}
    assert found == {"WordGame": 0.5, "exact": 1.0, "polite": 0.5, "calls": 1.0}


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
    assert tape.cause.message == "the row asks for the environment 'z'; there are 'a'"


def test_a_prompt_of_text_gives_completions_of_text() -> None:
    def length(prompts: list[str], completions: list[str], **_: Any) -> list[float]:
        assert prompts == ["How?"]
        return [float(len(c)) for c in completions]

    tape = play(says("four"), lambda: TRLEnvironment(rewards=[length]), {"prompt": "How?"})
    assert tape.reward == 4.0


def test_recorded_tapes_are_scored_by_a_reward_function_later() -> None:
    tape = play(says(("a",), "ada"), lambda: TRLEnvironment(WordGame))
    source = trl_reward(exact, weight=2.0)
    assert (source.name, source.weight) == ("exact", 2.0)
    assert asyncio.run(source.score(tape)) == 1.0  # type: ignore[arg-type]


@pytest.mark.parametrize(("given", "sentence"), [
    ([0.1, 0.2], "gave [0.1, 0.2] for one completion"), (0.5, "gave 0.5 for one completion"),
])  # fmt: skip
def test_a_function_that_breaks_the_contract_ends_the_episode_unscored(given: Any, sentence: str) -> None:
    def wrong(completions: Any, **_: Any) -> Any:
        return given

    tape = play(says("x"), lambda: TRLEnvironment(rewards=[wrong]))
    assert tape.reward is None
    assert tape.cause is not None
    assert tape.cause.type == "environment"
    assert sentence in (tape.cause.message or "")


def test_what_is_no_environment_class_is_named() -> None:
    class Bare:
        pass

    class Painter:
        def reset(self, **_: Any) -> Any:
            return [{"type": "image"}]

    tape = play(says("x"), lambda: TRLEnvironment(Bare))
    assert tape.cause is not None
    assert "Bare has no method `reset`" in (tape.cause.message or "")
    tape = play(says("x"), lambda: TRLEnvironment(Painter))
    assert tape.cause is not None
    assert "reset gave list, and only a text, or None, can be recorded" in (tape.cause.message or "")


def test_rows_become_tasks() -> None:
    tasks = Taskset([ROW, {**ROW, "word": "bob"}], row=trl_row)
    assert [task.private for task in tasks] == [{"word": "ada"}, {"word": "bob"}]
    assert tasks[0].public == {"prompt": ROW["prompt"]}


@pytest.mark.parametrize("prompt", ["Just text", [], [{"role": "user"}], None])
def test_a_recorder_s_prompt_is_a_list_of_chat_messages(prompt: Any) -> None:
    tape = asyncio.run(rollout(Ask(), Asked(), Task(public={"prompt": prompt}), engine=says("x")))
    assert tape.cause is not None
    assert (tape.cause.error, tape.cause.type) == ("BadPrompt", "environment")
    assert 'write [{"role": "user", "content": "..."}]' in (tape.cause.message or "")


def test_a_recorder_s_episode_is_one_question_as_it_stands() -> None:
    seen: list[Any] = []

    def answer(request: Request) -> str:
        seen.extend(request.messages)
        return "yes"

    tape = asyncio.run(rollout(Ask(), Asked(), trl_row(ROW), engine=ScriptedEngine(answer)))
    assert seen == ROW["prompt"]
    assert (tape.status, tape.reward, tape.calls[0].by) == (Status.FINISHED, None, "policy")
