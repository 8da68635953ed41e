"""`tapereel.run`, `.evaluate`, `.train`, `.open` with objects: in a script, in a notebook, with wrong arguments."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import tapereel as tr
from tapereel.agents.engines.team_engine import UnknownAgent
from tapereel.finetune.api import public
from tapereel.tapes import Answer
from tapereel.tapes.errors import BadArgument, UsageError

from ...tapes.common.test_config import VALUES
from ...toy_envs import Echo


class Guess(tr.Environment):
    """Right when the text is the task's number."""

    async def reset(self, task: int) -> str:
        self.secret = str(task)
        return "Which number?"

    async def step(self, action: tr.Action) -> tr.Outcome:
        right = str(action) == self.secret
        return tr.Outcome("yes" if right else "no", reward=float(right), terminated=right)


TWO_TURNS = {"limits.turns": 2}


def played(path: Path, **more: object) -> tr.Run:
    settings = {"settings": TWO_TURNS, "out": path, **more}
    return tr.run(tr.ChatAgent("Guess."), Guess, tasks=[7, 2], model=["5", "7"], **settings)  # type: ignore[arg-type]


def test_a_run_takes_objects_and_answers_questions(tmp_path: Path):
    run = played(tmp_path / "run")
    assert [tape.reward for tape in run] == [1.0, 0.0]
    assert run.reward == 0.5
    assert [str(step) for step in run.tapes()[0]] == ["Which number?", "5", "no", "7", "yes"]
    assert run.summary is not None
    assert run.summary.episodes == 2
    assert run.verify().verdict == "holds"
    assert run.audit().holds
    assert str(run.audit()).endswith("every one accounted for")


def test_a_replay_of_objects_needs_no_name(tmp_path: Path):
    run = played(tmp_path / "run")
    assert run.replay().counts == {"verified": 2, "diverged": 0, "unverifiable": 0}
    other = tr.open(run.path).replay(tr.ChatAgent("Guess better."))
    assert other.counts == {"verified": 0, "diverged": 2, "unverifiable": 0}
    assert [run.verify().verdict, run.replay().verdict, other.verdict] == ["holds", "holds", "broken"]


def test_a_branch_is_recorded_in_the_run(tmp_path: Path):
    run = played(tmp_path / "run")
    lost = next(tape for tape in run if tape.reward == 0)
    (again,) = run.branch(lost, 1, model=["5", "2"])
    assert [str(step) for step in again][-2:] == ["2", "yes"]
    assert again.id in [tape.id for tape in run.tapes("branch")]


class Remembers(tr.Agent):
    """Answers with every task that this instance has seen."""

    def __init__(self) -> None:
        self.seen: list[str] = []

    async def act(self, tape: tr.Tape, llm: tr.LLM):
        self.seen.append(str(tape[0]))
        yield Answer(text=" ".join(self.seen))


@pytest.mark.parametrize("make", [Remembers, lambda: Remembers()], ids=["class", "function"])
def test_a_class_or_function_makes_an_agent_for_each_episode(tmp_path: Path, make: Any):
    run = tr.run(make, Echo, ["a", "b", "c"], ["unused"], out=tmp_path / "run", settings={"limits.turns": 1})
    assert [str(tape.actions[0]) for tape in run] == [str(tape[0]) for tape in run]
    assert run.replay().counts["verified"] == 3
    shared = tr.run(Remembers(), Echo, ["a", "b"], ["unused"], out=tmp_path / "one", settings={"limits.turns": 1})
    assert sorted(len(str(tape.actions[0]).split()) for tape in shared) == [1, 2], "an instance is shared as before"


def test_a_factory_of_one_instance_is_refused_before_the_first_episode(tmp_path: Path):
    env = Guess()
    with pytest.raises(UsageError, match=r"Guess.*lambda: Guess"):
        tr.run(tr.ChatAgent(), env, [7], ["7"], out=tmp_path / "run")  # type: ignore[arg-type]
    with pytest.raises(UsageError, match=r"Guess again.*lambda: Guess"):
        tr.run(tr.ChatAgent(), lambda: env, [7], ["7"], out=tmp_path / "run")
    assert not list((tmp_path / "run").glob("**/*.seg*")) or len(tr.open(tmp_path / "run").tapes()) == 0


class Pair(tr.Agent):
    name = "pair"

    async def act(self, tape: tr.Tape, llm: tr.LLM):
        async for step in tr.delegate("left", tr.ChatAgent(), tape, llm):
            yield step


