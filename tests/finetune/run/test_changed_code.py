"""A run that is resumed with changed code says so, and records from which update the new code counts."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import tapereel as tr
from tapereel.agents.setup.code_digest import digest_of
from tapereel.cli import main
from tapereel.finetune.run import TrainSummary
from tapereel.tapes.store import Results
from tapereel.tapes.store.run_directory import code_changes

WORLD = """
import tapereel as tr
from tapereel.envs import Rewards
import changing_parts
from tapereel.tapes import Answer

SCALE = 1.0

def exact(tape):
    return SCALE * changing_parts.score(tape.actions[-1].text, tape.begin.task.private)

class Digits(tr.Environment):
    rewards = Rewards([exact])

    async def reset(self, task):
        return str(task)

    async def step(self, action):
        return tr.Outcome(terminated=True)

class Player(tr.Agent):
    async def act(self, tape, llm):
        yield Answer(text=(await llm(tape)).text)
"""
PARTS = "def score(text, task):\n    return float(text == str(task))\n"
SETTINGS = {"loop.sampling.max_tokens": 1, "loop.groups": 2, "loop.group_size": 4, "limits.turns": 1}


def world(folder: Path, text: str = WORLD, parts: str = PARTS) -> ModuleType:
    """Write the user's two modules, and import them as a new process would."""
    for name, source in (("changing_parts", parts), ("changing_world", text)):
        (folder / f"{name}.py").write_text(source)
        sys.modules.pop(name, None)
    importlib.invalidate_caches()
    sys.dont_write_bytecode, before = True, sys.dont_write_bytecode
    try:
        return importlib.import_module("changing_world")
    finally:
        sys.dont_write_bytecode = before


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


def train(made: ModuleType, out: Path, updates: int, resume: bool = False) -> TrainSummary:
    model = out.parent / "model"
    if not model.exists():
        tr.save_tiny_model(model, alphabet="0123456789", size="micro")
    settings = {k: v for k, v in SETTINGS.items() if not k.startswith("limits")}
    done = tr.train(
        made.Player, made.Digits, range(10), model, updates=updates, out=out, settings=settings, resume=resume
    )
    assert done.summary is not None
    return done.summary


def test_a_reward_that_changed_before_a_resume(
    folder: Path, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    out = folder / "run"
    train(world(folder), out, 2)
    assert train(world(folder), out, 3, resume=True).code_changes == ()
    assert not [r for r in caplog.records if "changed after" in r.message]

    changed = world(folder, parts=PARTS.replace("float(", "5 * float("))
    (sentence,) = train(changed, out, 5, resume=True).code_changes
    assert any(sentence in record.message for record in caplog.records if record.levelname == "WARNING")
    first, second = Results.read(out).code
    assert (first.updates, first.episodes, first.changed) == (0, 0, ())
    assert (second.updates, second.changed) == (3, ("reward exact",))
    tapes = tr.open(out).tapes()
    assert {tape.reward for tape in tapes[: second.episodes]} <= {0.0, 1.0}
    assert {tape.reward for tape in tapes[second.episodes :]} <= {0.0, 5.0}

    assert code_changes(out) == (sentence,)
    for verb in ("show", "audit"):
        main([verb, str(out), "--json"])
        assert sentence in capsys.readouterr().out
    assert tr.open(out).verify().verdict == "holds"
    assert train(changed, out, 5, resume=True).code_changes == (sentence,)


def test_run_records_it_too(folder: Path) -> None:
    out, script = folder / "run", ["1"]

    def run(made: ModuleType, resume: bool = False) -> Any:
        # A run that is complete records nothing more, so that the second code plays no episode.
        return tr.run(made.Player, made.Digits, range(3), script, out=out, resume=resume).summary

    run(world(folder))
    other = WORLD.replace(".text)\n", ".text.strip())\n")
    assert [one.changed for one in Results.read(out).code] == [()]
    assert "agent" in run(world(folder, other), resume=True).code_changes[0]
    assert Results.read(out).code[-1].episodes == 3


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("SCALE = 1.0", "SCALE = 2.0"),  # a value that the function reads
        ("float(text == str(task))", "float(text != str(task))"),  # a function of another module of the user
        ("return SCALE *", "return 1 +"),
        ("tape.actions[-1]", "tape.actions[0]"),
    ],
)
def test_changes_that_count(folder: Path, old: str, new: str) -> None:
    before = digest_of(world(folder).exact)
    assert (old in WORLD) != (old in PARTS)
    assert digest_of(world(folder, WORLD.replace(old, new), PARTS.replace(old, new)).exact) != before


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("SCALE = 1.0", "\n\n# A comment\nSCALE = 1.0  # the scale"),
        ("class Player", "def other(tape):\n    return 7.0\n\n\nclass Player"),
        ("    return SCALE * ", "    return   SCALE  *  "),
    ],
)
def test_changes_that_do_not_count(folder: Path, old: str, new: str) -> None:
    before = world(folder)
    after = world(folder, WORLD.replace(old, new))
    for name in ("exact", "Digits", "Player"):
        assert digest_of(getattr(before, name)) == digest_of(getattr(after, name))


def test_an_environment_with_arguments_and_a_changed_prompt() -> None:
    def make(reward: float, prompt: str) -> tuple[str, str]:
        return digest_of(lambda: (reward, prompt)), digest_of(tr.ChatAgent(prompt))

    assert make(1.0, "Add.") == make(1.0, "Add.")
    assert make(1.0, "Add.")[0] != make(2.0, "Add.")[0]
    assert make(1.0, "Add.")[1] != make(1.0, "Subtract.")[1]


def test_digests_are_equal_in_other_processes(tmp_path: Path) -> None:
    """Neither the order of sets nor addresses count, nor whether Python compiled the module or read its cache."""
    (tmp_path / "parts.py").write_text(
        "import dataclasses, re\n"
        "WORDS, ROWS = {'a', 'b', 'c'}, [('a', 1), ('a', 1)]\n"
        "@dataclasses.dataclass\nclass Scorer:\n    scale: float = 2.0\n    key: object = object\n"
        "    def __call__(self, tape):\n        return re.sub('x', 'y', 'z') in {'a', 'b', 'q'} or self.scale\n"
        "def f(tape, *, key=object(), size=(1, 2)):\n    return WORDS, ROWS, f, Scorer(), (1, 2)\n"
    )
    program = (
        "import parts\nfrom tapereel.agents.setup.code_digest import digest_of\n"
        "print(digest_of(parts.f, parts.Scorer(), lambda: parts.f))"
    )
    found = [
        subprocess.run(
            [sys.executable, "-c", program],
            env={**os.environ, "PYTHONHASHSEED": str(k), "PYTHONPATH": str(tmp_path)},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for k in (1, 2)
    ]
    assert found[0] == found[1] != ""
