"""One rule over all verbs: what was given makes no sense (a word, a setting, or a file, folder or code that it names):
exit code 64, nothing on stdout, a sentence without a traceback, and nothing is written."""

from __future__ import annotations

from pathlib import Path

import pytest

from tapereel.cli import main
from tapereel.cli.command import commands

from .lab import EXAMPLE, MICRO, NEXT, SCENE, settings

DIGITS, CLOSE, POLICY = f"{EXAMPLE}:Digits", f"{EXAMPLE}:close", ("--set", f"engine.policy={NEXT}")
TASKS = f"{EXAMPLE}:tasks"
"""Words in capitals below stand for what the fixture `there` makes."""
EVERY_RUN = ("NOWHERE", "FILE", "EMPTY")
"""What is no run, for every verb that reads one."""
READS = {
    "show": (),
    "view": ("--no-browser",),
    "explain": (),
    "replay agent": (),
    "replay env": (),
    "replay rewards": ("--reward", CLOSE),
    "replay model": (),
    "branch": ("0", "--at", "0"),
    "diff": ("RUN",),
    "verify": (),
    "reproduce": (),
    "scores": (),
    "explain --recipe": ("--recipe", "own"),
    "audit": (),
    "export": ("NEW.jsonl",),
}
OTHERS: dict[str, list[tuple[str, ...]]] = {
    "demo": [("--config", "EMPTY"), ("--set", "loop.recipe=rloo"), ("--set", "tasks=64"), ("--set", "nope=1")],
    "run": [
        (*SCENE, "--config", "EMPTY", *POLICY),
        (*SCENE, "--model", "EMPTY"),
        (*SCENE, "--model", "NOWHERE"),
        ("--agent", "BROKEN.py:x", *SCENE[2:], *POLICY),
        (*SCENE[:4], "--tasks", "BROKEN.jsonl", *POLICY),
    ],
    "train": [
        (*SCENE, "--model", "MODEL", *settings(*MICRO, "loop.changes={weigh: {kind: nope}}")),
        (*SCENE, "--model", "EMPTY", *settings(*MICRO)),
        (*SCENE, "--model", "FILE", *settings(*MICRO)),
        (*SCENE, "--config", "BROKEN.yaml", "--model", "MODEL"),
    ],
    "serve gateway": [("--model", "NOWHERE"), ("--model", "EMPTY"), ("--config", "EMPTY", "--model", "MODEL")],
    "serve model": [
        ("EMPTY", "--engine", "embedded"),
        ("NOWHERE", "--engine", "embedded"),
        ("MODEL", "--port", "99999"),
    ],
    "serve env": [("BROKEN.py:x",), (DIGITS, "--port", "99999")],
    "show": [("BROKEN.jsonl",), ("RUN", "zzz"), ("RUN", "--taught", "EMPTY")],
    "view": [
        ("RUN", "--out", "NEW.html", "--weights", "NOWHERE"),
        ("RUN", "--out", "NEW.html", "--tokenizer", "NOWHERE"),
        ("RUN", "--out", "FILE"),
    ],
    "explain": [("RUN", "zzz"), ("RUN", "--update", "1"), ("RUN", "--recipe", "own", "--n", "2")],
    "replay agent": [
        ("RUN", "--agent", "BROKEN.py:x"),
        ("RUN", "zzz"),
        ("RUN", "--jobs", "0"),
        ("RUN", "--times", "2"),
    ],
    "replay env": [("RUN", "--env", "BROKEN.py:x"), ("RUN", "--times", "0"), ("RUN", "--turn", "0")],
    "replay rewards": [
        ("RUN",),
        ("RUN", "--reward", "BROKEN.py:x"),
        ("RUN", "--reward", CLOSE, "--layer", "x", "--against", CLOSE),
        ("RUN", "--reward", CLOSE, "--layer", "x", "--jobs", "2"),
    ],
    "replay model": [
        ("TRAINED", "--model", "EMPTY"),
        ("TRAINED", "--model", "NOWHERE"),
        ("TRAINED", "--tolerance", "-1"),
    ],
    "branch": [("RUN", "zzz", "--at", "0")],
    "diff": [("RUN", "NOWHERE"), ("RUN:zzz", "RUN:yyy")],
    "verify": [("RUN", "--pin", "nonsense"), ("RUN", "--jobs", "0"), ("RUN", "--jobs", "x")],
    "reproduce": [("TRAINED", "nope")],
    "scores": [("RUN", "--split", "nope"), ("RUN", "--k", "0")],
    "explain --recipe": [
        ("TRAINED", "--recipe", "WORDS.yaml"),
        ("TRAINED", "--recipe", "BROKEN.yaml"),
        ("TRAINED", "--recipe", "own", "--png", "NOWHERE/x.png"),
        ("TRAINED", "--recipe", "own", "--html", "EMPTY"),
        ("TRAINED", "--recipe", "own", "--update", "99"),
        ("TRAINED", "--recipe", "own", "--policy", "nobody"),
    ],
    "audit": [("RUN", "--markdown", "NOWHERE/x.md"), ("RUN", "--limit", "0")],
    "check engine": [
        ("BROKEN.py:x",),
        (f"{EXAMPLE}:player", "--timeout", "0"),
        (f"{EXAMPLE}:x", "--weights", "NOWHERE"),
    ],
    "check model": [("NOWHERE",), ("RUN",), ("NOWHERE", "--set", "typo=1")],
    "check env": [
        ("BROKEN.py:x", "--tasks", TASKS, "--actions", f"{EXAMPLE}:blindly"),
        (DIGITS, "--tasks", "BROKEN.jsonl", "--actions", f"{EXAMPLE}:blindly"),
    ],
    "export": [
        ("RUN", "NEW.jsonl", "--split", "nope"),
        ("RUN", "FILE"),
        ("RUN", "NEW.jsonl", "--tokenizer", "EMPTY"),
        ("RUN", "NEW.jsonl", "--split", "nope", "--format", "sft"),
    ],
    "import": [("BROKEN.jsonl", "OUT", "--format", "sft"), ("NOWHERE", "OUT", "--format", "sft")],
}
CASES = [(verb, (run, *more)) for verb, more in READS.items() for run in EVERY_RUN if (verb, run) != ("view", "EMPTY")]
"""`view` waits for the first run in an empty folder (tests/tapes/view/test_runs.py)."""
CASES += [(verb, words) for verb, every in OTHERS.items() for words in every]


