"""What can't be meant ends with 64 and one sentence that says what to do, and what is missing is told."""

from __future__ import annotations

import argparse
import ast
import importlib
import re
import socket
from pathlib import Path

import pytest

import tapereel as tr
from tapereel.cli import main
from tapereel.cli.command import commands
from tapereel.cli.look.view import configure
from tapereel.envs.load_named import load_named
from tapereel.tapes.errors import UsageError
from tapereel.tapes.store import Store, lease

from .lab import EXAMPLE, NEXT, SCENE, answer_of, refusal_of, settings

ROOT = Path(__file__).parents[2]


@pytest.fixture
def run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> str:
    """Two digits, said by a script: no token of it was sampled."""
    path = tmp_path / "run"
    assert main(["run", *SCENE, "--out", str(path), *settings(f"engine.policy={NEXT}", "count=2")]) == 0
    capsys.readouterr()
    return str(path)


def one_sentence(text: str) -> bool:
    return "Error: [Errno" not in text and "Traceback" not in text and text.strip().count("\n") == 0


@pytest.mark.parametrize(
    "words",
    [
        ("replay agent",),
        ("replay model",),
        ("replay env",),
        ("audit",),
        ("replay rewards", "--reward", f"{EXAMPLE}:close", "--layer", "x"),
    ],
    ids=" ".join,
)
def test_a_split_that_no_tape_is_of(words: tuple[str, ...], run: str, capsys: pytest.CaptureFixture[str]):
    told = refusal_of(capsys, *words[0].split(), run, "--split", "nope", *words[1:])
    assert re.search(r"'nope'.*\beval$", told.strip())


def test_requery_says_why_there_is_nothing_to_ask(run: str, capsys: pytest.CaptureFixture[str]):
    assert " 2 " in answer_of(capsys, "replay", "model", run, code=2)["reason"]
    assert main(["replay", "model", run]) == 2
    assert "sampled" in capsys.readouterr().out


def test_a_torn_tail_is_told_with_every_verdict(run: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    with Store.open(run) as store:
        (segment,) = [segment.name for segment in store.index.segments()]
    path = tmp_path / "run" / "tapes" / f"{segment}.jsonl"
    *lines, seal = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(lines) + seal[:15])
    for verb in ("replay agent", "audit", "replay model", "replay env"):
        main([*verb.split(), run])
        assert re.match(rf"15 .*{segment}", capsys.readouterr().out), verb
    (told,) = answer_of(capsys, "audit", run)["torn"]
    assert told.endswith(f"tapereel verify {run}")
    assert answer_of(capsys, "replay", "agent", run)["torn"] == [told]
    assert main(["audit", run, "--markdown"]) == 0
    assert re.search(rf"\b15\b.*{segment}", capsys.readouterr().out)


