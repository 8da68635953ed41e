"""A run from somewhere else: which commands execute code that its configuration or its files name."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import tapereel as tr
from tapereel.agents.engines.embedded import load_pretrained, load_tokenizer
from tapereel.tapes.errors import UsageError
from tapereel.tapes.store import Store

HERE = Path(__file__).parent
SETTINGS = (
    "loop.updates=2",
    "loop.groups=2",
    "loop.group_size=2",
    "loop.max_lag=0",
    "loop.sampling.max_tokens=1",
    "loop.checkpoint_every=1",
    "loop.keep_checkpoints=3",
    "loop.recipe={foreign}:nudged",
    'rewards=["{foreign}:score"]',
    "evaluation.fraction=0",
)


class Foreign:
    """Two runs whose every name leads to code below them: one of `run`, one of `train`."""

    def __init__(self, folder: Path, verbs: subprocess.Popen[str]) -> None:
        self.folder, self.verbs = folder, verbs
        self.code = folder / "foreign_run_code.py"
        self.rolled, self.trained, self.model = folder / "rolled", folder / "trained", folder / "model"
        shutil.copy(HERE / "foreign_code.py", self.code)
        shutil.copy(HERE / "foreign_code.py", folder / "mine.py")
        self.mine = folder / "mine.py"
        tr.save_tiny_model(self.model, size="micro")
        setup = ["--agent", "{foreign}:player", "--env", "{foreign}:Digits", "--tasks", "{foreign}:tasks"]
        engine = ["--set", "engine.kind={foreign}:engine", "--set", 'rewards=["{foreign}:score"]']
        sets = [word for setting in SETTINGS for word in ("--set", setting)]
        made = self.ask(
            ["run", *setup, *engine, "--out", str(self.rolled)],
            ["train", *setup, "--model", str(self.model), *sets, "--out", str(self.trained)],
        )
        assert [one["code"] for one in made] == [0, 0], made
        with Store.open(self.rolled) as store:
            self.tape = store.summaries()[0].id
        with Store.open(self.trained) as store:
            self.trained_tape = store.summaries()[0].id

    def ask(self, *commands: list[str]) -> list[dict[str, Any]]:
        """What each command did: exit code, whether it executed the run's code, and what it said."""
        names = {
            "{foreign}": self.code,
            "{mine}": self.mine,
            "{rolled}": self.rolled,
            "{trained}": self.trained,
            "{folder}": self.folder,
        }
        names |= {"{tape}": getattr(self, "tape", ""), "{trained_tape}": getattr(self, "trained_tape", "")}

        def filled(word: str) -> str:
            for name, value in names.items():
                word = word.replace(name, str(value))
            return word

        assert self.verbs.stdin is not None
        assert self.verbs.stdout is not None
        found = []
        for words in commands:
            self.verbs.stdin.write(json.dumps([filled(word) for word in words]) + "\n")
            self.verbs.stdin.flush()
            found.append(json.loads(self.verbs.stdout.readline()))
        return found


