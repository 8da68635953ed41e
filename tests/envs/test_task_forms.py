"""The question in tasks of every form: what the model reads, what the run says, and what is refused."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

import tapereel as tr
from tapereel.agents import ChatAgent, ScriptedEngine, rollout
from tapereel.envs.adapters import ToolEnvironment, TRLEnvironment
from tapereel.tapes import Answer, Picture, Tape, Task, ToolCalls
from tapereel.tapes.errors import UsageError
from tapereel.tapes.pictures import visuals_of

from ..agents.picture_worlds import square
from ..agents.rendering.templates_table import page
from .task_forms import BEGIN, ENVIRONMENTS, FORMS, PAGE, Asked, read, table

AGENT = ChatAgent(actions=[ToolCalls], plain=Answer)


def test_the_page_shows_what_the_model_reads() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert page(text, table(), begin=BEGIN, name=str(PAGE)) == text, "run python -m tests.envs.task_forms"


@pytest.mark.parametrize("form", FORMS)
def test_the_model_reads_a_question_or_the_run_does_not_begin(form: str) -> None:
    for env in ENVIRONMENTS.values():
        asked = read(env, FORMS[form])
        assert asked is None or (asked and all(text.partition(": ")[2] not in ("", "null") for text in asked))


@pytest.mark.parametrize("env", ENVIRONMENTS)
def test_a_refused_task_is_named_and_nothing_is_written(env: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"task 1 .*\{'a': 6\}.*question.*`prompt`"):
        tr.run(AGENT, ENVIRONMENTS[env], ["6*7?", {"a": 6}], ["42"], out=tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_refused_held_out_task_ends_no_training_half_way(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    model = tr.save_tiny_model(tmp_path / "model", size="micro")
    with pytest.raises(UsageError, match=r"task 0 .*\b7\b.*`prompt`"):
        tr.train(AGENT, Asked, ["6*7?"], model, out=tmp_path / "run", settings={"evaluation.tasks": [7]})
    assert not (tmp_path / "run").exists()


def test_a_run_says_once_which_keys_the_model_reads(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    rows = [{"question": f"6*{n}?", "choices": [n, 6 * n], "solution": 6 * n} for n in range(3)]
    made = tr.run(AGENT, Asked, rows, ["42"], out=tmp_path / "run")
    (said,) = caplog.messages
    assert all(word in said for word in ("'question'", "'choices'", "'solution' (the answer)"))
    assert [tape.begin.task for tape in made.tapes()] == [Task.of(row) for row in rows]
    assert [tape.begin.task.expected for tape in made.tapes()] == [0, 6, 12]


def test_an_environment_that_shows_the_task_itself_takes_any(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    class Own(Asked):
        async def prompt(self, task: Task) -> list[dict[str, Any]]:
            return [{"role": "system", "content": "Guess."}, {"role": "user", "content": "A number?"}]

    class Reset(Asked):
        async def reset(self, task: Any) -> Any:
            return await super().reset(f"Guess below {task + 1}.")

    for k, (env, asked) in enumerate(((Own, ["Guess.", "A number?"]), (Reset, ["Guess below 8."]))):
        (tape,) = tr.run(AGENT, env, [7], ["7"], out=tmp_path / str(k)).tapes()
        assert [message["content"] for message in tape.messages()[:-1]] == asked
    assert caplog.messages == []


def play(env: Any, task: Any) -> Tape:
    return asyncio.run(rollout(AGENT, env, task, engine=ScriptedEngine(["42"])))


@pytest.mark.parametrize(("own", "shown"), [(False, 1), (True, 0)])
def test_an_own_prompt_keeps_the_pictures_of_a_plain_value_secret(own: bool, shown: int) -> None:
    class Own(Asked):
        async def prompt(self, task: Task) -> str:
            return "What do you see?"

    tape = play(Own if own else Asked, {"question": "A cat?", "image": Picture.of(square(0))})
    assert len(visuals_of(tape[0])) == shown


class Silent:
    def reset(self, **_: Any) -> None:
        return None


class Asking:
    def reset(self, **_: Any) -> str:
        return "6*7?"


@pytest.mark.parametrize(("factory", "status"), [(Asking, "finished"), (Silent, "error"), (None, "error")])
def test_only_a_prompt_of_none_lets_reset_ask(factory: Any, status: str) -> None:
    tape = play(lambda: TRLEnvironment(factory), {"prompt": None, "n": 1})
    assert tape.status == status
    if status == "finished":
        assert tape.messages()[0]["content"] == "6*7?"


def test_a_reward_function_of_trl_gets_the_question_as_the_prompt() -> None:
    def seen(prompts: list[Any], completions: list[str], **columns: Any) -> list[float]:
        got.append((prompts[0], completions[0], sorted(columns)))
        return [1.0]

    got: list[Any] = []
    for task in ("6*7?", {"question": "6*7?", "answer": "42"}):
        tape = play(lambda: TRLEnvironment(rewards=[seen]), task)
        assert tape.reward == 1.0
    given = ["completion_ids", "log_extra", "log_metric"]
    assert [(prompt, answer) for prompt, answer, _ in got] == [("6*7?", "42")] * 2
    assert [[name for name in names if name not in given] for *_, names in got] == [[], ["answer", "question"]]


def test_a_task_that_no_episode_can_begin_with_is_refused_by_the_users_own_check(tmp_path: Path) -> None:
    class Even(ToolEnvironment):
        def __init__(self) -> None:
            super().__init__(())

        def check_task(self, task: Task) -> None:
            if task.private == 3:
                raise ValueError("3 isn't even")

    with pytest.raises(UsageError, match=r"task 1 .*3 isn't even"):
        tr.run(AGENT, Even, [2, 3], ["1"], out=tmp_path / "run")
