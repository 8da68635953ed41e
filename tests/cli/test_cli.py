"""The command: verbs, help, exit codes, one object on stdout, errors as sentences."""

from __future__ import annotations

import errno
import json
import re
import shlex
import subprocess
import sys
import types
from pathlib import Path

import pytest

from tapereel.cli import command as cli
from tapereel.cli.console import Exit, answer, say
from tapereel.tapes import MissingExtra, TapereelError
from tapereel.tapes.common.text import safe
from tapereel.tapes.errors import UsageError


@pytest.fixture
def verb(monkeypatch: pytest.MonkeyPatch):
    """A verb whose `run` the test gives."""

    def make(run):
        module = types.ModuleType("tapereel._probe")
        module.EXAMPLE = "tapereel probe --n 3"  # type: ignore[attr-defined]
        module.configure = lambda parser: parser.add_argument("--n", type=int, default=1)  # type: ignore[attr-defined]
        module.run = run  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "tapereel._probe", module)
        monkeypatch.setitem(cli.VERBS, "probe", ("_probe", "a probe"))

    return make


def _raise(error: BaseException):
    def run(args):
        raise error

    return run


@pytest.mark.parametrize("name", list(cli.VERBS))
def test_every_verb_has_help_with_an_example_that_parses(name: str, capsys: pytest.CaptureFixture[str]):
    assert cli.main([name, "--help"]) == Exit.HOLDS
    shown = capsys.readouterr().out
    assert "--json" in shown or "targets:" in shown
    assert f"example:\n  tapereel {name}" in shown
    for line in cli.load(name).EXAMPLE.strip().splitlines():
        program, verb, *rest = shlex.split(line)
        assert (program, verb) == ("tapereel", name)
        cli.verb_parser(name).parse_args(rest)


@pytest.mark.parametrize("name", [name for name in cli.commands() if " " in name])
def test_every_target_has_help_with_an_example_that_parses(name: str, capsys: pytest.CaptureFixture[str]):
    verb, target = name.split()
    assert cli.main([verb, "--help"]) == Exit.HOLDS
    assert cli.commands()[name][1] in " ".join(capsys.readouterr().out.split())
    assert cli.main([verb, target, "--help"]) == Exit.HOLDS
    shown = capsys.readouterr().out
    assert "--json" in shown
    example = shown.split("example:\n")[1].strip().replace("\\\n", "").splitlines()
    for line in example:
        assert line.strip().startswith(f"tapereel {name} ")
        cli.verb_parser(verb).parse_args(shlex.split(line)[2:])


def test_a_target_that_there_is_not_is_refused_with_those_that_there_are(capsys: pytest.CaptureFixture[str]):
    assert cli.main(["serve", "models/x", "--port", "8000"]) == Exit.USAGE
    out, err = capsys.readouterr()
    assert out == ""
    assert all(target in err for target in ("model", "env", "gateway"))


@pytest.mark.parametrize("name", ["explain", "replay agent"])
def test_what_may_be_left_out_is_not_called_required(name: str, capsys: pytest.CaptureFixture[str]):
    assert cli.main(name.split()) == Exit.USAGE
    assert capsys.readouterr().err.endswith("the following arguments are required: run\n")


@pytest.mark.parametrize("name", list(cli.VERBS))
def test_every_verb_refuses_an_unknown_flag(name: str, capsys: pytest.CaptureFixture[str]):
    assert cli.main([name, "--no-such-flag"]) == Exit.USAGE
    out, err = capsys.readouterr()
    assert out == ""
    assert f"tapereel {name}" in err


def test_the_top_lists_the_verbs_and_refuses_others(capsys: pytest.CaptureFixture[str]):
    assert cli.main(["--help"]) == Exit.HOLDS
    shown = capsys.readouterr().out
    assert [name for names in cli.GROUPS.values() for name in names] == list(cli.VERBS), "the same verbs, in one order"
    words = " ".join(shown.split())
    assert all(f" {name} {text} " in words for name, (_, text) in cli.VERBS.items())
    assert all(f"\n{group}:\n" in shown for group in cli.GROUPS)
    index, codes = (Path(shown.split(f"\n{name}: ")[1].split("\n")[0]) for name in ("documentation", "exit codes"))
    assert index.is_file()
    assert all(f"\n| {code.value} |" in codes.read_text(encoding="utf-8") for code in Exit)
    assert (index.parents[1] / "examples").is_dir()
    assert cli.main(["shwo"]) == Exit.USAGE
    assert "'shwo'" in capsys.readouterr().err
    assert cli.main([]) == Exit.USAGE


def test_the_version_is_that_of_the_package(capsys: pytest.CaptureFixture[str]):
    assert cli.main(["--version"]) == Exit.HOLDS
    assert capsys.readouterr().out.strip() == "0.1.0"


def test_json_is_one_object_on_stdout_and_the_rest_is_progress(verb, capsys: pytest.CaptureFixture[str]):
    def run(args) -> int:
        say("working")
        print("a library talks")
        inf = float("inf")
        answer(args, {"n": args.n, "unknown": float("nan"), "most": inf, "deep": [{"x": -inf}]}, "n is 3")
        return Exit.UNVERIFIABLE

    verb(run)
    assert cli.main(["probe", "--n", "3", "--json"]) == 2
    out, err = capsys.readouterr()
    assert json.loads(out) == {"n": 3, "unknown": None, "most": "inf", "deep": [{"x": "-inf"}]}
    assert err == "working\na library talks\n"
    assert cli.main(["probe", "--n", "3"]) == 2
    assert capsys.readouterr().out == "n is 3\n"


