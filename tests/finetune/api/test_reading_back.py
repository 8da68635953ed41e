"""Reading a run back: which rewards and tapes count, and which modules define its steps."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

import tapereel as tr
from tapereel.cli import main
from tapereel.tapes import Answer, Status

WORLD = """
import tapereel as tr
from tapereel.tapes import Answer, Thought

class Plan(Thought):
    text: str

class Planner(tr.Agent):
    async def act(self, tape, llm):
        yield Plan(text="think")
        yield Answer(text=(await llm(tape)).text)
"""


class Planner(tr.Agent):
    async def act(self, tape, llm):
        answer = Answer(text=(await llm(tape)).text)
        if "agent" in str(tape.observations[0]) and len(tape.observations) == 2:
            raise RuntimeError("the agent broke")
        yield answer


class World(tr.Environment):
    async def reset(self, task):
        self.task, self.turns = task, 0
        return f"play {task}"

    async def step(self, action):
        self.turns += 1
        if self.task == "env" and self.turns == 2:
            raise RuntimeError("the world broke")
        return tr.Outcome(observation="next", reward=3.0 if self.task == "env" else 1.0, terminated=self.turns == 2)


def test_only_what_the_agent_did_counts_in_every_mean(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    run = tr.run(Planner(), World, ["env", "agent", "good"], ["a", "b"], out=tmp_path / "run")
    rewards = [tape.reward for tape in run]
    assert all(tape.reward is None for tape in run if not tape.trains)
    assert [reward.value for tape in run for reward in tape.rewards if not tape.trains][:1] == [3.0], "they are kept"
    assert sorted(reward for reward in rewards if reward is not None) == [1.0, 2.0], "an error of the agent's counts"
    assert {tape.status for tape in run if tape.reward == 1.0} == {Status.ERROR}
    assert run.scores().reward is not None
    assert run.scores().reward.value == 1.5
    assert main(["show", str(run.path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["mean_reward"] == 1.5


def test_continuations_are_not_episodes_of_the_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    run = tr.run(Planner(), World, ["good"], ["a", "b"], out=tmp_path / "run")
    (tape,) = run
    made = run.branch(tape.id, 1, n=2)
    assert [one.id for one in run] == [tape.id]
    assert {one.id for one in run.tapes("branch")} == {one.id for one in made}


def test_steps_of_a_module_that_is_not_imported_are_named_with_it(tmp_path: Path):
    (tmp_path / "planning.py").write_text(
        WORLD + "\n\n" + "class World(tr.Environment):\n"
        "    async def reset(self, task):\n        return 'hi'\n\n"
        "    async def step(self, action):\n        return tr.Outcome(reward=1.0, terminated=True)\n"
    )
    make = "import planning, tapereel as tr; tr.run(planning.Planner(), planning.World, [1], ['a'], out='run')"
    read = "import tapereel as tr; print([type(step).__name__ for tape in tr.open('run') for step in tape])"
    seen = [
        subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True)
        for code in (make, read, f"import planning; {read}")
    ]
    assert "UnknownThought" in seen[1].stdout
    assert "plan" in seen[1].stderr
    assert "import planning" in seen[1].stderr
    assert "Plan" in seen[2].stdout
    assert "Unknown" not in seen[2].stdout
    assert "import planning" not in seen[2].stderr
