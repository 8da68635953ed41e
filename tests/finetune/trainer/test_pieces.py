"""Files that several processes write for one checkpoint, and what is found if one of them is damaged."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tapereel.finetune.trainer.checkpoint import BadCheckpoint, damage, read_parts, save_checkpoint, write_parts
from tapereel.finetune.trainer.distributed import Processes
from tapereel.finetune.trainer.ranks import ShardedRanks, Whole

from ..build import tiny_model

TENSORS = {
    "model.embed.weight": torch.arange(12.0).reshape(4, 3),
    "model.norm.weight": torch.full((5,), 2.0, dtype=torch.bfloat16),
    "steps": torch.tensor(7),
}


@pytest.fixture
def group() -> Iterator[None]:
    """A group with a single process."""
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@pytest.fixture
def folder(tmp_path: Path, group: None, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Files with TENSORS, each in a file of its own."""
    monkeypatch.setattr("tapereel.finetune.trainer.checkpoint.FILE_BYTES", 1)
    write_parts(tmp_path, {**TENSORS, "head.weight": TENSORS["model.embed.weight"]})
    return tmp_path


def places(file: Path) -> dict[str, tuple[int, int]]:
    """First and last byte of the header, named "", and of each tensor in a safetensors file."""
    data = file.read_bytes()
    start = 8 + int.from_bytes(data[:8], "little")
    found = {"": (0, start - 1)}
    for name, about in json.loads(data[8:start]).items():
        if name != "__metadata__":
            first, end = about["data_offsets"]
            found[name] = (start + first, start + end - 1)
    return found


def test_a_flipped_bit_is_found_with_its_tensor(folder: Path) -> None:
    files = sorted(folder.glob("*.safetensors"))
    assert len(files) == len(TENSORS)
    assert damage(folder) == []
    named = set[str]()
    for file in files:
        whole = file.read_bytes()
        for name, ends in places(file).items():
            for at in range(ends[0], ends[1] + 1) if not name else ends:
                file.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
                (found,) = damage(folder)
                assert str(file) in found
                assert (f"tensor {name} " if name else "the header") in found
                with pytest.raises(BadCheckpoint, match=file.name):
                    read_parts(folder)
            named.add(name)
        file.write_bytes(whole)
    assert named == {"", *TENSORS}
    read = read_parts(folder)
    assert all(torch.equal(read[name], tensor) for name, tensor in TENSORS.items())
    assert torch.equal(read["head.weight"], TENSORS["model.embed.weight"])


def test_files_that_are_missing_cut_off_or_added_are_found(folder: Path) -> None:
    first, second, third = sorted(folder.glob("*.safetensors"))
    (folder / "shard-00002-more.safetensors").write_bytes(first.read_bytes())
    first.unlink()
    second.write_bytes(second.read_bytes()[:-1])
    third.write_bytes(b"")
    found = damage(folder)
    for name, sentence in zip((first.name, second.name, third.name, "shard-00002-more"), found, strict=True):
        assert name in sentence
    assert sorted(damage(folder, 0, 2) + damage(folder, 1, 2)) == sorted(found)
    (folder / "pieces.json").write_text("{")
    (sentence,) = damage(folder)
    assert "pieces.json" in sentence


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize("shared", [True, False], ids=["pieces", "whole"])
def test_ranks_read_nothing_of_a_damaged_checkpoint(tmp_path: Path, shared: bool) -> None:
    processes = Processes(ShardedRanks(), tiny_model(), lambda *_: pytest.fail("no phase begins"))
    held = processes if shared else None
    model = processes.model if shared else tiny_model(seed=1)
    made = save_checkpoint(tmp_path, model, {}, {}, update=1, held=held)
    with torch.no_grad():
        for p in processes.model.parameters():
            p.zero_()
    file = next(made.path.glob("policy/*.safetensors" if shared else "policy.pt"))
    whole = file.read_bytes()
    at = places(file)["model.norm.weight"][0] if shared else len(whole) // 2
    file.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
    with pytest.raises(BadCheckpoint, match=r"tensor model.norm.weight " if shared else "digest"):
        processes.read(made)
    assert not any(tensor.any() for tensor in Whole(dict(processes.model.named_parameters())).values())
    file.write_bytes(whole)
    processes.read(made)
    made.check(processes.digest)
