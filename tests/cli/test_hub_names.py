"""Names of the Hugging Face hub as models and datasets, on the command line, each in a process with its own cache.

The cache is made here in the hub's layout, and `HF_HUB_OFFLINE` is set: no test touches the network.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import tapereel as tr
from tapereel.cli import main
from tapereel.finetune.api.run_handle import engine_settings
from tapereel.tapes.common import model_folder
from tapereel.tapes.common.hub import NotFound
from tapereel.tapes.errors import UsageError
from tapereel.tapes.store import Store

ROOT = Path(__file__).resolve().parents[2]
DIGITS = str(ROOT / "examples" / "digits.py")
SCENE = ("--agent", f"{DIGITS}:player", "--env", f"{DIGITS}:Digits", "--tasks", f"{DIGITS}:tasks")
SHORT = ("loop.updates=1", "loop.groups=4", "loop.group_size=8", "evaluation.fraction=0")
FIRST, SECOND = "0123456789abcdef0123456789abcdef01234567", "89abcdef0123456789abcdef0123456789abcdef"
GSM = """---
configs:
- config_name: main
  data_files:
  - split: train
    path: main/train-*
  - split: test
    path: main/test-*
- config_name: socratic
  data_files:
  - split: train
    path: socratic/train-*
---
"""


def repository(home: Path, kind: str, name: str, commit: str, ref: str = "main") -> Path:
    """An empty snapshot in the hub's cache below `home`."""
    at = home / "hub" / f"{kind}s--{name.replace('/', '--')}"
    (at / "refs").mkdir(parents=True, exist_ok=True)
    (at / "refs" / ref).write_text(commit)
    folder = at / "snapshots" / commit
    folder.mkdir(parents=True)
    return folder


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache with the model org/tiny (main, and v1 with other weights) and the dataset openai/gsm8k."""
    home = tmp_path_factory.mktemp("hf")
    for seed, (commit, ref) in enumerate([(FIRST, "main"), (SECOND, "v1")]):
        folder = repository(home, "model", "org/tiny", commit, ref)
        tr.save_tiny_model(folder, alphabet="0123456789", size="micro", seed=seed)
    data = repository(home, "dataset", "openai/gsm8k", FIRST)
    (data / "README.md").write_text(GSM)
    for config, split in (("main", "train"), ("main", "test"), ("socratic", "train")):
        rows = [{"question": f"{config} {split} {k}?", "answer": str(k)} for k in range(6)]
        (data / config).mkdir(exist_ok=True)
        table = __import__("datasets").Dataset.from_list(rows)
        table.to_parquet(str(data / config / f"{split}-00000-of-00001.parquet"))
    return home


def tapereel(home: Path, cwd: Path, *words: str, code: str = "") -> subprocess.CompletedProcess[str]:
    """The command in a process of its own; `code` runs after it."""
    script = (
        f"import sys\nfrom tapereel.cli.command import main\nended = main({list(words)!r})\n{code}\nsys.exit(ended)"
    )
    env = {**os.environ, "HF_HOME": str(home), "HF_HUB_OFFLINE": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    return subprocess.run([sys.executable, "-c", script], cwd=cwd, env=env, capture_output=True, text=True, timeout=900)


def sets(*pairs: str) -> list[str]:
    return [word for pair in pairs for word in ("--set", pair)]


def base_of(run: Path) -> str:
    """The digest of the weights that a run began with."""
    return json.loads((run / "results.json").read_text())["base"]


def test_a_model_of_the_hub_is_trained_by_its_id_and_revision(home: Path, tmp_path: Path) -> None:
    named = {"a": "org/tiny", "b": "org/tiny@v1", "c": f"org/tiny@{FIRST}"}
    code = f"""
for out, model in {named!r}.items():
    print(main(["train", *{SCENE!r}, "--model", model, "--out", out, *{sets(*SHORT)!r}]))
# The run's own tokenizer is found again by the recorded name.
print(main(["replay", "model", "a"]))
"""
    done = tapereel(home, tmp_path, "--version", code=code)
    assert [line for line in done.stdout.splitlines() if line in ("0", "1", "64")] == ["0"] * 4, done.stderr
    for out, model in named.items():
        assert f"model: {model}" in (tmp_path / out / "config.yaml").read_text()
    assert base_of(tmp_path / "a") == base_of(tmp_path / "c") != base_of(tmp_path / "b")


def test_a_folder_named_like_an_id_is_trained(tmp_path: Path) -> None:
    tr.save_tiny_model(tmp_path / "Qwen" / "Qwen3-0.6B", alphabet="0123456789", size="micro")
    done = tapereel(tmp_path, tmp_path, "train", *SCENE, "--model", "Qwen/Qwen3-0.6B", "--out", "r", *sets(*SHORT))
    assert done.returncode == 0, done.stderr


MISSING = {
    "Qwen/Qwen3-0.6B": "'Qwen/Qwen3-0.6B'",
    "Qwen/Qwen3-0.6B@main": "`hf download Qwen/Qwen3-0.6B`",
    "org/tiny@v2": "'org/tiny@v2'",
    "nowhere": "'nowhere'",
    "./nowhere": "'./nowhere'",
    "a/b/c": "org/name@revision",
    "org/ti ny": "'org/ti ny'",
}


@pytest.mark.parametrize("verb", ["train", "run"])
def test_a_model_that_is_not_here_is_one_sentence_before_torch(home: Path, tmp_path: Path, verb: str) -> None:
    code = f"""
