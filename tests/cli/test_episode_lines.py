"""While it trains, `train` prints an episode now and then: few lines, that no text can break or make long."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from rich.cells import cell_len

from tapereel.cli import main
from tapereel.cli.episode_lines import STEPS, episode_lines
from tapereel.tapes import (
    Answer,
    Cause,
    CauseType,
    Status,
    Step,
    Tape,
    Task,
    Text,
    ToolCall,
    ToolCalls,
    ToolResult,
    ToolResults,
)
from tapereel.tapes.records import Begin, End, Identity, Reward
from tapereel.tapes.tape import TapeLog, step_record

from .test_longer import words

GOLDEN = """\
update 10, one of its episodes: reward 1
  question    How many copies are on shelf 92?
  turn 1      count(shelf=92)
  observation 86
  turn 2      There are 86 copies.
  expected    86"""
CALLED = ToolCalls(calls=(ToolCall(id="0", name="count", arguments={"shelf": 92}),))
FOUND = ToolResults(results=(ToolResult(id="0", name="count", content="86"),))


def tape_of(*steps: tuple[str, Step], expected: str | None = "86", fault: Cause | None = None) -> Tape:
    """A tape with these steps, each with the path of its producer."""
    task = Task(public="shelves", private={"answer": expected})
    begin = Begin(
        tape="t",
        task=task,
        task_hash=task.hash,
        agent=Identity(name="librarian"),
        env=Identity(name="Library"),
        env_seed=0,
        seed=0,
        split="train",
        at=0.0,
    )
    log = TapeLog(begin)
    for by, step in steps:
        log.append(step_record("t", step, by=by))
    if fault is None:
        log.append(Reward(tape="t", step=len(steps) - 1, name="exact", value=1.0))
    status = Status.FINISHED if fault is None else Status.ERROR
    log.append(End(tape="t", status=status, cause=fault, seconds=0.5, at=1.0))
    return Tape(log)


ASKED = ("env", Text(text="How many copies\nare on\tshelf 92?"))
ANSWERED = ("librarian", Answer(text="There are 86 copies."))


def test_an_episode_is_its_steps_its_expected_answer_and_its_reward():
    tape = tape_of(ASKED, ("librarian", CALLED), ("env", FOUND), ANSWERED)
    assert "\n".join(episode_lines(10, tape, 80)) == GOLDEN


def test_a_long_episode_keeps_its_first_steps_and_its_last():
    turns = [(by, step) for k in range(20) for by, step in (("env", Text(text=f"q{k}")), ("a", Answer(text=f"a{k}")))]
    lines = episode_lines(1, tape_of(*turns), 80)
    assert len(lines) == STEPS + 2
    assert lines[STEPS - 1 : STEPS + 1] == ["  ...         33 more steps", "  turn 20     a19"]


def test_agents_are_named_if_there_are_several():
    lines = episode_lines(
        1, tape_of(ASKED, ("pair/guide", Answer(text="left")), ("pair/seeker", Answer(text="go"))), 80
    )
    assert [line.split(maxsplit=2)[2] for line in lines[2:4]] == ["pair/guide: left", "pair/seeker: go"]


def test_a_failed_episode_says_why_and_a_task_without_an_answer_has_no_line_for_it():
    fault = Cause(type=CauseType.ENVIRONMENT, error="OSError", message="the world broke")
    lines = episode_lines(1, tape_of(ASKED, fault=fault, expected=None), 80)
    assert lines[0].endswith("reward -, error: OSError: the world broke")
    assert len(lines) == 2


@pytest.mark.parametrize("text", ["\x1b[2J\x1b]0;title\x07" * 40, "漢字" * 100, "a\r\nb\x85c" * 50, "[bold]" * 50])
@pytest.mark.parametrize("width", [20, 80])
def test_no_text_breaks_a_line_or_commands_the_terminal(text: str, width: int):
    tape = tape_of(("env", Text(text=text)), ("librarian", Answer(text=text)), expected=text)
    lines = episode_lines(1, tape, width)
    assert len(lines) == 4
    assert all(line.isprintable() and cell_len(line) <= width for line in lines)


def test_training_prints_one_after_the_first_update_and_at_each_checkpoint(model: str, tmp_path: Path, capsys):
    assert main([*words(model, tmp_path / "r", 5, "loop.checkpoint_every=2"), "--json"]) == 0
    out, err = capsys.readouterr()
    assert re.findall(r"^update (\d+), one of its episodes: reward \d", err, re.MULTILINE) == ["1", "2", "4"]
    assert "\n  question " in err
    assert "one of its episodes" not in out
