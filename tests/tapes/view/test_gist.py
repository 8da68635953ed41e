"""The question, expected answer and given answer of a tape, read from a few of its records."""

from __future__ import annotations

from pathlib import Path

import pytest

import tapereel as tr
from tapereel.tapes.store import Store
from tapereel.tapes.view import RunView
from tapereel.tapes.view.gist import LONGEST, Gist, gist_of

from . import lab


class GistScene(tr.Observation):
    question: str
    seen: tuple[int, ...]


class GistGuess(tr.Environment):
    async def reset(self, task: object) -> str | GistScene:
        if task == "scene":
            return GistScene(question="Where?", seen=(1, 2))
        return "Which number?" if task != "long" else "x" * 1000

    async def step(self, action: tr.Step) -> tr.Outcome:
        return tr.Outcome("no", reward=0.0, terminated=True)


@pytest.mark.parametrize(
    ("task", "gist"),
    [
        (7, Gist(question="Which number?", expected=None, given="5")),
        (
            tr.Task(public={"question": "shown?"}, private={"answer": [1, 2]}),
            Gist(question="Which number?", expected="[1, 2]", given="5"),
        ),
        (tr.Task(private={"seed": 1}), Gist(question="Which number?", expected=None, given="5")),
        ("scene", Gist(question="Where?", expected=None, given="5")),
        ("long", Gist(question="x" * (LONGEST - 1) + "…", expected=None, given="5")),
    ],
)
def test_an_episode_has_a_question_an_expected_and_a_given_answer(task: object, gist: Gist, tmp_path: Path) -> None:
    run = tr.run(tr.ChatAgent(), GistGuess, tasks=[task], model=["5"], out=tmp_path / "run")
    with Store.open(tmp_path / "run") as store:
        assert gist_of(store, next(iter(run)).id) == gist


def test_a_tape_without_steps_has_its_tasks_question_and_no_answer(tmp_path: Path) -> None:
    with lab.growing(tmp_path) as store:
        lab.Recording(store, "t1", public={"question": "How many?"})
    with RunView(tmp_path) as view:
        view.overview()
        assert view.gists(["t1", "other"]) == {"t1": {"question": "How many?", "expected": "42", "given": None}}
