"""A run as a dataset: what a real run records trains at its temperature, from memory, a stream, JSONL and Parquet."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset, IterableDataset
from transformers import AutoModelForCausalLM, AutoTokenizer

import tapereel as tr
from tapereel.agents.rendering import Renderer
from tapereel.cli import main
from tapereel.finetune import (
    RLConfig,
    collate,
    episode_of,
    fill_ref_logprobs,
    populate_rl_data,
    rl_features,
    rl_step,
    rows,
    to_dataset,
)
from tapereel.finetune.interchange import NothingToExport
from tapereel.tapes import NotATape
from tapereel.tapes.errors import UsageError

from ...front.making import played
from ..build import gradient

CONFIG = RLConfig()


class Twice(tr.Environment):
    """Two turns; rewards the share of the task's letter. The task `x` breaks in its second turn."""

    async def reset(self, task: str) -> str:
        self.word, self.turn = task, 0
        return task

    async def step(self, action: tr.Action) -> tr.Outcome:
        self.turn += 1
        if self.word == "x" and self.turn == 2:
            raise RuntimeError("the world broke")
        said = str(action)
        share = said.count(self.word) / max(len(said), 1) + 0.125 * self.turn
        return tr.Outcome(None if self.turn == 2 else "again", reward=share, terminated=self.turn == 2)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    return tr.save_tiny_model(tmp_path_factory.mktemp("model"), alphabet="abx", size="micro")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, folder: Path) -> tr.Run:
    """24 episodes at temperature 0.7, the first token at 2; the answers of some are cut."""
    sampling = {"temperature": 0.7, "first_temperature": 2.0, "max_tokens": 5}
    settings = {f"sampling.{name}": value for name, value in sampling.items()}
    out = tmp_path_factory.mktemp("run") / "run"
    return tr.run(tr.ChatAgent(), Twice, ["a", "b", "x"], str(folder), attempts=8, out=out, settings=settings)


