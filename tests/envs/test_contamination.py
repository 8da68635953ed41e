"""What held-out tasks have in common with training, each kind by an example."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tapereel.cli import main
from tapereel.cli.console import Exit
from tapereel.envs.contamination import contamination, texts
from tapereel.envs.taskset import Taskset
from tapereel.tapes import Task

LONG = "A train leaves the station at nine and travels north at sixty miles an hour for three hours and a half"


def task(question: str, answer: Any = 1) -> Task:
    return Task(public={"question": question}, private=answer)


TRAIN = [task(LONG, 210), task("What is 2 + 2?", 4), task("Name the capital of France.", "Paris")]


def test_each_kind_is_found_once_and_by_the_narrowest() -> None:
    held_out = [
        task(LONG, 210),  # the same
        task("What is 2 + 2?", 5),  # another answer
        task("name the CAPITAL of  France", "Paris"),  # the same words
        task(LONG.replace("half", "quarter"), 195),  # all runs but the last
        task("A question that nobody has ever asked before about the weather on Mars in spring", 0),
        task("Short one", 0),
    ]
    found = contamination(TRAIN, held_out)
    assert (found.exact.tasks, found.question.tasks, found.normalised.tasks, found.runs.tasks) == (1, 1, 1, 1)
    assert not found.clean
    assert found.question.shown[0].train == TRAIN[1].hash
    runs = len(LONG.split()) - 8 + 1
    assert found.runs.shown[0].share == pytest.approx((runs - 1) / runs)
    assert found.too_short == 3
    assert (found.train, found.held_out) == (3, 6)
    assert "the same question, another answer" in str(found)


def test_the_share_and_the_length_of_runs_decide() -> None:
    half = LONG[: len(LONG) // 2] + " and then something else happens that has no part in the other text at all"
    loose, strict = (contamination(TRAIN, [task(half)], share=share) for share in (0.1, 0.9))
    assert (loose.runs.tasks, strict.runs.tasks) == (1, 0)
    assert contamination(TRAIN, [task("the capital of Spain")], n=3).runs.tasks == 1
    assert contamination(TRAIN, [task("the capital of Spain")], n=4).clean
    with pytest.raises(ValueError, match="n must be at least 1"):
        contamination(TRAIN, [], n=0)


def test_a_split_by_hash_is_clean_and_bare_tasks_are_compared_by_their_value() -> None:
    train, held_out = Taskset(f"say {k} words and stop" for k in range(200)).split(0.8, 0.2)
    assert contamination(train, held_out, n=5).clean
    assert contamination(train, [*held_out, train[0]], n=5).exact.tasks == 1
    assert texts(Task.of("hello")) == "hello"
    assert texts(Task(public={"b": ["x", 2], "a": "y"}, private="z")) == "y x 2"


def test_letters_of_other_scripts_and_widths_are_words() -> None:
    assert contamination([task("Ｗｈａｔ　ＩＳ  café")], [task("what is cafe\u0301?")]).normalised.tasks == 1


def test_the_command_line(tmp_path: Path, capsys: Any) -> None:
    def save(name: str, rows: list[tuple[str, int]]) -> str:
        (tmp_path / name).write_text("".join(json.dumps({"q": q, "a": a}) + "\n" for q, a in rows))
        return str(tmp_path / name)

    train, dirty, clean = save("t.jsonl", [(LONG, 1)]), save("d.jsonl", [(LONG, 2)]), save("c.jsonl", [("What?", 1)])
    words = ["--public", "q", "--private", "a", "--json"]
    assert main(["check", "tasks", train, clean, *words]) == Exit.HOLDS
    assert json.loads(capsys.readouterr().out)["question"]["tasks"] == 0
    assert main(["check", "tasks", train, dirty, *words]) == Exit.BROKEN
    assert json.loads(capsys.readouterr().out)["question"]["tasks"] == 1


@pytest.mark.parametrize(
    ("held_out", "words", "sentence"),
    [
        ("none.jsonl", [], "there is no file"),
        ("t.jsonl", ["--public", "z"], "t.jsonl: item 0: a row has no column 'z'"),
        ("bad.jsonl", [], "bad.jsonl can't be read: line 2 is not JSON"),
        ("t.txt", [], "has the suffix '.txt'"),
    ],
)
def test_what_the_verb_cannot_read_is_a_mistake_of_the_command_line(
    held_out: str, words: list[str], sentence: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    (tmp_path / "t.jsonl").write_text('{"q": 1}\n')
    (tmp_path / "bad.jsonl").write_text('{"q": 1}\n{bad\n')
    assert main(["check", "tasks", str(tmp_path / "t.jsonl"), str(tmp_path / held_out), *words]) == Exit.USAGE
    assert sentence in capsys.readouterr().err