for model in {list(MISSING)!r}:
    print(main([{verb!r}, *{SCENE!r}, "--model", model, "--out", "r"]))
print([name for name in ("torch", "transformers", "datasets") if name in sys.modules])
"""
    done = tapereel(home, tmp_path, "--version", code=code)
    *codes, imported = done.stdout.splitlines()[1:]
    assert (codes, imported) == (["64"] * len(MISSING), "[]"), done.stderr
    for line, says in zip(done.stderr.strip().splitlines(), MISSING.values(), strict=True):
        assert says in line
    assert not (tmp_path / "r").exists()


@pytest.mark.timeout(900)
@pytest.mark.parametrize("wrong", ["runs/tinyy", "rnus/tiny", "runs/deep/modle", "{root}/runs/tinyy"])
def test_a_mistyped_folder_is_answered_with_the_folder_that_is_there(
    wrong: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.chdir(tmp_path)
    for name in ("tiny", "deep/model", "other"):
        (tmp_path / "runs" / name).mkdir(parents=True)
    (tmp_path / "runs" / "tinny").write_text("a file")
    with pytest.raises(UsageError) as refused:
        model_folder(wrong.format(root=tmp_path))
    meant = "runs/deep/model" if "modle" in wrong else "runs/tiny"
    assert str(refused.value).endswith(f"{tmp_path / meant if 'root' in wrong else meant}?")
    with pytest.raises(UsageError) as refused:
        model_folder("nothing/alike")
    assert "?" not in str(refused.value)


def test_a_model_of_the_hub_serves_every_verb_and_function(home: Path, tmp_path: Path) -> None:
    code = f"""
import tapereel as tr
from tapereel.envs.load_named import load_named
from tapereel.envs.rewards.local_models import LocalReward
scene = [load_named({DIGITS!r} + name) for name in (":player", ":Digits", ":tasks")]
made = tr.run(*scene, "org/tiny", out="python", settings={{"count": 2}})
print(made.summary.episodes, LocalReward("org/tiny").folder.endswith({FIRST!r}))
sets = {{"loop.groups": 4, "loop.group_size": 8, "evaluation.fraction": 0}}
print(tr.train(*scene, "org/tiny", out="trained", updates=1, settings=sets).summary.updates)
scripted = {sets('engine.answers=["7"]', "engine.tokenizer=org/tiny", "count=2")!r}
print(main(["run", *{SCENE!r}, "--out", "scripted", *scripted]))
"""
    done = tapereel(home, tmp_path, "run", *SCENE, "--model", "org/tiny", "--out", "r", *sets("count=2"), code=code)
    assert done.returncode == 0, done.stderr
    said = [line for line in done.stdout.splitlines() if line in ("2 True", "1", "0")]
    assert said == ["2 True", "1", "0"], done.stderr


WORLD = """
from tapereel.agents import ChatAgent
from tapereel.envs import Outcome
from tapereel.envs.adapters.tools import ToolEnvironment

agent = ChatAgent()


class Sums(ToolEnvironment):
    def __init__(self):
        super().__init__([])

    async def answered(self, text):
        return Outcome(reward=float(text == self.task.private["answer"]), terminated=True)