@pytest.mark.parametrize(
    ("path", "names"),
    [("left", "'left'.*'pair/'"), ("nosuch", "'nosuch'.*'pair/'"), ("pair/lft", "'pair/lft'.*'pair/left'")],
)
def test_a_player_for_an_agent_that_does_not_exist_is_refused(tmp_path: Path, path: str, names: str):
    def play(*agents: str, **more: Any) -> tr.Run:
        players = {"other": {"engine": {"kind": "scripted", "answers": ["7"]}, "agents": agents}}
        return tr.run(Pair(), Guess, [7], ["5"], settings={"players": players, "limits.turns": 1}, **more)

    with pytest.raises(UnknownAgent, match=names):
        play(path, out=tmp_path / "run")
    assert play("pair/left", out=tmp_path / "right").reward == play("pair", out=tmp_path / "whole").reward == 1.0


def test_it_works_inside_a_running_event_loop(tmp_path: Path):
    async def notebook() -> tr.Run:
        run = played(tmp_path / "run")
        assert run.replay().counts["verified"] == 2
        return run

    assert asyncio.run(notebook()).reward == 0.5


def test_an_evaluation_has_intervals_and_pass_at_k(tmp_path: Path):
    found = tr.evaluate(
        tr.ChatAgent(),
        Guess,
        [5, 5, 7],
        ["5"],
        out=tmp_path / "run",
        attempts=2,
        k=(1, 2),
        settings={"limits.turns": 1},
    )
    assert found.reward is not None
    assert found.reward.value == pytest.approx(0.5)
    assert set(found.pass_at) == {1, 2}


def test_a_run_is_continued_with_the_same_objects_only(tmp_path: Path):
    run = played(tmp_path / "run")
    with pytest.raises(UsageError, match=r"run.*resume=True"):
        played(tmp_path / "run")
    again = played(tmp_path / "run", resume=True)
    assert again.summary is not None
    assert again.summary.recorded == 0
    assert len(run.tapes()) == 2


def test_without_out_a_new_folder_is_named_after_the_agent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    run = tr.run(tr.ChatAgent(), Guess, [5], ["5"])
    assert run.path.parent == Path("runs")
    assert run.path.is_dir()


def test_runs_of_one_second_have_folders_of_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(public.time, "strftime", lambda form: "20261126-201407")
    runs = [tr.run(tr.ChatAgent(), Guess, [5], ["5"]) for _ in range(3)]
    assert [run.path.name for run in runs] == [f"agent-20261126-201407{end}" for end in ("", "-2", "-3")]


@pytest.mark.parametrize(
    ("model", "settings", "message"),
    [
        ([], {}, r"\bmodel\b.*\[\]"),
        ([3], {}, r"model\[0\].*\b3\b"),
        (["5"], {"limits.turn": 2}, "limits.turns"),
        (["5"], {"limits.turns": object()}, r"settings\['limits.turns'\]"),
    ],
)
def test_a_wrong_argument_is_named_before_anything_is_written(tmp_path: Path, model, settings, message: str):
    with pytest.raises(UsageError, match=message):
        tr.run(tr.ChatAgent(), Guess, [5], model, out=tmp_path / "run", settings=settings)
    assert not (tmp_path / "run").exists()


def test_a_folder_without_a_run_is_refused(tmp_path: Path):
    with pytest.raises(UsageError, match=tmp_path.name):
        tr.open(tmp_path)


