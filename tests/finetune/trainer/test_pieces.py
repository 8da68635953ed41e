"""Files that several processes write for one checkpoint, and what is found if one of them is damaged."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM

from tapereel.agents.engines.weights import AdapterConfig
from tapereel.agents.engines.weights.weight_files import write_weights
from tapereel.agents.setup import EmbeddedConfig
from tapereel.finetune import LoopConfig, OptimiserConfig
from tapereel.finetune.recipes import get_recipe
from tapereel.finetune.run import TrainerConfig
from tapereel.finetune.run.load_policy import load_policy
from tapereel.finetune.trainer import Processes, Ranks, ShardedRanks, checkpoints, save_checkpoint
from tapereel.finetune.trainer.checkpoint import STATE, BadCheckpoint, damage, read_parts, write_parts
from tapereel.finetune.trainer.ranks import Whole
from tapereel.tapes.store import LeaseLost

from ..build import tiny_model
from ..loop.lab import WORDS
from .seen import saved

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


def test_a_lead_that_loses_its_lease_while_it_saves_gives_the_checkpoint_no_name(tmp_path: Path) -> None:
    """Its successor hasn't removed the partial checkpoint yet, so only the lease can stop the rename."""

    def check() -> None:
        if list(tmp_path.glob(f".update-*/{STATE}")):
            raise LeaseLost("another lead has the run")

    with pytest.raises(LeaseLost):
        save_checkpoint(tmp_path, tiny_model(), {}, {}, update=7, check=check)
    assert checkpoints(tmp_path) == []


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
    file = next(made.path.glob("policy/*.safetensors" if shared else "hf/model.safetensors"))
    whole = file.read_bytes()
    at = places(file)["model.norm.weight"][0] if shared else len(whole) // 2
    file.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
    with pytest.raises(BadCheckpoint, match=r"tensor model.norm.weight " if shared else "digest"):
        processes.read(made)
    assert not any(tensor.any() for tensor in Whole(dict(processes.model.named_parameters())).values())
    file.write_bytes(whole)
    processes.read(made)
    made.check(processes.digest)


def text_model(kind: str, **changes: Any) -> Callable[[Path], str]:
    """Saves a small language model of this kind."""
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2}
    special = {name: getattr(WORDS, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}

    def save(folder: Path) -> str:
        config = AutoConfig.for_model(kind, vocab_size=len(WORDS), **{**sizes, **special, **changes})
        AutoModelForCausalLM.from_config(config).save_pretrained(folder)
        WORDS.save_pretrained(folder)
        return str(folder)

    return save


NARROW = {"intermediate_size": 32, "head_dim": 8}
GPT2 = {"n_embd": 16, "n_layer": 2, "n_head": 2, "num_key_value_heads": None}
EXPORTED: dict[str, tuple[Callable[[Path], str], AdapterConfig | None]] = {
    "tied": (text_model("llama", **NARROW, tie_word_embeddings=True), None),
    "not tied": (text_model("qwen3", **NARROW, tie_word_embeddings=False), None),
    "embeddings of another name": (text_model("gpt2", **GPT2), None),
    "the kept name is the second": (text_model("xlm-roberta", intermediate_size=32, is_decoder=True), None),
    "files with other tensors": (text_model("mixtral", **NARROW, num_local_experts=2, tie_word_embeddings=True), None),
    "adapters": (text_model("llama", **NARROW, tie_word_embeddings=True), AdapterConfig(rank=2)),
    "pictures": (lambda folder: saved(folder, "smolvlm"), None),
    "pictures and files with other names": (lambda folder: saved(folder, "qwen2_vl"), None),
}


def exported(folder: str, adapters: AdapterConfig | None, ranks: Ranks, to: Path) -> Processes:
    """Writes a checkpoint and a folder for servers, as a run with these ranks does."""
    engine, trainer = EmbeddedConfig(model=folder), TrainerConfig(lora=adapters)
    loop = LoopConfig(optimiser=OptimiserConfig(ema=0.5))
    policy = load_policy(engine, trainer, loop, get_recipe("grpo"), seed=0, ranks=ranks)
    processes = policy.weights
    processes.enter("rl")
    with torch.no_grad():
        for average in processes.member.averaged.values():
            average += 1
    state = {} if processes.shared else processes.member.state_dict()
    save_checkpoint(to, policy.model, state, {}, update=1, held=processes)
    if adapters is None:
        write_weights(processes.weights(copied=True), to / "servers", Path(folder))
    return processes


def same_files(one: Path, other: Path) -> dict[str, torch.Tensor]:
    """The tensors in a model folder. The other folder has the same tensors under the same names, and the same files."""
    names = {file.name for file in one.iterdir()}
    assert {file.name for file in other.iterdir()} == names
    (weights,) = (name for name in names if name.endswith(".safetensors"))
    found, expected = load_file(other / weights), load_file(one / weights)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
    for name in (name for name in names if name.endswith(".json")):
        a, b = (json.loads((folder / name).read_bytes()) for folder in (one, other))
        for about in (a, b):  # peft writes a set in no order
            about.get("target_modules", []).sort()
        assert a == b
    return found


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize("kind", EXPORTED)
def test_weights_that_are_sharded_are_written_under_the_names_of_save_pretrained(kind: str, tmp_path: Path) -> None:
    save, adapters = EXPORTED[kind]
    folder = save(tmp_path / "model")
    one, sharded = tmp_path / "one", tmp_path / "sharded"
    for ranks, to in ((Ranks(), one), (ShardedRanks(), sharded)):
        state = exported(folder, adapters, ranks, to).model.state_dict()
    for part in ("hf", "hf-averaged"):
        written = same_files(one / "update-000001" / part, sharded / "update-000001" / part)
        assert kind != "tied" or written.keys() == state.keys() - {"lm_head.weight"}
    if adapters is None:
        assert same_files(one / "servers", sharded / "servers").keys() == state.keys(), "each name of a tied weight"