def model_of(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


def stepped(data: Dataset, model: Any, config: RLConfig = CONFIG) -> tuple[float, dict[str, float], list[torch.Tensor]]:
    """(loss, statistics, gradients) of a step on the whole dataset."""
    model.zero_grad()
    loss, stats = rl_step(model, collate(list(populate_rl_data(data, config))), config)
    loss.backward()
    return loss.item(), stats, [p.grad.clone() for p in model.parameters() if p.grad is not None]


@pytest.mark.ledger("T24", "F06", "F08")
def test_a_real_run_trains_at_the_temperatures_that_it_was_sampled_at(run: tr.Run, folder: Path):
    data, model = run.dataset(), model_of(folder)
    assert {round(t, 5) for line in data["temperature"] for t in line if not math.isnan(t)} == {0.7, 2.0}
    loss, stats, grads = stepped(data, model)
    assert stats["ratio_new_old/max"] == pytest.approx(1, abs=1e-4)
    assert stats["ratio_new_old/min"] == pytest.approx(1, abs=1e-4)
    tapes = run.tapes()
    every, episodes = [row for tape in tapes for row in rows(tape)], [episode_of(tape) for tape in tapes]
    broken = [one for one in episodes if not one.trains]
    assert len(broken) >= 8, "the environment's own errors don't train"
    assert all(one.reward is not None for one in broken), "although their first turn has a reward"
    want = gradient(model, CONFIG.recipe(), every, episodes)
    assert loss == pytest.approx(want[0], rel=1e-5)
    for got, expected in zip(grads, want[1].values(), strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-6)
    assert stats["tokens"] == sum(len(row.own) for row, e in zip(every, episodes, strict=True) if e.trains)


@pytest.mark.ledger("F06", "F10")
def test_memory_stream_jsonl_parquet_and_folder_train_alike(run: tr.Run, folder: Path, tmp_path: Path):
    model = model_of(folder)
    for name in ("rows.jsonl", "rows.parquet", "rows"):
        assert main(["export", str(run.path), str(tmp_path / name)]) == 0
    stream = run.dataset(streaming=True)
    assert isinstance(stream, IterableDataset)
    made = {
        "stream": Dataset.from_list(list(stream), features=stream.features),
        "jsonl": Dataset.from_json(str(tmp_path / "rows.jsonl"), cache_dir=str(tmp_path / "c")),
        "typed": Dataset.from_json(str(tmp_path / "rows.jsonl"), features=rl_features(), cache_dir=str(tmp_path / "d")),
        "parquet": Dataset.from_parquet(str(tmp_path / "rows.parquet"), cache_dir=str(tmp_path / "e")),
        "folder": Dataset.load_from_disk(str(tmp_path / "rows")),
        "tapes": to_dataset(run.tapes()),
    }
    config = RLConfig(kl_coef=0.1)
    data = run.dataset()
    want = stepped(fill_ref_logprobs(data, model, config), model, config)
    for name, other in made.items():
        loss, stats, grads = stepped(fill_ref_logprobs(other, model, config), model, config)
        assert (loss, stats) == want[:2], name
        for got, expected in zip(grads, want[2], strict=True):
            assert torch.equal(got, expected), name


@pytest.mark.ledger("F05", "F08")
def test_columns_say_what_was_cut_how_much_was_said_and_in_which_words(run: tr.Run, folder: Path):
    data = run.dataset(tokenizer=folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tapes = {tape.id: tape for tape in run.tapes()}
    assert {True, False} == set(data["overflow"])
    for line in data:
        tape = tapes[line["tape_id"]]
        assert line["overflow"] == any(call.finish == "length" for call in tape.calls)
        assert line["num_labels"] == sum(label != -100 for label in line["labels"])
        assert line["reward"] == tape.reward
        assert line["status"] == tape.status.value
        first = next(t for t, label in enumerate(line["labels"]) if label != -100)
        assert line["prompt_text"] == tokenizer.decode(line["input_ids"][:first])
        assert line["output_text"] == tokenizer.decode(line["input_ids"][first:])
        assert line["text"] == line["prompt_text"] + line["output_text"]
        assert line["text"][-line["n_predicted"] :] == line["output_text"]
    assert "text" not in run.dataset().column_names
    group = [line for line in data if line["group_id"] == data[0]["group_id"]]
    filled = populate_rl_data(data, CONFIG)
    sizes = {}
    for line in group:
        sizes[line["tape_id"]] = sizes.get(line["tape_id"], 0) + len(line["input_ids"])
    assert filled[0]["group_tokens"] == pytest.approx(sum(sizes.values()) / len(sizes))


def test_only_what_was_asked_for_is_in_the_dataset(run: tr.Run):
    whole = run.dataset()
    best = run.dataset(min_reward=0.5, status="finished")
    assert len(best) == sum((line["reward"] or 0) >= 0.5 and line["status"] == "finished" for line in whole)
    with pytest.raises(UsageError, match="'none'"):
        run.dataset(split="none", streaming=True)
    with pytest.raises(NothingToExport, match=r"min_reward=99") as found:
        run.dataset(min_reward=99)
    assert "written" not in str(found.value), "no file was asked for"
    with pytest.raises(UsageError, match=r"'fnished'.*finished"):
        run.dataset(status="fnished")
    with pytest.raises(NothingToExport):
        list(run.dataset(min_reward=99, streaming=True))


def test_a_tape_of_text_is_an_error_that_asks_for_the_tokenizer(folder: Path):
    with pytest.raises(NotATape, match="`Renderer`"):
        to_dataset([played("7")])
    renderer = Renderer(AutoTokenizer.from_pretrained(folder))
    (line,) = to_dataset([played("7")], renderer=renderer)
    assert line["n_predicted"] == len(line["output_text"]) > 0
    assert all(math.isnan(x) for x in line["old_logprobs"])