def test_answers_cannot_be_trained(tmp_path: Path):
    with pytest.raises(UsageError, match=r"\bmodel\b.*\['5'\]"):
        tr.train(tr.ChatAgent(), Guess, [5], ["5"], out=tmp_path / "run")  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="'no/such-model'"):
        tr.train(tr.ChatAgent(), Guess, [5], "no/such-model", out=tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_training_takes_objects_and_is_reproduced(tmp_path: Path):
    model = tr.save_tiny_model(tmp_path / "@m #2: 'x' \U0001f600", alphabet="ab", size="micro")
    settings = {
        "loop.groups": 2,
        "loop.group_size": 4,
        "loop.max_lag": 0,
        "loop.sampling.max_tokens": 1,
        "evaluation.fraction": 0,
    }
    run = tr.train(
        tr.ChatAgent(), Echo, ["a", "b"], model, updates=2, recipe="reinforce", out=tmp_path / "run", settings=settings
    )
    assert run.summary is not None
    assert run.summary.updates == 2
    assert run.summary.recipe == "reinforce"
    assert {run.verify().verdict, run.replay().verdict, run.reproduce().verdict} == {"holds"}
    assert run.replay().counts["verified"] == len(run.tapes())


def test_held_out_tasks_are_those_that_split_returned(tmp_path: Path):
    model = tr.save_tiny_model(tmp_path / "model", alphabet="ab", size="micro")
    tasks = tr.Taskset(["a", "b", "ab", "ba", "aa", "bb"])
    learned, held_out = tasks[:4], tasks[4:]
    settings: dict[str, Any] = {"loop.groups": 2, "loop.group_size": 2, "loop.sampling.max_tokens": 1}

    def trained(held_out: tr.Taskset, **more: Any) -> tr.Run:
        sets = {**settings, "evaluation.tasks": held_out}
        return tr.train(tr.ChatAgent(), Echo, learned, model, updates=1, out=tmp_path / "run", settings=sets, **more)

    with pytest.raises(UsageError, match=r"evaluation\.tasks.*empty"):
        trained(tasks[6:])
    with pytest.raises(UsageError, match="4 of the 6 held-out tasks"):
        trained(tasks)
    assert not (tmp_path / "run").exists()
    run = trained(held_out)
    assert {tape.begin.task.private for tape in run.tapes("eval-after-sampled")} == {"aa", "bb"}
    assert {tape.begin.task.private for tape in run.tapes("train")} <= {"a", "b", "ab", "ba"}
    assert trained(held_out, resume=True).summary.held_out == run.summary.held_out  # type: ignore[union-attr]
    with pytest.raises(UsageError, match=r"evaluation\.tasks"):
        trained(held_out[:1], resume=True)


def test_only_a_restart_by_torchrun_resumes_or_begins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    model = tr.save_tiny_model(tmp_path / "model", alphabet="ab", size="micro")
    settings = {"loop.groups": 2, "loop.group_size": 2, "loop.sampling.max_tokens": 1, "evaluation.fraction": 0}

    def trained(**more: Any) -> Any:
        args = (tr.ChatAgent(), Echo, ["a", "b"], model)
        return tr.train(*args, updates=1, out=tmp_path / "run", settings=settings, **more).summary

    with pytest.raises(UsageError, match=r"typo holds no run.*resume=True"):
        played(tmp_path / "typo", resume=True)
    with pytest.raises(UsageError, match=r"run holds no run.*resume=True"):
        trained(resume=True)
    assert not (tmp_path / "run").exists()
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    assert trained(resume=True).updates == trained().updates == 1
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "0")
    with pytest.raises(UsageError, match=r"run holds a run already.*resume=True"):
        trained()


def test_recording_answers_imports_no_torch(tmp_path: Path):
    code = f"""
import sys
import tapereel as tr
class World(tr.Environment):
    async def reset(self, task):
        return str(task)
    async def step(self, action):
        return tr.Outcome(reward=1.0, terminated=True)
run = tr.run(tr.ChatAgent(), World, [1], ["x"], out={str(tmp_path / "run")!r})
assert run.reward == 1.0
assert not {{"torch", "transformers", "numpy"}} & set(sys.modules)
"""
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_the_name_of_an_engine_stands_in_the_place_of_the_model(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "from tapereel.agents import Completion\n"
        "class Echo:\n"
        "    name, renderer, context, can = 'echo', None, None, frozenset()\n"
        "    async def complete(self, request):\n"
        "        return Completion(text='3')\n"
        "    def forget(self, cache_key): ...\n"
        "    async def close(self): ...\n"
    )
    made = tr.run(tr.ChatAgent("Guess."), Guess, [3], f"{tmp_path}/mine.py:Echo", out=tmp_path / "run")
    assert made.summary.usable == 1


def test_an_engine_or_a_recipe_as_an_object_is_refused_with_the_remedy(tmp_path: Path) -> None:
    with pytest.raises(BadArgument, match=r"\bmodel\b.*<object"):
        tr.run(tr.ChatAgent("Guess."), Guess, [3], object(), out=tmp_path / "run")  # type: ignore[arg-type]
    with pytest.raises(BadArgument, match=r"\brecipe\b.*<object"):
        tr.train(tr.ChatAgent("Guess."), Guess, [3], tmp_path, recipe=object())  # type: ignore[arg-type]
    with pytest.raises(
        BadArgument, match=r"settings\['loop.recipe'\] is <object .* an object's name 'my_recipes.py:mine'"
    ):
        tr.train(tr.ChatAgent("Guess."), Guess, [3], tmp_path, settings={"loop.recipe": object()})  # type: ignore[dict-item]


def test_settings_and_answers_are_values_and_no_text_that_is_read_again(tmp_path: Path) -> None:
    answers = [*filter(None, VALUES), "7"]
    settings = {"limits.turns": len(answers), "sampling.extra": {"words": VALUES, "\U0001f600 #": None}}
    run = tr.run(tr.ChatAgent(), Guess, [7], answers, out=tmp_path / "run", settings=settings)
    (again,) = run.branch(run.tapes()[0], 0, model=answers)
    (same,) = run.branch(run.tapes()[0], 0)
    for tape in (run.tapes()[0], again, same):
        assert [str(action) for action in tape.actions] == answers
        assert tape.calls[0].sampling.extra == settings["sampling.extra"]
    with pytest.raises(UsageError) as caught:
        tr.run(tr.ChatAgent(), Guess, [7], ["7"], out=tmp_path / "other", settings={"limits.turns": "many"})
    assert "settings['limits.turns']" in str(caught.value)
    assert "--set" not in str(caught.value)
