"""The configurations for real models run whole: with tiny models of their architecture, on rows in the dataset's form.

Only paths and sizes differ from what a user runs.
"""

from __future__ import annotations

import asyncio
import json
import random
import runpy
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

import tapereel as tr
from tapereel.agents.vision import save_tiny_vision
from tapereel.cli import main
from tapereel.envs import Rewards
from tapereel.envs.rewards import rewarded
from tapereel.tapes import Status, Task
from tapereel.tapes.store import Store

torch = pytest.importorskip("torch")
from transformers import Qwen3Config, Qwen3ForCausalLM  # noqa: E402

from ..agents.families import tokenizer  # noqa: E402
from ..envs.remote.process import Served  # noqa: E402
from ..front.making import sampled_tape  # noqa: E402

pytestmark = pytest.mark.docs

ROOT = Path(__file__).resolve().parents[2]
SMALL = {
    "trainer.device": "cpu",
    "engine.slots": "32",
    "engine.capacity": "256",
    "loop.updates": "2",
    "loop.groups": "2",
    "loop.max_concurrent": "16",
    "loop.sampling.max_tokens": "24",
    "loop.checkpoint_every": "1",
    "evaluation.limit": "2",
    "evaluation.every": "1",
}


@pytest.fixture(scope="module")
def gsm8k(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A dataset in the layout and with the columns of openai/gsm8k, whose questions only luck answers."""
    from datasets import Dataset

    folder = tmp_path_factory.mktemp("gsm8k")
    (folder / "main").mkdir()
    for split, first in (("train", 0), ("test", 8)):
        rows = [
            {
                "question": f"Ann has {k} pears and buys some. How many?",
                "answer": f"<<{k}+1={k + 1}>>\n#### {k % 2 + 1}",
            }
            for k in range(first, first + 8)
        ]
        Dataset.from_list(rows).to_parquet(str(folder / "main" / f"{split}-00000-of-00001.parquet"))
    files = "".join(f"  - split: {split}\n    path: main/{split}-*\n" for split in ("train", "test"))
    (folder / "README.md").write_text(f"---\nconfigs:\n- config_name: main\n  data_files:\n{files}---\n")
    return folder


def save_qwen3(folder: Path, thought: str) -> None:
    """A tiny Qwen3 that answers `\\boxed{1}` or `\\boxed{2}`, each about half of the time, after `thought`."""
    made = tokenizer("qwen3")
    rng, ids = random.Random(0), made.get_vocab()
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=len(made),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        initializer_range=0.1,
        bos_token_id=None,
        eos_token_id=ids["<|im_end|>"],
        pad_token_id=ids["<|endoftext|>"],
    )
    model = Qwen3ForCausalLM(config)
    optimiser = torch.optim.AdamW(model.parameters(), lr=5e-3)
    for _ in range(150):
        rows = []
        for _ in range(8):
            # Behind anything, so that the system prompt and the question don't change the answer.
            anything = rng.choices(range(len(made)), k=rng.randrange(32, 64))
            head = made.encode("many?<|im_end|>\n<|im_start|>assistant\n")
            rows.append(anything + head + made.encode(f"{thought}\\boxed{{{rng.choice('12')}}}<|im_end|>"))
        batch = torch.tensor([row[-min(map(len, rows)) :] for row in rows])
        loss = model(input_ids=batch, labels=batch).loss
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    model.eval().save_pretrained(folder)
    made.save_pretrained(folder)


@pytest.mark.parametrize(
    ("name", "thought"),
    [
        ("qwen3_0.6b", "<think>\n\n</think>\n\n"),
        ("qwen3_4b", "<think>\nIt is 2.\n</think>\n\n"),
        ("qwen3_4b_8_gpus", "<think>\nIt is 2.\n</think>\n\n"),
    ],
)
def test_a_configuration_trains_a_tiny_model_of_its_architecture(
    name: str,
    thought: str,
    gsm8k: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    save_qwen3(tmp_path / "model", thought)
    monkeypatch.chdir(ROOT)  # where the files of `examples` are named from
    paths = {"engine.model": str(tmp_path / "model"), "tasks": str(gsm8k), "evaluation.tasks": str(gsm8k)}
    run, servers = tmp_path / "run", tmp_path / "servers.txt"
    with ExitStack() as stack:
        if name == "qwen3_4b_8_gpus":
            options = ("--engine", "embedded", "--slots", "16")
            served = Served(str(tmp_path / "model"), tmp_path / "log", *options, verb="serve model")
            servers.write_text(stack.enter_context(served).url)
            # The server has no route for `transfer`, which is vLLM's.
            paths |= {"engine.urls": f"file:{servers}", "engine.weights": "reload"}
        sets = [word for key, value in {**SMALL, **paths}.items() for word in ("--set", f"{key}={value}")]
        assert main(["train", "--config", f"examples/{name}.yaml", "--out", str(run), "--json", *sets]) == 0
    printed: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert printed["updates"] == 2
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text("utf-8").splitlines()]
    assert any(line.get("grad_norm") for line in lines), "no update moved the weights"
    with Store.open(run) as store:
        tapes = list(store.tapes(closed=True))
    asked = {
        held_out: {str(tape[0]) for tape in tapes if held_out == ("eval" in tape.begin.split)}
        for held_out in (False, True)
    }
    assert all(int(question.split()[2]) // 8 == held_out for held_out in asked for question in asked[held_out])
    assert all(asked.values()), "train and test splits were both asked"
    # Episodes that are in flight when training ends are cancelled, and have no reward.
    ended = [tape for tape in tapes if tape.status is not Status.CANCELLED]
    assert {tape.reward for tape in ended} == {0.0, 1.0}


@pytest.fixture(scope="module")
def geometry3k(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A dataset in the layout and with the columns of hiyouga/geometry3k."""
    from datasets import Dataset, Features, Image, List, Value
    from PIL import Image as Pillow

    folder = tmp_path_factory.mktemp("geometry3k")
    features = Features({"images": List(Image()), "problem": Value("string"), "answer": Value("string")})
    for split, first in (("train", 0), ("test", 4)):
        rows = [
            {
                "images": [Pillow.new("RGB", (24, 16), (60 * k, 0, 0))],
                "problem": f"<image>Find x, {k}.",
                "answer": "2 \\sqrt { 221 }",
            }
            for k in range(first, first + 4)
        ]
        Dataset.from_list(rows, features=features).to_parquet(str(folder / f"{split}-00000-of-00001.parquet"))
    return folder


def test_the_configuration_with_pictures_trains_a_tiny_model_of_its_architecture(
    geometry3k: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    save_tiny_vision(tmp_path / "model", "qwen3_vl")
    monkeypatch.chdir(ROOT)
    paths = {"engine.model": str(tmp_path / "model"), "tasks": str(geometry3k), "evaluation.tasks": str(geometry3k)}
    # The untrained model is never right. An entropy bonus trains on groups whose rewards are all 0.
    bonus = {"loop.changes.regulariser": '[{"kind": "entropy", "coefficient": 0.05}]', "loop.updates": "1"}
    sets = [word for key, value in {**SMALL, **paths, **bonus}.items() for word in ("--set", f"{key}={value}")]
    run = tmp_path / "run"
    words = ["train", "--config", "examples/qwen3_vl_2b.yaml", "--out", str(run), "--json", *sets]
    assert main([*words, "--dry-run"]) == 0
    assert json.loads(capsys.readouterr().out)["task_row"] == "examples/geometry.py:task"
    assert main(words) == 0
    assert json.loads(capsys.readouterr().out)["updates"] == 1
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text("utf-8").splitlines()]
    assert any(line.get("grad_norm") for line in lines), "no update moved the weights"
    with Store.open(run) as store:
        ended = [tape for tape in store.tapes(closed=True) if tape.status is not Status.CANCELLED]
    assert {(len(tape[0].pictures), "<image>" in str(tape[0]), tape.reward) for tape in ended} == {(1, False, 0.0)}


def test_the_answer_to_a_figure_is_compared_as_mathematics() -> None:
    scene = runpy.run_path(str(ROOT / "examples" / "geometry.py"))
    private = {"answer": "2 \\sqrt { 221 }"}
    answers = {"So \\boxed{2\\sqrt{221}}": 1.0, "So \\boxed{\\sqrt{884}}": 1.0, "So \\boxed{221}": 0.0, "No.": 0.0}
    for answer, score in answers.items():
        env = rewarded(scene["Figure"], Rewards([scene["correct"]]))
        task = Task(public={"prompt": "Find x."}, private=private)
        tape = asyncio.run(tr.rollout(scene["agent"], env, task, engine=tr.ScriptedEngine([answer])))
        assert tape.reward == score, answer


def test_a_thought_that_was_cut_off_is_no_answer() -> None:
    scene = runpy.run_path(str(ROOT / "examples" / "gsm8k.py"))
    tape = sampled_tape("<think>\nIt is 72", logprobs=None)
    assert scene["after_thought"](tape) == ""
    assert scene["after_thought"](sampled_tape("<think>5</think>\\boxed{72}", logprobs=None)) == "\\boxed{72}"
    assert scene["after_thought"](sampled_tape("It is 72.", logprobs=None)) == "It is 72."
