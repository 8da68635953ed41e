"""`tapereel show`: what is listed, what is shown of one tape, and that nothing a model wrote acts on the terminal."""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tapereel.cli import main
from tapereel.cli.console import Exit, Section, answer
from tapereel.tapes import Tape
from tapereel.tapes.store import Store
from tapereel.tapes.transcript import call_lines, episode_rewards, step_lines, summarise

from ..front.making import hostile_everywhere, played, run_of, sampled_tape
from .library import picture, write_library
from .terminal import Terminal

EPISODES = [("train", ["5", "7"]), ("eval", ["7"]), ("train", ["5", "x"]), ("train", ["9", "8", "7"])]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Tape]]:
    path = tmp_path_factory.mktemp("show") / "run"
    return path, run_of(path, EPISODES)


def _json(capsys: pytest.CaptureFixture[str], *words: str) -> Any:
    assert main(["show", *words, "--json"]) == Exit.HOLDS
    return json.loads(capsys.readouterr().out)


def test_a_run_is_listed_with_its_numbers(run, capsys: pytest.CaptureFixture[str]):
    path, tapes = run
    data = _json(capsys, str(path))
    assert data["count"] == 4
    assert data["statuses"] == {"finished": 3, "error": 1}
    assert [t["id"] for t in data["tapes"]] == [tape.id for tape in tapes]
    assert [t["reward"] for t in data["tapes"]] == [tape.reward for tape in tapes]
    assert data["mean_reward"] == pytest.approx(sum(tape.reward for tape in tapes) / 4)
    assert main(["show", str(path)]) == Exit.HOLDS
    shown = capsys.readouterr().out
    assert "4 tapes (3 finished, 1 error)" in shown
    assert "error (agent)" in shown
    lines = [line.split() for line in shown.splitlines() if line.startswith(f" {tapes[0].id[:8]}")]
    assert len(lines) == 4
    for tape, (name, *cells) in zip(tapes, lines, strict=True):
        assert cells[:4] == ["from", "1", "to", "9"]
        assert cells[4] == str([step.number for step in tape[:] if hasattr(step, "number")][-1])
        assert _json(capsys, str(path), name)["tape"]["id"] == tape.id, "the short id names one tape"


def test_a_list_in_json_has_the_question_and_both_answers(run, capsys: pytest.CaptureFixture[str]):
    path, _ = run
    first = _json(capsys, str(path))["tapes"][0]
    # The task is the secret number alone, which need not be an answer.
    assert (first["question"], first["expected"], first["given"]) == ("from 1 to 9", None, "7")


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, list[str]]:
    path = tmp_path_factory.mktemp("library") / "run"
    return str(path), write_library(path)


def _listed(capsys: pytest.CaptureFixture[str], path: str, *words: str) -> list[str]:
    return [tape["id"] for tape in _json(capsys, path, *words)["tapes"]]


def test_cancelled_tapes_are_listed_only_if_asked_for(library, capsys: pytest.CaptureFixture[str]):
    path, ids = library
    assert _listed(capsys, path) == [name for name in ids if name != ids[4]]
    assert _listed(capsys, path, "--last", "3") == ids[5:]
    assert _listed(capsys, path, "--status", "cancelled") == [ids[4]]
    assert [_json(capsys, path, *words)["cancelled_left_out"] for words in ((), ("--split", "eval"))] == [1, 0]
    assert main(["show", path]) == Exit.HOLDS
    assert "1 cancelled" in capsys.readouterr().out.splitlines()[-1]


def test_a_list_is_narrowed_by_reward(library, capsys: pytest.CaptureFixture[str]):
    path, ids = library
    assert _listed(capsys, path, "--reward", "0") == [ids[1]]
    assert _listed(capsys, path, "--reward", "-0.5") == [ids[5]]
    assert _listed(capsys, path, "--worst", "3") == [ids[5], ids[1], ids[2]]
    assert _listed(capsys, path, "--worst", "2", "--split", "eval") == [ids[1], ids[0]]
    assert _listed(capsys, path, "--failed") == [ids[1], ids[3], ids[5]]
    assert main(["show", path, "--worst", "1", "--last", "1"]) == Exit.USAGE


