"""`tapereel check env` and the loading of things by name."""

from __future__ import annotations

import argparse
import io
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tapereel.cli import main
from tapereel.cli.checks import check_env_command as check_verb
from tapereel.cli.console import Exit
from tapereel.envs import Environment
from tapereel.envs.load_named import load_named
from tapereel.tapes.errors import UsageError

SOURCE = """
from tapereel.envs import Environment, Outcome
from tapereel.tapes import Answer, Text


class Parrot(Environment[Answer]):
    async def reset(self, task):
        self.word = task
        return Text(text=f"say {task}")

    async def step(self, action):
        return Outcome(reward=float(action.text == self.word), terminated=True)


class Rude(Parrot):
    async def step(self, action):
        raise RuntimeError("no\\x1b[31m!")


class inner:
    words = ["a", "b"]


def words():
    return ["a", "b"]


def fails():
    raise OSError("no licence")


def say(seen, rng):
    return Answer(text=seen.text.split()[-1])
"""


@pytest.fixture
def parrots(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    before = set(sys.modules)
    (tmp_path / "parrots_of_a_test.py").write_text(SOURCE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [p for p in sys.path if p])
    yield "parrots_of_a_test.py"
    for name in set(sys.modules) - before:
        if name.startswith("parrots"):
            del sys.modules[name]


def _run(*words: str) -> tuple[int, str]:
    parser = argparse.ArgumentParser()
    check_verb.configure(parser)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args([*words, "--stall", "60"])
    args.answer_to = io.StringIO()
    return check_verb.run(args), args.answer_to.getvalue()


@pytest.mark.parametrize("tasks", ["parrots_of_a_test.py:words", '["a", "b"]', "parrots_of_a_test.py:inner.words"])
def test_a_sound_environment_exits_0(parrots: str, tasks: str):
    code, out = _run(f"{parrots}:Parrot", "--tasks", tasks, "--actions", f"{parrots}:say", "--reward-range", "0", "1")
    assert code == Exit.HOLDS
    assert out.startswith("Parrot: ok (2 episodes, 2 turns, rewards 1 to 1,")


def test_a_broken_one_exits_1_and_is_one_json_object(parrots: str):
    code, out = _run(f"{parrots}:Rude", "--tasks", '["a"]', "--actions", f"{parrots}:say", "--json")
    assert code == Exit.BROKEN
    (line,) = out.splitlines()
    assert json.loads(line)["checks"]["raises"] == "failed"
    _, shown = _run(f"{parrots}:Rude", "--tasks", '["a"]', "--actions", f"{parrots}:say")
    assert "\x1b" not in shown


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--tasks", "3"], r"'3'.*\[1, 2\]"),
        (["--tasks", "nothing"], r"'nothing'.*package\.module:name"),
        (["--tasks", "[]"], "episodes="),
        (["--tasks", "[3"], r"'\[3'.*JSON: Expecting ',' delimiter"),
        (["--tasks", "math:pi"], r"math:pi.*3\.14.*\blist\b"),
    ],
)
def test_a_command_that_makes_no_sense_is_refused(parrots: str, words: list[str], says: str):
    with pytest.raises(UsageError, match=says):
        _run(f"{parrots}:Parrot", *words, "--actions", f"{parrots}:say")


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--timeout", "0"], r"--timeout: .*\b0\b.*\b0\b"),
        (["--max-turns", "-1"], r"--max-turns: .*-1\b.*\b1\b"),
        (["--episodes", "two"], "--episodes: .*'two'"),
    ],
)
def test_a_number_out_of_range_is_refused(words: list[str], says: str, capsys: pytest.CaptureFixture[str]):
    assert main(["check", "env", "a.py:Env", "--tasks", "[1]", "--actions", "a.py:act", *words]) == Exit.USAGE
    assert re.search(says, capsys.readouterr().err)


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("math:pi", "math:pi .*Environment"),
        ("{}:words", r"words\b.*\blist\b.*Environment"),
        ("{}:say", r"\bsay\b.*seen, rng\b"),
        ("{}:fails", "fails .*OSError: no licence .*:29"),
        ("builtins:dict", "builtins:dict .*Environment"),
    ],
)
def test_what_makes_no_environment_is_a_mistake_of_the_command_line(parrots: str, name: str, says: str):
    with pytest.raises(UsageError, match=says.format()):
        _run(name.format(parrots), "--tasks", "[1]", "--actions", f"{parrots}:say")


def test_actions_are_a_function(parrots: str):
    with pytest.raises(UsageError, match=r"--actions.*math:pi.*3\.14"):
        _run(f"{parrots}:Parrot", "--tasks", "[1]", "--actions", "math:pi")


def test_names_of_files_and_modules_are_one_thing(parrots: str):
    by_file = load_named(f"{parrots}:Parrot")
    assert issubclass(by_file, Environment)
    assert load_named("parrots_of_a_test:Parrot") is by_file
    assert by_file.__module__ == "parrots_of_a_test"
    assert load_named("json:loads") is json.loads


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("no_such_module:x", "'no_such_module'"),
        ("json.no_such:x", r"'json\.no_such'"),
        ("no_such.py:x", r"/no_such\.py$"),
        ("parrots_of_a_test.py:Macaw", "'Macaw'.*Parrot.*Outcome"),
        ("parrots_of_a_test.py:Parot", r"'Parot'(?!.*Outcome).*\bParrot\b"),
        ("parrots_of_a_test.py", r"'parrots_of_a_test\.py'.*package\.module:name"),
        (":x", r"':x'.*package\.module:name"),
    ],
)
def test_a_name_of_nothing_is_refused(parrots: str, name: str, says: str):
    with pytest.raises(UsageError, match=says):
        load_named(name)


def test_a_file_named_as_a_known_module_is_refused(parrots: str):
    Path("json.py").write_text("x = 1")
    with pytest.raises(UsageError, match=r"/json\.py .*'json'"):
        load_named("json.py:x")


def test_an_error_inside_the_file_is_the_files_own_and_leaves_nothing_behind(parrots: str):
    Path("parrots_broken.py").write_text("import no_such_thing_at_all")
    for name in ("parrots_broken.py:x", "parrots_broken:x"):
        with pytest.raises(UsageError, match=r"no_such_thing_at_all.*parrots_broken.py:1"):
            load_named(name)
    assert "parrots_broken" not in sys.modules