@pytest.mark.parametrize("error", [ZeroDivisionError("x"), ModuleNotFoundError("No module named 'x'", name="x")])
def test_an_error_that_nobody_foresaw_keeps_its_traceback(verb, error: Exception):
    verb(_raise(error))
    with pytest.raises(type(error)):
        cli.main(["probe"])


@pytest.mark.parametrize(
    ("error", "code", "says"),
    [
        (TapereelError("the tape is torn at byte 9; run recover"), 1, "the tape is torn at byte 9; run recover"),
        (UsageError("there is no run 'x'"), 64, "there is no run 'x'"),
        (MissingExtra("torch", "train", "training"), 1, 'pip install "tapereel[train]"'),
        (ModuleNotFoundError("No module named 'gymnasium'", name="gymnasium"), 1, 'pip install "tapereel[gym]"'),
        (PermissionError(13, "Permission denied", "/x"), 1, "PermissionError: [Errno 13] Permission denied: '/x'"),
        (OSError(errno.ENOSPC, "No space left on device"), 1, "device; free some space"),
        (OSError(errno.EROFS, "Read-only file system", "/r/leads/.probe-1"), 1, "'/r/leads/.probe-1'; make the file"),
    ],
)
def test_an_error_of_ours_is_one_sentence(verb, capsys, error: Exception, code: int, says: str):
    verb(_raise(error))
    assert cli.main(["probe", "--json"]) == code
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("tapereel probe: ")
    assert says in err
    assert "Traceback" not in err
    with pytest.raises(type(error)):
        cli.main(["probe", "--traceback"])


def test_a_full_disk_is_told_with_the_run(verb, capsys: pytest.CaptureFixture[str]):
    def run(args) -> int:
        args.out = "runs/x"
        raise OSError(errno.ENOSPC, "No space left on device")

    verb(run)
    assert cli.main(["probe"]) == 1
    assert "(in runs/x); free some space" in capsys.readouterr().err


def test_an_interrupt_is_told(verb, capsys: pytest.CaptureFixture[str]):
    verb(_raise(KeyboardInterrupt()))
    assert cli.main(["probe"]) == 130
    assert capsys.readouterr().err == "tapereel probe: interrupted\n"


def test_text_of_others_styles_no_terminal(verb, capsys: pytest.CaptureFixture[str]):
    def run(args) -> int:
        answer(args, {}, safe("[bold]x[/bold] \x1b[31mred\x07 \u202eback"))
        return 0

    verb(run)
    cli.main(["probe"])
    assert capsys.readouterr().out.rstrip() == "[bold]x[/bold] \\x1b[31mred\\x07 \\x202eback"


class Broken:
    def write(self, text: str) -> int:
        raise LookupError("no stderr")


@pytest.mark.parametrize("stderr", [None, Broken()], ids=["none", "raises"])
def test_a_message_arrives_although_code_of_others_broke_stderr(
    stderr: object, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
):
    with monkeypatch.context() as patched:
        patched.setattr(sys, "stderr", stderr)
        say("it ended \x1b[31m")
    assert capfd.readouterr().err == "it ended \\x1b[31m\n"


def test_a_reader_that_leaves_early_is_no_error(tmp_path: Path):
    code = (
        "import sys; from tapereel import cli\n"
        "import types; m = types.ModuleType('tapereel._many'); m.EXAMPLE = ''\n"
        "m.configure = lambda p: None\n"
        "def run(args):\n"
        "    for _ in range(100000): args.answer_to.write('x' * 80 + chr(10))\n"
        "    return 0\n"
        "m.run = run; sys.modules['tapereel._many'] = m; cli.VERBS['many'] = ('_many', 'x')\n"
        "sys.exit(cli.main(['many']))"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.readline()
        process.stdout.close()
        err = process.stderr.read()
    assert err == b""
    assert process.returncode == 1


def test_the_command_is_installed_and_light(tmp_path: Path):
    code = (
        "import sys; from tapereel.cli import main; code = main(['--help'])\n"
        "heavy = {'torch', 'transformers', 'numpy', 'rich'} & set(sys.modules)\n"
        "sys.exit(1 if heavy else code)"
    )
    assert subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True).returncode == 0
    script = Path(sys.executable).with_name("tapereel")
    done = subprocess.run([script, "nothing"], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == Exit.USAGE
    assert "usage: tapereel" in done.stderr


@pytest.mark.parametrize(
    "words",
    [
        ["serve", "model", ".", "--engine", "embedded"],
        ["serve", "model", "."],
        ["serve", "gateway", "--set", 'engine.answers=["x"]'],
        ["serve", "env", "examples/digits.py:Digits"],
    ],
    ids=lambda words: words[1],
)
def test_a_port_that_is_none_is_a_mistake_of_the_command_line(words: list[str], capsys: pytest.CaptureFixture[str]):
    assert cli.main([*words, "--port", "99999"]) == Exit.USAGE
    assert re.search(r"--port: .*\b99999\b.*\b65535\b", capsys.readouterr().err)