@pytest.fixture(scope="module")
def foreign(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Foreign]:
    folder = tmp_path_factory.mktemp("foreign")
    mark = folder / "foreign_run_code.executed"
    with subprocess.Popen(
        [sys.executable, str(HERE / "foreign_verbs.py"), str(mark)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=folder,
    ) as verbs:
        yield Foreign(folder, verbs)
        verbs.communicate(timeout=60)


ANY, HOLDS = None, 0
RUNS = ("{rolled}", "{trained}")
READING: list[tuple[list[str], int | None]] = [
    *((["verify", run], HOLDS) for run in RUNS),
    *((["audit", run], ANY) for run in RUNS),
    *((["show", run], HOLDS) for run in RUNS),
    (["show", "{rolled}", "{tape}"], HOLDS),
    (["show", "{trained}", "{trained_tape}"], HOLDS),
    (["diff", "{rolled}", "{trained}"], ANY),
    (["scores", "{rolled}"], HOLDS),
    (["scores", "{trained}", "--against", "{rolled}"], ANY),
    (["explain", "{rolled}"], HOLDS),
    (["explain", "{trained}"], HOLDS),
    (["explain", "{trained}", "{trained_tape}", "--json"], HOLDS),
    (["view", "{trained}", "--out", "{folder}/view-trained.html"], HOLDS),
    (["view", "{rolled}", "--out", "{folder}/view-rolled.html"], HOLDS),
    (["export", "{trained}", "{folder}/out.jsonl", "--format", "sft"], ANY),
]
MINE = ["--agent", "{mine}:player"]
OVERRIDDEN: list[tuple[list[str], int | None]] = [
    (["replay", "agent", "{rolled}", *MINE, "--import", "{mine}:Digits"], HOLDS),
    (["replay", "agent", "{trained}", *MINE], HOLDS),
    (["replay", "agent", "{rolled}", *MINE, "--jobs", "2"], HOLDS),
    (["replay", "agent", "{rolled}", "{tape}", *MINE, "--turn", "0"], HOLDS),
    (["replay", "env", "{rolled}", "--env", "{mine}:Digits"], ANY),
    (["replay", "rewards", "{rolled}", "--reward", "{mine}:score"], HOLDS),
    (["replay", "rewards", "{rolled}", "--reward", "{mine}:score", "--against", "{mine}:score"], HOLDS),
    (["replay", "model", "{trained}"], ANY),
    (["replay", "model", "{trained}", "--model", "{folder}/model"], ANY),
]


def test_reading_executes_nothing(foreign: Foreign) -> None:
    found = foreign.ask(*(words for words, _ in READING))
    assert [words for (words, _), one in zip(READING, found, strict=True) if one["executed"]] == []
    for (words, code), one in zip(READING, found, strict=True):
        assert code in (None, one["code"]), (words, one)
        assert "Traceback" not in one["said"], (words, one)


def test_an_explicit_name_replaces_the_configurations(foreign: Foreign) -> None:
    found = foreign.ask(*(words for words, _ in OVERRIDDEN))
    assert [words for (words, _), one in zip(OVERRIDDEN, found, strict=True) if one["executed"]] == []
    for (words, code), one in zip(OVERRIDDEN, found, strict=True):
        assert code in (None, one["code"]), (words, one)
        assert "Traceback" not in one["said"], (words, one)


TRUSTING: list[list[str]] = [
    ["replay", "env", "{rolled}"],
    ["replay", "agent", "{rolled}"],
    ["branch", "{rolled}", "{tape}", "--at", "0"],
    ["branch", "{rolled}", "{tape}", "--at", "0", *MINE, "--env", "{mine}:Digits", "--set", 'engine.answers=["1"]'],
    ["run", "--config", "{rolled}/config.yaml", "--out", "{rolled}", "--resume"],
    ["train", "--config", "{trained}/config.yaml", "--out", "{trained}", "--resume"],
    ["reproduce", "{trained}"],
    ["explain", "{trained}", "--recipe", "own"],
]
"""What docs/reference/security.md lists as for runs of people you trust. Each shows, too, that the mark is seen."""


def test_what_continues_a_run_executes_what_it_names(foreign: Foreign) -> None:
    found = foreign.ask(*TRUSTING)
    assert [words for words, one in zip(TRUSTING, found, strict=True) if not one["executed"]] == []


def test_python_reads_and_replays_without_the_runs_code(foreign: Foreign) -> None:
    code = """
import tapereel as tr
from tapereel.envs.load_named import load_named
agent, env = load_named("{mine}:player"), load_named("{mine}:Digits")
for path in ("{rolled}", "{trained}"):
    run = tr.open(path)
    run.verify(), run.audit(), run.tapes(), run.scores(), run.reward
    assert run.replay(agent).exit_code == 0, run.replay(agent)
    assert run.replay("{mine}:player").exit_code == 0
assert len(run.dataset()) > 0
"""
    (found,) = foreign.ask(["python:" + code])
    assert (found["code"], found["executed"]) == (0, False), found["said"]


def test_a_replay_without_the_steps_says_how_to_name_them(foreign: Foreign) -> None:
    (foreign.folder / "other.py").write_text(
        "from tapereel.agents import agent\n"
        "@agent\nasync def player(tape, llm):\n    yield (await llm(tape, max_tokens=1)).text\n"
    )
    found = foreign.ask(["replay", "agent", "{rolled}", "--agent", "{folder}/other.py:player", "--json"])
    assert (found[0]["code"], found[0]["executed"]) == (2, False), found
    assert "--import" in found[0]["said"]


def test_explain_names_the_term_that_it_does_not_import(foreign: Foreign) -> None:
    without, named = foreign.ask(
        ["explain", "{trained}", "{trained_tape}"],
        ["explain", "{trained}", "{trained_tape}", "--import", "{foreign}:nudged"],
    )
    assert "imported" in without["said"]
    assert named["executed"]
    assert "imported" not in named["said"]


def test_a_model_folders_own_code_is_not_even_offered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers asks on the terminal whether to run it, unless the answer stands in the call."""
    asked: list[str] = []
    monkeypatch.setattr("builtins.input", lambda text="": asked.append(text) or "y")
    tr.save_tiny_model(tmp_path, size="micro")
    mark = tmp_path / "executed"
    code = f"open({str(mark)!r}, 'w')\nclass Config: pass\nclass Model: pass\nclass Tokens: pass\n"
    (tmp_path / "evil.py").write_text(code)
    own = {"config.json": {"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.Model"}}
    own["tokenizer_config.json"] = {"AutoTokenizer": ["evil.Tokens", "evil.Tokens"]}  # type: ignore[dict-item]
    for name, auto_map in own.items():
        text = json.loads((tmp_path / name).read_text())
        text.pop("tokenizer_class", None)
        (tmp_path / name).write_text(json.dumps({**text, "model_type": "evil", "auto_map": auto_map}))
    for load in (load_tokenizer, load_pretrained):
        with pytest.raises(UsageError):
            load(tmp_path)
    assert (asked, mark.exists()) == ([], False)