def test_no_run_is_begun_where_one_is_or_a_file(run: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    (tmp_path / "file").write_text("mine")
    load_named(f"{EXAMPLE}:save_model")(str(tmp_path / "model"))
    for words in (
        ("run", *SCENE, *settings(f"engine.policy={NEXT}", "count=2")),
        ("train", *SCENE, "--model", str(tmp_path / "model")),
        ("demo",),
    ):
        assert "`--resume`" in refusal_of(capsys, *words, "--out", run)
        told = refusal_of(capsys, *words, "--out", str(tmp_path / "file"))
        assert str(tmp_path / "file") in told
        assert one_sentence("\n".join(line for line in told.splitlines() if not line.startswith("profile ")))
    assert (tmp_path / "file").read_text() == "mine"


def test_a_demo_that_isnt_there_is_not_resumed(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    told = refusal_of(capsys, "demo", "--resume", "--out", str(tmp_path / "typo"))
    assert "--resume: " in told
    assert str(tmp_path / "typo") in told
    assert not (tmp_path / "typo").exists()


def test_a_resumed_demo_has_the_seed_of_its_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    out = ("--out", str(tmp_path), "--dry-run")
    main(["demo", "--seed", "5", "--algo", "rloo", *out])
    (tmp_path / "demo.yaml").write_text(capsys.readouterr().out)
    for words, seed in (((), 5), (("--seed", "6"), 6)):
        found = answer_of(capsys, "demo", "--resume", *words, *out)
        assert (found["seed"], found["algo"]) == (seed, "rloo")
    assert answer_of(capsys, "demo", *out)["seed"] == 0


def test_a_demo_is_resumed_as_the_demo_that_it_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    main(["demo", "--dry-run"])
    (tmp_path / "demo.yaml").write_text(capsys.readouterr().out)
    for words, named in ((("--pictures",), "--pictures"), (("--model-size", "base"), "model-base")):
        assert named in refusal_of(capsys, "demo", "--resume", *words, "--out", str(tmp_path))
    assert [path.name for path in tmp_path.iterdir()] == ["demo.yaml"], "nothing is made before the refusal"


def test_a_demo_is_taken_over_in_each_of_its_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    main(["demo", "--dry-run"])
    (tmp_path / "demo.yaml").write_text(capsys.readouterr().out)
    (tmp_path / "controls" / "sft").mkdir(parents=True)
    ended: list[Path] = []
    monkeypatch.setattr(lease, "end_lease", lambda run: ended.append(Path(run)))
    refusal_of(capsys, "demo", "--resume", "--take-over", "--out", str(tmp_path))
    assert ended == [tmp_path, tmp_path / "demonstrations", tmp_path / "controls" / "sft"]


def test_a_recipe_that_there_is_not(run: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert "'nope'" in refusal_of(capsys, "explain", run, "--recipe", "nope")
    words = ("train", *SCENE, "--model", str(tmp_path), "--out", str(tmp_path / "new"))
    assert "'nope'" in refusal_of(capsys, *words, "--set", "loop.recipe=nope")


@pytest.mark.parametrize("target", ["no/such/folder/x.md", "."])
def test_a_report_that_can_be_written_nowhere(target: str, run: str, capsys: pytest.CaptureFixture[str]):
    told = refusal_of(capsys, "audit", run, "--markdown", target)
    assert "folder" in told
    assert one_sentence(told)


def test_an_address_where_nothing_can_listen(run: str, capsys: pytest.CaptureFixture[str]):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        told = refusal_of(capsys, "view", run, "--no-browser", "--port", str(taken.getsockname()[1]))
        assert re.search(rf"127\.0\.0\.1\b.*\b{taken.getsockname()[1]}\b", told)
        assert one_sentence(told)
    # An address of the documentation's range: none of this machine, and nobody is asked for its name.
    told = refusal_of(capsys, "view", run, "--no-browser", "--host", "192.0.2.1")
    assert "192.0.2.1" in told


def test_view_takes_the_tokenizer_that_its_message_asks_for():
    parser = argparse.ArgumentParser()
    configure(parser)
    assert parser.parse_args(["runs/x", "--tokenizer", "here"]).tokenizer == "here"


def test_the_newest_minus_three_tapes(run: str, capsys: pytest.CaptureFixture[str]):
    assert "--last" in refusal_of(capsys, "show", run, "--last", "-3")


def test_an_error_names_the_argument_in_python_and_the_option_on_a_command_line(run: str, capsys):
    words = ("run", *SCENE, *settings(f"engine.policy={NEXT}", "count=2"), "--out", run)
    with pytest.raises(UsageError, match="`resume=True`") as caught:
        tr.run(tr.ChatAgent(), tr.Environment, [1], ["a"], out=run)
    assert "--" not in str(caught.value)
    said = refusal_of(capsys, *words)
    assert "`--resume`" in said
    assert "`--out`" in said
    assert "resume=True" not in said


def test_no_error_of_the_library_names_an_option_alone() -> None:
    """Library code names arguments, as `resume=True`; `cli.command` spells them as options."""
    flags = set[str]()
    for path, _ in commands().values():
        parser = argparse.ArgumentParser()
        importlib.import_module(f"tapereel.{path}").configure(parser)
        flags |= {flag for action in parser._actions for flag in action.option_strings}
    flags -= {"--set"}  # how a setting is named that was given as the text KEY=VALUE
    assert "--resume" in flags
    found = [
        f"{path.relative_to(ROOT)}:{node.lineno}: {text}"
        for floor in ("tapes", "envs", "agents", "finetune")
        for path in sorted((ROOT / floor).rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Raise)
        for text in [re.sub(r"tapereel (serve )?[a-z]+ [^`']*", "", ast.unparse(node))]
        if flags & set(re.findall(r"(?<![\w-])--[a-z-]+", text)) and not re.search(r"\w=|in Python", text)
    ]
    assert found == []