def test_a_reward_is_compared_as_it_is_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    with Store.create(tmp_path / "run") as store:
        for record in sampled_tape("42", logprobs=None, reward=2 / 3)._log.bodies:
            store.writer.append(record)
    assert len(_listed(capsys, str(tmp_path / "run"), "--reward", "0.667")) == 1
    assert _listed(capsys, str(tmp_path / "run"), "--reward", "0.66") == []


def _lines(shown: str) -> list[str]:
    return [" ".join(line.split()) for line in shown.splitlines()]


def test_tool_calls_read_as_code_and_results_with_the_name_of_their_tool(library, capsys: pytest.CaptureFixture[str]):
    path, ids = library
    assert main(["show", path, ids[2]]) == Exit.HOLDS
    shown = _lines(capsys.readouterr().out)
    assert '"copies": [1, 2]' in shown, "long JSON has many lines"
    for line in ('lookup(title="Dubliners", author="James Joyce")', "lookup: 17"):
        assert any(line in one for one in shown)
    assert not any(word in one for one in shown for word in ('"calls"', '"results"', '"arguments"'))


def test_an_error_is_red_and_the_reason_of_a_failure_is_above_the_steps(library, monkeypatch: pytest.MonkeyPatch):
    path, ids = library
    out = Terminal()
    monkeypatch.setattr(sys, "stdout", out)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "100")
    assert main(["show", path, ids[3]]) == Exit.HOLDS
    head, steps = out.getvalue().split("How many", 1)
    for words in ("error (environment)", "KeyError: 'shelf 4'", "library.py:61 in step", "expected answer 4"):
        assert words in head
    assert "\x1b[31mTraceback (most recent call last):" in steps
    assert '\x1b[1mlookup(title="Middlemarch")' in steps


def test_the_middle_of_a_long_result_is_left_out(library, capsys: pytest.CaptureFixture[str]):
    path, ids = library
    shown = {}
    for more in ((), ("--full",)):
        assert main(["show", path, ids[3], *more]) == Exit.HOLDS
        shown[more] = capsys.readouterr().out
    assert "line 30" not in shown[()]
    assert "KeyError: 'shelf 4'" in shown[()].split("Traceback")[1], "the end of a traceback has the reason"
    assert all(f"line {k}\n" in "\n".join(_lines(shown[("--full",)])) + "\n" or k for k in range(60))
    assert len(shown[()].splitlines()) < 50 < len(shown[("--full",)].splitlines())


@pytest.mark.parametrize("words", [[], ["--json"]])
def test_a_picture_is_named_once_and_never_written_out(library, capsys: pytest.CaptureFixture[str], words: list[str]):
    path, ids = library
    assert main(["show", path, ids[5], *words]) == Exit.HOLDS
    shown = capsys.readouterr().out
    name = picture().name[:12]
    if words:
        (fragment,) = json.loads(shown)["steps"][2]["fragments"]
        assert fragment["text"] == f"a shelf\n[picture 16x12 {name}]"
    else:
        assert shown.count(f"[picture 16x12 {name}]") == 1
        assert "media:" not in shown


def test_json_that_cannot_be_indented_is_printed_as_it_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    for text in ("[" * 100_000, "{" + "x" * 100, '[1e999, "' + "x" * 100 + '"]', "[" * 900 + "]" * 900):
        tape = sampled_tape("42", logprobs=None, question=text)
        (tmp_path / "t.json").write_text(tape.model_dump_json())
        assert main(["show", str(tmp_path / "t.json")]) == Exit.HOLDS
        assert text[:9] in capsys.readouterr().out


def test_a_list_is_narrowed(run, capsys: pytest.CaptureFixture[str]):
    path, tapes = run
    assert [t["id"] for t in _json(capsys, str(path), "--split", "eval")["tapes"]] == [tapes[1].id]
    assert [t["id"] for t in _json(capsys, str(path), "--status", "error")["tapes"]] == [tapes[2].id]
    last = _json(capsys, str(path), "--last", "1")
    assert (last["count"], [t["id"] for t in last["tapes"]]) == (4, [tapes[3].id])
    assert _json(capsys, str(path), "--last", "0")["tapes"] == []
    assert _json(capsys, str(path), "--status", "running")["count"] == 0
    assert main(["show", str(path), "--status", "fine"]) == Exit.USAGE


