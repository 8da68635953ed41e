"""Peak memory of each rank over three AdamW steps: our trainer with `processes.shard` next to bare FSDP2.

    MALLOC_MMAP_THRESHOLD_=131072 torchrun --nproc-per-node 2 benchmarks/ranks_memory.py

Both train the same Llama of 287 MiB in float32, on 64 tokens a rank, from the same folder of safetensors. Bare FSDP2
builds the model on the meta device, fills its shards, and gathers every weight once, one at a time, as a weight sync
does. Printed for each rank: peak above the start, in multiples of the weights. The bound is 1.15 x bare FSDP2.

Without the variable, glibc keeps freed blocks, and even bare FSDP2 peaks two to three times higher.
"""

from __future__ import annotations

import argparse
import gc
import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

BOUND = 1.15
TOKENS = 64
STEPS = 3


TINY = "--tiny" in sys.argv


def config() -> LlamaConfig:
    return LlamaConfig(
        hidden_size=512,
        intermediate_size=128 if TINY else 2048,
        num_hidden_layers=1 if TINY else 16,
        num_attention_heads=8,
        num_key_value_heads=8,
        vocab_size=200 if TINY else 8000,
    )


def save(folder: Path) -> None:
    """Write the model with a tokenizer of one word."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel

    LlamaForCausalLM(config()).save_pretrained(folder)
    words = Tokenizer(WordLevel({"a": 0}, unk_token="a"))
    PreTrainedTokenizerFast(tokenizer_object=words, eos_token="a").save_pretrained(folder)


def bare(folder: Path) -> None:
    """FSDP2 alone, with nothing whole on any rank."""
    with torch.device("meta"):
        model = LlamaForCausalLM(config())
    root = _Root(model)
    mesh = init_device_mesh("cpu", (distributed.get_world_size(),))
    for block in model.model.layers:
        fully_shard(block, mesh=mesh)
    fully_shard(root, mesh=mesh, reshard_after_forward=True)
    for module in root.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
    model.to_empty(device="cpu")
    with torch.no_grad():
        for name, buffer in model.named_buffers():
            if "inv_freq" in name:
                buffer.copy_(1.0 / (10000 ** (torch.arange(0, 64, 2).float() / 64)))
        for p in model.parameters():
            local(p).normal_(0, 0.02)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    ids = torch.arange(TOKENS)[None]

    def work() -> torch.Tensor:
        model(input_ids=ids, labels=ids).loss.backward()
        return torch.zeros(())

    for _ in range(STEPS):
        root(work)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    for p in model.parameters():
        p.full_tensor() if isinstance(p, DTensor) else p


class _Root(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, work: Callable[[], torch.Tensor]) -> torch.Tensor:
        return work()


def local(p: torch.Tensor) -> torch.Tensor:
    return p.to_local() if isinstance(p, DTensor) else p


def ours(folder: Path) -> None:
    """The trainer of a run, as `train` makes it, with updates from rank 0."""
    from tapereel.agents.engines.embedded.pretrained import emptied, load_pretrained
    from tapereel.finetune.recipes import get_recipe
    from tapereel.finetune.trainer.distributed import Processes
    from tapereel.finetune.trainer.options import OptimiserConfig
    from tapereel.finetune.trainer.ranks import Ranks, ShardedRanks
    from tapereel.finetune.trainer.trainer import Trainer
    from tapereel.finetune.trainer.updates import Division

    def build(phase: str, work: nn.Module, ranks: Ranks) -> Trainer:
        return Trainer(work, get_recipe("grpo"), OptimiserConfig(lr=1e-4), ranks=ranks)

    ranks = ShardedRanks()
    found = load_pretrained(folder, empty=True)
    empty = emptied(found.model)
    ranks.shard(found.model, found.weights, torch.device("cpu"))
    processes = Processes(ranks, found.model, build, empty)
    if ranks.rank:
        processes.follow()
        return
    rows, episodes = batch(ranks.size)
    processes.enter("rl")
    for _ in range(STEPS):
        assert all(stats.applied for stats in processes.updates(Division.of(rows, episodes, ranks.shares)))
    for _ in processes.weights().values():  # reads every weight once, as a weight sync does
        pass
    processes.finish(None)


def batch(groups: int) -> tuple[list[Any], list[Any]]:
    """A group for each rank: two episodes of `TOKENS` / 2 tokens."""
    from tapereel.finetune.data.rows import Row
    from tapereel.finetune.data.stream import Episode

    n = TOKENS // 2 - 1
    zeros = np.zeros(n, np.int32)
    rows = [
        Row(
            tape=f"g{g}/{k}",
            group=f"g{g}",
            input_ids=np.arange(k, k + n + 1, dtype=np.int32),
            own=np.arange(1, n + 1, dtype=np.int32),
            old=np.full(n, -9.0, np.float32),
            temperature=np.ones(n, np.float32),
            version=zeros,
            call=zeros,
            turn=zeros,
            offset=np.arange(n, dtype=np.int32),
            calls=(f"g{g}/{k}/0",),
            agents=("player",),
            versions=("run:0",),
        )
        for g in range(groups)
        for k in range(2)
    ]
    return rows, [Episode(tape=row.tape, group=row.group, reward=float(k % 2)) for k, row in enumerate(rows)]


def peak(work: Callable[[Path], None], folder: Path) -> float:
    """Return the peak of this process's memory inside `work`, in MiB above what it holds before."""
    gc.collect()
    distributed.barrier()
    before = _status("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM, the peak
    work(folder)
    return _status("VmHWM") - before


def _status(field: str) -> float:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(field)) / 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true", help="another model: shows that it runs, no more")
    parser.parse_args()
    torch.set_num_threads(1)
    distributed.init_process_group("gloo")
    rank = distributed.get_rank()
    with tempfile.TemporaryDirectory() as own:
        box = [own]
        distributed.broadcast_object_list(box, src=0)
        folder = Path(box[0])
        if rank == 0:
            save(folder)
        with torch.device("meta"):
            mib = sum(p.numel() * 4 for p in LlamaForCausalLM(config()).parameters()) / 2**20
        import tapereel.finetune.trainer.distributed  # noqa: F401  # before its memory is counted

        found = peak(bare, folder) / mib, peak(ours, folder) / mib
        every: list[Any] = [None] * distributed.get_world_size()
        distributed.all_gather_object(every, found)
        if rank == 0:
            threshold = os.environ.get("MALLOC_MMAP_THRESHOLD_", "the default")
            print(f"{len(every)} ranks, weights {mib:.0f} MiB, MALLOC_MMAP_THRESHOLD_ {threshold}; peak / weights")
            for k, (alone, with_us) in enumerate(every):
                print(f"  rank {k}: bare {alone:.2f}, ours {with_us:.2f}, ours / bare {with_us / alone:.2f}")
            worst = max(with_us / alone for alone, with_us in every)
            print(f"worst ratio {worst:.2f} (bound {BOUND})")
        distributed.barrier()
    distributed.destroy_process_group()


if __name__ == "__main__":
    main()