"""


def rolled(home: Path, cwd: Path, tasks: str, *pairs: str) -> subprocess.CompletedProcess[str]:
    (cwd / "world.py").write_text(WORLD)
    words = ("--agent", "world.py:agent", "--env", "world.py:Sums", "--tasks", tasks, "--out", "r", "--json")
    return tapereel(home, cwd, "run", *words, *sets('engine.answers=["3"]', *pairs))


@pytest.mark.parametrize(("more", "question"), [((), "main train"), (("dataset.split=test",), "main test")])
def test_a_dataset_of_the_hub_is_tasks_by_its_id(
    home: Path, tmp_path: Path, more: tuple[str, ...], question: str
) -> None:
    done = rolled(home, tmp_path, "openai/gsm8k", "dataset.columns={prompt: question, answer: answer}", *more)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert (found["tasks"], found["scored"], found["reward"]) == (6, 6, pytest.approx(1 / 6))
    with Store.open(tmp_path / "r") as store:
        assert question in store.tape(store.summaries()[0].id)[0].text


UNREADABLE = [
    ("openai/gsm9k", (), "'openai/gsm9k' (split 'train')"),
    ("openai/gsm8k", ("dataset.split=dev",), "split 'dev'"),
    ("openai/gsm8k", ("dataset.config=French",), "French"),
    ("openai/gsm8k@v9", (), "'openai/gsm8k@v9'"),
    ("openai/gsm8k", ("dataset.columns.prompt=query",), "'query'"),
    ("openai/gsm8k", ("dataset.columns.prompt=question", "task_row=m:f"), "task_row=m:f"),
]


def test_a_dataset_that_cannot_be_read_is_one_sentence(home: Path, tmp_path: Path) -> None:
    (tmp_path / "m.py").write_text("def f(row): return row")
    (tmp_path / "world.py").write_text(WORLD)
    scene = ["--agent", "world.py:agent", "--env", "world.py:Sums", "--out", "r", *sets('engine.answers=["3"]')]
    calls = [["run", *scene, "--tasks", tasks, *sets(*more)] for tasks, more, _ in UNREADABLE]
    done = tapereel(home, tmp_path, "--version", code=f"for words in {calls!r}: print(main(words))")
    assert done.stdout.splitlines()[1:] == ["64"] * len(calls), done.stderr
    for line, (_, _, says) in zip(done.stderr.strip().splitlines(), UNREADABLE, strict=True):
        assert says in line


def test_local_datasets_and_chat_prompts_are_mapped_by_the_same_setting(home: Path, tmp_path: Path) -> None:
    rows = [{"prompt": [{"role": "user", "content": f"{k}?"}], "solution": str(k)} for k in range(4)]
    (tmp_path / "tasks.jsonl").write_text("\n".join(map(json.dumps, rows)))
    from datasets import Dataset

    Dataset.from_list(rows).save_to_disk(str(tmp_path / "saved"))
    for tasks in ("tasks.jsonl", "saved"):
        done = rolled(home, tmp_path, tasks, "dataset.columns={prompt: prompt, answer: solution}")
        assert done.returncode == 0, done.stderr
        assert json.loads(done.stdout)["reward"] == pytest.approx(1 / 4)
        __import__("shutil").rmtree(tmp_path / "r")


def test_held_out_tasks_take_the_columns_of_the_others(home: Path, tmp_path: Path) -> None:
    (tmp_path / "world.py").write_text(WORLD)
    words = ("--agent", "world.py:agent", "--env", "world.py:Sums", "--tasks", "openai/gsm8k", "--model", "org/tiny")
    held_out = ("evaluation.tasks=openai/gsm8k@main", "evaluation.dataset.split=test", "loop.updates=0")
    columns = "dataset.columns={prompt: question, answer: answer}"
    done = tapereel(home, tmp_path, "train", *words, "--out", "r", "--json", *sets(columns, *held_out))
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["held_out"]["n"] == 6


def test_conversations_in_the_form_of_trl_are_imported_with_their_tools(tmp_path: Path) -> None:
    schema = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
    call = {"type": "function", "function": {"name": "add", "arguments": {"a": 2}}}
    user, answer = {"role": "user", "content": "2?"}, {"role": "assistant", "content": "2"}
    calling = {"role": "assistant", "content": "", "tool_calls": [call]}
    result = {"role": "tool", "name": "add", "content": "2"}
    rows = [
        {"prompt": "2?", "completion": "2"},
        {"prompt": [user], "completion": [answer], "tools": [schema]},
        {"messages": [user, calling, result, answer], "tools": [schema]},
        {"messages": [user, calling, result, answer], "tools": json.dumps([schema])},
    ]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    assert main(["import", str(tmp_path / "rows.jsonl"), str(tmp_path / "r"), "--format", "sft"]) == 0
    with Store.open(tmp_path / "r") as store:
        tapes = [store.tape(summary.id) for summary in store.summaries()]
    offered = [tape.calls[0].tools.schemas if tape.calls[0].tools else None for tape in tapes]
    assert sorted(map(repr, offered)) == sorted(map(repr, [None, *[(schema,)] * 3]))


@pytest.mark.parametrize("name", ["openai/gpt-oss-20b", "gpt-4o-mini", "openrouter/qwen/qwen3-8b", "Qwen/Qwen3-0.6B"])
def test_a_name_is_the_hubs_whether_litellm_knows_its_first_part_or_not(name: str, tmp_path: Path) -> None:
    assert engine_settings(name) == [("engine.kind", "embedded"), ("engine.model", name)]
    assert engine_settings(f"litellm:{name}") == [("engine.kind", "litellm"), ("engine.model", name)]
    for call in (tr.run, tr.train):
        with pytest.raises(NotFound, match=f"litellm:{name}"):
            call(tr.ChatAgent(), f"{DIGITS}:Digits", [1], name, out=tmp_path / "r")
    with pytest.raises(UsageError, match=r"warm\.tapes"):
        tr.train(tr.ChatAgent(), f"{DIGITS}:Digits", [1], f"litellm:{name}", out=tmp_path / "r")
