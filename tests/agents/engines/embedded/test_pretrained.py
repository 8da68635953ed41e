"""Models whose weights are read later, and weights that are written one at a time."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tapereel.agents.engines.embedded import char_tokenizer, load_pretrained, weights_digest
from tapereel.agents.engines.embedded.pretrained import emptied, fill
from tapereel.agents.engines.embedded.tiny_model import tiny_model
from tapereel.agents.engines.weights.weight_files import write_tensors

EMBEDDINGS, HEAD = "model.embed_tokens.weight", "lm_head.weight"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    tokenizer = char_tokenizer()
    tiny_model(tokenizer, "micro", seed=3).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    return tmp_path


@pytest.mark.parametrize(("dtype", "tied"), [("float32", EMBEDDINGS), ("bfloat16", EMBEDDINGS), ("float32", HEAD)])
def test_an_empty_model_becomes_the_loaded_one(folder: Path, dtype: str, tied: str) -> None:
    """Weights, buffers, ties and settings are the same, and before `fill` no parameter takes memory. Checkpoints of
    earlier versions have the tied weight under the output layer's name."""
    tensors = load_file(folder / "model.safetensors")
    tensors[tied] = tensors.pop(EMBEDDINGS)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    whole, found = (load_pretrained(folder, dtype=dtype, empty=empty) for empty in (False, True))  # type: ignore[arg-type]
    assert found.weights is not None
    assert all(p.is_meta for p in found.model.parameters())
    fill(found.model, found.weights, torch.device("cpu"))
    assert weights_digest(found.model.state_dict()) == weights_digest(whole.model.state_dict())
    buffers = dict(found.model.named_buffers())
    assert buffers.keys() == dict(whole.model.named_buffers()).keys()
    assert all(torch.equal(buffers[name], tensor) for name, tensor in whole.model.named_buffers())
    assert found.model.lm_head.weight is found.model.model.embed_tokens.weight
    assert found.model.generation_config.to_dict() == whole.model.generation_config.to_dict()
    assert not found.model.training
    ids = torch.arange(9)[None]
    assert torch.equal(found.model(input_ids=ids).logits, whole.model(input_ids=ids).logits)


def test_files_that_name_weights_differently_are_loaded_whole(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    without = {name.removeprefix("model."): tensor for name, tensor in tensors.items()}
    save_file(without, folder / "model.safetensors", metadata={"format": "pt"})
    found = load_pretrained(folder, empty=True)
    assert found.weights is None
    assert not any(p.is_meta for p in found.model.parameters())


def test_an_emptied_copy_keeps_ties_and_takes_no_memory(folder: Path) -> None:
    model = load_pretrained(folder).model
    copy = emptied(model)
    assert all(p.is_meta for p in copy.parameters())
    assert not any(p.is_meta for p in model.parameters())
    fill(copy, model.state_dict(), torch.device("cpu"))
    assert weights_digest(copy.state_dict()) == weights_digest(model.state_dict())
    assert copy.lm_head.weight is copy.model.embed_tokens.weight


class Counted(Mapping[str, Tensor]):
    """Weights that are made when they are read, and count their reads."""

    def __init__(self, state: Mapping[str, Tensor]) -> None:
        self.state = state
        made = {tensor.data_ptr(): tensor.to("meta") for tensor in state.values()}
        self.like = {name: made[tensor.data_ptr()] for name, tensor in state.items()}
        self.read: list[str] = []

    def __getitem__(self, name: str) -> Tensor:
        self.read.append(name)
        return self.state[name].clone()

    def __iter__(self) -> Iterator[str]:
        return iter(self.state)

    def __len__(self) -> int:
        return len(self.state)


@pytest.mark.parametrize("without", [(), (HEAD,)])
def test_weights_are_read_once_each_and_written_under_the_wanted_names(
    folder: Path, tmp_path: Path, without: tuple[str, ...]
) -> None:
    model = load_pretrained(folder).model
    state = {**model.state_dict(), "steps": torch.arange(3, dtype=torch.int8), "narrow": torch.ones(3).bfloat16()}
    source, names = Counted(state), state.keys() - {*without}
    write_tensors(source, tmp_path / "out.safetensors", names if without else None)
    found = load_file(tmp_path / "out.safetensors")
    assert sorted(source.read) == sorted(found) == sorted(names)
    assert all(torch.equal(found[name], state[name]) and found[name].dtype == state[name].dtype for name in found)
