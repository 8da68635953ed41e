"""Steps: kinds, roles, equality, what a model reads, and content this process doesn't know."""

from collections.abc import Callable
from typing import Any

import pytest

from tapereel.tapes import Action, Answer, Observation, Step, Text, Thought
from tapereel.tapes.errors import Unwritable
from tapereel.tapes.records import StepRecord
from tapereel.tapes.steps import UnknownAction, read_step, role_of


class PlayCard(Action):
    card: int


class Board(Observation, kind="board_of_test"):
    cells: list[int]
    note: str = ""


def test_kind_is_the_snake_case_class_name_unless_given():
    assert PlayCard.kind == "play_card"
    assert Board.kind == "board_of_test"
    assert PlayCard(card=1).kind == "play_card"


def test_equality_is_equality_of_content():
    assert PlayCard(card=1) == PlayCard(card=1) != PlayCard(card=2)


@pytest.mark.parametrize("compare", [lambda step: step == "4", lambda step: step != "4", lambda step: "4" in step])
def test_a_step_is_not_compared_with_a_string(compare: Callable[[Step], bool]):
    with pytest.raises(TypeError, match=r"\bAnswer\b.*\.text"):
        compare(Answer(text="4"))


def test_a_step_is_frozen_and_closed():
    with pytest.raises(ValueError, match="frozen"):
        PlayCard(card=1).card = 2
    with pytest.raises(ValueError, match="Extra inputs"):
        PlayCard.model_validate({"card": 1, "suit": "x"})


def test_two_classes_with_one_kind_are_an_error_that_names_both():
    with pytest.raises(TypeError, match=r"play_card.*test_steps\.PlayCard"):
        type("Other", (Action,), {"__module__": "elsewhere", "__qualname__": "Other"}, kind="play_card")


def test_a_notebook_cell_that_runs_again_may_define_its_class_again():
    def cell() -> type[Action]:
        class Rerun(Action):
            x: int

        return Rerun

    assert cell() is not cell()


def test_a_field_named_kind_is_refused():
    with pytest.raises(TypeError, match="'kind'"):

        class Bad(Action):
            kind: str  # type: ignore[assignment]


def test_a_model_reads_the_one_field_or_json():
    assert str(Text(text="hi")) == "hi"
    assert str(PlayCard(card=3)) == "3"
    assert str(Board(cells=[1])) == '{"cells":[1],"note":""}'


def test_a_kind_that_nobody_imported_keeps_its_content():
    step = read_step("action", "fly_to_the_moon", {"speed": 3})
    assert isinstance(step, UnknownAction)
    assert step.original == "fly_to_the_moon"
    assert step.content == {"speed": 3}


def test_a_kind_under_another_role_is_refused():
    with pytest.raises(ValueError, match=r"'play_card'.*thought.*PlayCard"):
        read_step("thought", "play_card", {"card": 1})


def test_role_of():
    class Plan(Thought):
        text: str

    assert [role_of(s) for s in (Text(text=""), Plan(text=""), PlayCard(card=1))] == [
        "observation",
        "thought",
        "action",
    ]


class _Board(Observation, kind="steps_board"):
    name: str
    cells: Any


@pytest.mark.parametrize(
    ("cells", "says"),
    [
        (object(), r"'cells'.*\bobject\b"),
        ({"a": [1, {object}]}, r"'cells'.*\stype,"),
        ("\ud800", "'cells'.*surrogate"),
    ],
)
def test_a_step_that_can_t_be_written_names_its_field_and_what_is_in_it(cells: Any, says: str):
    record = StepRecord(
        tape="t", by="env", role="observation", kind="steps_board", content=_Board(name="n", cells=cells), at=0.0
    )
    with pytest.raises(Unwritable, match=f"'steps_board'.*{says}"):
        record.body()


LONG = "y" * 10_000_000


@pytest.mark.parametrize("cells", [LONG * 7, [[LONG] * 4] * 2, {LONG: {"a": (LONG,) * 6}}])
def test_a_step_that_is_too_long_for_a_record_is_refused_before_it_is_encoded(cells: Any):
    step = _Board(name="n", cells=cells)
    record = StepRecord(tape="t", by="env", role="observation", kind="steps_board", content=step, at=0.0)
    with pytest.raises(Unwritable):
        record.body()
    short = StepRecord(tape="t", by="env", role="observation", kind="text", content=Text(text=LONG), at=0.0)
    assert len(short.body()) > len(LONG)