@pytest.fixture(scope="module")
def there(trained: Path, model: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("given")
    (folder / "empty").mkdir()
    (folder / "file").write_text("mine")
    for name, text in (
        ("broken.yaml", "recipe: [grpo\n"),
        ("words.yaml", "recipe: grpo\nchanges: {weigh: {kind: no}}"),
        ("broken.py", "def x(:\n"),
        ("broken.jsonl", "{not json\n"),
    ):
        (folder / name).write_text(text)
    run = str(folder / "run")
    assert main(["run", *SCENE, "--out", run, *POLICY, "--set", "count=2"]) == 0
    names = {
        word: str(folder / word.lower())
        for word in ("NOWHERE", "FILE", "EMPTY", "BROKEN", "WORDS", "NEW", "VIEW", "OUT")
    }
    return {"RUN": run, "TRAINED": str(trained), "MODEL": model, **names}


def test_every_verb_is_asked():
    assert {name.partition(" --")[0] for name in (*READS, *OTHERS)} == set(commands())


@pytest.mark.parametrize(("verb", "words"), CASES, ids=[" ".join(map(str, (v, *w)))[:80] for v, w in CASES])
def test_what_makes_no_sense_ends_with_64(
    verb: str, words: tuple[str, ...], there: dict[str, str], capsys: pytest.CaptureFixture[str]
):
    given = []
    for word in words:
        name = next((name for name in there if word.startswith(name)), None)
        given.append(word if name is None else there[name] + word.removeprefix(name))
    if "--out" not in given and verb in ("demo", "run", "train", "serve gateway"):
        given += ["--out", there["OUT"]]
    code = main([*verb.partition(" --")[0].split(), *given])
    out, err = capsys.readouterr()
    assert (code, out) == (64, ""), err
    assert "Traceback" not in err
    assert "Error: [Errno" not in err
    assert err.strip().splitlines()[-1]
    assert not Path(there["OUT"]).exists()
    assert not Path(there["VIEW"]).exists()
