"""Every example runs, in a process of its own as a reader would start it, and does what it says."""

from __future__ import annotations

import json
import math
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import tapereel as tr

pytestmark = pytest.mark.docs

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
ELSEWHERE = {
    "gateway_openai.py": "tests/agents/gateway/test_examples.py",
    "gateway_scene.py": "tests/agents/gateway/test_examples.py",
    "gateway_pydantic_ai.py": "tests/agents/gateway/test_examples.py",
    "gateway_agents_sdk.py": "tests/contract/test_clients.py",
    "gateway_clients.py": "tests/contract/test_clients.py",
    "estimators.py": "tests/examples/test_estimators.py",
    "gymnasium_blackjack.py": "tests/envs/test_example.py",
    "geometry.py": "tests/examples/test_configurations.py",
    "gsm8k.py": "tests/examples/test_configurations.py",
    "two_agents.py": "tests/finetune/run/test_players_learn.py",
}


def started(name: str, *words: str, cwd: Path) -> str:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [sys.executable, "-W", "error", str(EXAMPLES / name), *words],
        cwd=cwd,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


def test_first_letter(tmp_path: Path):
    """With a model that knows nothing. tests/contract/smollm_run.py trains SmolLM2-135M on it."""
    out = started("first_letter.py", tr.save_tiny_model(tmp_path / "model", size="micro"), cwd=tmp_path)
    assert re.search(r"^0\.0\d* -> 0\.0\d*$", out, re.MULTILINE)
    assert tr.open(tmp_path / "runs" / "first-letter").verify().verdict == "holds"


def test_what_pretrained_models_learn_is_measured_once_and_tabled(tmp_path: Path):
    """docs/project/learning.md. A tiny model without the profile of pretrained ones learns nothing."""
    model, docs = tr.save_tiny_model(tmp_path / "model", size="micro"), tmp_path / "docs"
    (docs / "project").mkdir(parents=True)
    (docs / "project" / "learning.md").write_text(
        "x\n<!-- pretrained models -->\n<!-- end of pretrained models -->\ny\n"
    )
    words = ["--model", model, "--arm", "all", "--seed", "1", "--updates", "1", "--set", "evaluation.limit=4"]
    script, out = str(EXAMPLES.parent / "benchmarks" / "pretrained.py"), tmp_path / "out"
    for tasks in (["letter"], ["letter", "price"]):  # the second call finds the first run there
        printed = started(script, *words, "--task", *tasks, "--out", str(out), "--docs", str(docs), cwd=tmp_path)
    rows = [line for line in printed.splitlines() if line.startswith("| ")][2:]
    assert [row.split(" | ")[0] for row in rows] == ["| letter", "| price"]
    assert all(row in (docs / "project" / "learning.md").read_text() for row in rows)
    assert len(list(out.iterdir())) == 3
    assert (docs / "first-letter.png").stat().st_size > 1000


def test_hello(tmp_path: Path):
    out = started("hello.py", cwd=tmp_path)
    assert out.splitlines() == [
        "hint: I think of a number from 1 to 9.",
        "guess: 5",
        "hint: higher",
        "guess: 8",
        "hint: lower",
        "guess: 7",
        "finished 0.8",
    ]


def test_the_agent_of_an_mcp_server_looks_a_word_up(tmp_path: Path):
    pytest.importorskip("mcp")
    out = started("mcp_agent.py", cwd=tmp_path)
    assert out.splitlines()[0] == "tool_offer: What is the code of birch? Look it up, and answer with the code alone."
    assert out.splitlines()[-2:] == ["answer: 0815", "finished 1.0"]


@pytest.fixture(scope="module")
def flat() -> dict[str, Any]:
    torch = pytest.importorskip("torch")
    torch.set_num_threads(1)
    return runpy.run_path(str(EXAMPLES / "flat_grpo.py"))


def test_flat_grpo_tells_each_update(tmp_path: Path):
    out = started("flat_grpo.py", "--tiny", "--updates", "3", cwd=tmp_path)
    assert re.fullmatch(r"(update +\d  reward \d\.\d{3}  tries \d\.\d\d\n){3}", out)


def test_flat_grpo_gives_the_same_numbers_again(flat: dict[str, Any]):
    size = {"groups": 3, "size": 4, "model_size": "micro"}
    first = flat["train"](3, **size)
    assert flat["train"](3, **size) == first
    assert flat["train"](3, **size, seed=1) != first


def test_flat_grpo_raises_what_was_better_than_its_group_and_lowers_what_was_worse(flat: dict[str, Any]):
    torch = pytest.importorskip("torch")
    tokenizer = flat["char_tokenizer"]("0123456789?<>")
    model = flat["tiny_model"](tokenizer, "micro", seed=0, context=32)
    engine = flat["BatchedEngine"](model, flat["Renderer"](tokenizer))
    (tapes,) = flat["groups_of"](engine, 1, 24, seed=1)
    assert {tape.status for tape in tapes} == {"finished"}
    scores = flat["advantages"](tapes)
    assert sum(scores) == pytest.approx(0.0, abs=1e-6)
    assert any(scores)
    batch = [(row, a) for tape, a in zip(tapes, scores, strict=True) for row in flat["rows"](tape)]
    loss = flat["grpo_loss"](model, batch)
    # At the weights that sampled, every ratio is 1, so the loss is minus the mean advantage over own tokens.
    own = sum(len(row.own) for row, _ in batch)
    assert float(loss.detach()) == pytest.approx(-sum(a * len(row.own) for row, a in batch) / own, abs=1e-4)
    loss.backward()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter -= 1e-2 * parameter.grad
        assert float(flat["grpo_loss"](model, batch)) < float(loss)


def test_the_digits_save_a_model_that_the_command_takes(tmp_path: Path):
    started("digits.py", str(tmp_path / "m"), cwd=tmp_path)
    assert {"config.json", "model.safetensors", "tokenizer.json", "chat_template.jinja"} <= {
        path.name for path in (tmp_path / "m").iterdir()
    }


def test_dpo_learns_which_answer_is_preferred(tmp_path: Path):
    tr.save_tiny_model(tmp_path / "model", alphabet="abcd", size="micro")
    pairs = [{"prompt": p, "chosen": p * 2, "rejected": "d"} for p in "abc"]
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in pairs), encoding="utf-8")
    out = started("dpo.py", "model", "pairs.jsonl", "out", cwd=tmp_path).splitlines()
    losses = [float(line.split()[3]) for line in out]
    assert len(out) == 20
    assert losses[0] == pytest.approx(math.log(2), abs=1e-4)
    assert losses == sorted(losses, reverse=True)
    assert out[-1].endswith("preferred 1.00")
    assert (tmp_path / "out" / "model" / "model.safetensors").is_file()
    assert len(tr.open(tmp_path / "out" / "run").tapes()) == 6


def test_each_example_has_a_test_and_a_line_in_the_readme():
    names = {path.name for path in EXAMPLES.glob("*.py")}
    tested = set(re.findall(r'"(\w+\.py)"', Path(__file__).read_text(encoding="utf-8")))
    assert names <= tested
    assert all((EXAMPLES.parent / test).is_file() for test in ELSEWHERE.values())
    readme = (EXAMPLES / "README.md").read_text(encoding="utf-8")
    assert [name for name in sorted(names) if name not in readme] == []