def test_one_tape_is_shown_by_the_start_of_its_id(run, capsys: pytest.CaptureFixture[str]):
    path, tapes = run
    data = _json(capsys, str(path), tapes[0].id)
    assert [step["text"] for step in data["steps"]] == ["from 1 to 9", "5", "higher", "7"]
    assert [step["rewards"] for step in data["steps"]] == [{}, {"late": -0.25}, {}, {"right": 1.0}]
    assert data["steps"][3]["metrics"] == {"luck": 0.5}
    assert data["episode_rewards"] == {"played": 0.125}
    assert main(["show", str(path), tapes[0].id[:-1], "--calls"]) == Exit.HOLDS
    shown = capsys.readouterr().out
    assert "late -0.25" in shown
    assert "right 1, (luck) 0.5" in shown
    assert "for the episode: played 0.125" in shown
    assert " .2 " in shown


def test_a_run_or_tape_that_is_not_there_is_a_usage_error(run, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    path, tapes = run
    assert main(["show", str(tmp_path)]) == Exit.USAGE
    assert main(["show", str(tmp_path / "none")]) == Exit.USAGE
    assert main(["show", str(path), "zz"]) == Exit.USAGE
    assert main(["show", str(path), tapes[0].id[:3]]) == Exit.USAGE, "an id that several tapes begin with"
    told = capsys.readouterr().err.strip().splitlines()
    assert len(told) == 4
    assert all(line.startswith("tapereel show: ") for line in told)


def test_a_tape_document_is_shown_and_an_edited_one_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    text = played("7").model_dump_json()
    (tmp_path / "good.json").write_text(text)
    assert _json(capsys, str(tmp_path / "good.json"))["tape"]["reward"] == 1.125
    assert main(["show", str(tmp_path / "good.json"), "x"]) == Exit.USAGE
    (tmp_path / "bad.json").write_text(text.replace('"from 1 to 9"', '"from 1 to 8"'))
    assert main(["show", str(tmp_path / "bad.json")]) == Exit.BROKEN
    assert json.loads(text)["digest"] in capsys.readouterr().err


def test_what_a_model_wrote_does_nothing_to_the_terminal(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    tape = sampled_tape("[red]a\x1b]0;t\x07\u202e", logprobs=None, question="[bold]\x1b[2J")
    (tmp_path / "t.json").write_text(tape.model_dump_json())
    assert main(["show", str(tmp_path / "t.json"), "--calls"]) == Exit.HOLDS
    shown = capsys.readouterr().out
    assert "[red]a\\x1b]0;t\\x07\\x202e" in shown
    assert "[bold]\\x1b[2J" in shown
    assert not any(c in shown for c in "\x1b\x07\u202e")


def test_a_long_step_is_cut_off_unless_all_of_it_is_wanted(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    tape = sampled_tape("x" * 1_000_000, logprobs=None, question="?")
    (tmp_path / "t.json").write_text(tape.model_dump_json())
    shown = {}
    for more in ((), ("--full",), ("--json",)):
        assert main(["show", str(tmp_path / "t.json"), *more]) == Exit.HOLDS
        shown[more] = capsys.readouterr().out
    assert shown[()].count("x") < 5000
    assert "--full" in shown[()]
    assert shown[("--full",)].count("x") >= 1_000_000
    assert "x" * 1_000_000 in shown[("--json",)]


def test_steps_of_classes_that_are_not_imported_read_as_plain_text(run):
    path, tapes = run
    done = subprocess.run(
        [sys.executable, "-m", "tapereel.cli", "show", str(path), tapes[0].id, "--json"],
        capture_output=True,
        text=True,
        check=True,
    )
    steps = json.loads(done.stdout)["steps"]
    assert [(step["kind"], step["text"]) for step in steps] == [
        ("front_hint", "from 1 to 9"),
        ("front_guess", "5"),
        ("front_hint", "higher"),
        ("front_guess", "7"),
    ]


def test_tokens_are_counted_by_who_wrote_them():
    sampled = sampled_tape("42", logprobs=[-1.0, -2.0, float("nan")], spans=(("a:1", 0, 1), ("a:2", 1, 3)))
    summary = summarise(sampled)
    assert (summary.sampled, summary.authored, summary.versions) == (3, 0, ("a:1", "a:2"))
    (call,) = call_lines(sampled)
    assert (call.prompt, call.completion, call.mean_logprob) == (1, 3, -1.5)
    authored = sampled_tape("42", logprobs=None)
    assert (summarise(authored).sampled, summarise(authored).authored) == (0, 3)
    assert call_lines(authored)[0].mean_logprob is None


def test_an_unscored_tape_has_no_reward_and_a_fork_marks_what_it_inherited():
    tape = played("5", "x")
    assert summarise(tape).reward == -0.125
    assert summarise(tape).cause == "agent: ValueError: invalid literal for int() with base 10: 'x'"
    assert [line.inherited for line in step_lines(tape)] == [False] * len(tape)
    assert episode_rewards(played("7")) == {"played": 0.125}


HOSTILE = "\x1b]0;owned\x07\x9b31m\u202edrow\u200b"


def _shown_raw(text: str) -> list[str]:
    return [f"U+{ord(c):04X}" for c in text if not c.isprintable() and c != "\n"]


@pytest.mark.parametrize("words", [[], ["--calls"], ["--json"]])
def test_no_part_of_a_tape_commands_the_terminal(tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str]):
    run = hostile_everywhere(tmp_path / "run", HOSTILE)
    listed, one = [word for word in words if word != "--calls"], [str(run), "hostile", *words]
    assert main(["show", str(run), *listed]) == Exit.HOLDS
    assert main(["show", *one]) == Exit.HOLDS
    told = capsys.readouterr()
    assert "owned" in told.out
    assert _shown_raw(told.out) == []
    assert _shown_raw(told.err) == []


def test_an_error_that_quotes_a_tape_commands_no_terminal(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["show", str(tmp_path / HOSTILE.replace("/", ""))]) == Exit.USAGE
    told = capsys.readouterr().err
    assert "owned" in told
    assert _shown_raw(told) == []


def test_json_says_the_same_whatever_characters_it_spells_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    run = hostile_everywhere(tmp_path / "run", HOSTILE)
    data = _json(capsys, str(run), "hostile")
    assert data["tape"]["agent"] == HOSTILE
    assert data["episode_rewards"] == {HOSTILE: 1.0}


def test_a_narrow_terminal_cuts_no_number_short(run, monkeypatch: pytest.MonkeyPatch, capsys):
    monkeypatch.setenv("COLUMNS", "40")
    monkeypatch.setenv("NO_COLOR", "1")
    row = ("a name that is long", "1234567890", "9876543210", "100.0%", "and words that may well break")
    made = Section(("component", "#tokens", "#trained", "#share", "what it is"), [row])
    out = Terminal()
    answer(argparse.Namespace(answer_to=out), {}, made)
    for whole in ("1234567890", "9876543210", "100.0%", "tokens", "trained"):
        assert whole in out.getvalue()
    path, tapes = run
    listed = Terminal()
    monkeypatch.setattr(sys, "stdout", listed)
    assert main(["show", str(path)]) == Exit.HOLDS
    monkeypatch.undo()
    lines = listed.getvalue().splitlines()
    assert all(len(re.sub("\x1b.*?m", "", line)) <= 40 for line in lines)
    assert len([line for line in lines if line.startswith(f" {tapes[0].id[:8]}")]) == len(tapes), "one line per tape"


def test_the_requests_of_a_tape_are_printed_whole(run, capsys: pytest.CaptureFixture[str]):
    path, tapes = run
    requests = _json(capsys, str(path), tapes[0].id, "--calls")["requests"]
    assert requests == {call.call: call.messages for call in tapes[0].calls}
    assert not _json(capsys, str(path), tapes[0].id)["requests"]
    assert main(["show", str(path), tapes[0].id, "--calls"]) == Exit.HOLDS
    shown = capsys.readouterr().out
    assert all(f"request {call.call.removeprefix(tapes[0].id)}" in shown for call in tapes[0].calls)
