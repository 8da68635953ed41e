"""One of two processes that take optimiser steps together: `python -m tapereel.tests.finetune.two_ranks RANK FOLDER`.

Each holds one of the two groups of the batch that `test_trainer` makes, and writes what came of each step to FOLDER.
"""

from __future__ import annotations

import math
import sys

import torch

from tapereel.finetune.ranks import Group
from tapereel.finetune.recipes import get_recipe
from tapereel.finetune.trainer import Trainer

from .build import batch, tiny_model

STEPS = [("grpo", {"adjust": [{"kind": "whiten"}]}, None), ("cpgd", None, None), ("reinforce", None, 1)]
"""(recipe, changes, rank that meets a number which isn't finite)."""


def main(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
    out = []
    for name, changes, poison in STEPS:
        model = tiny_model()
        rows, episodes = batch(model=model)
        mine = slice(0, 3) if rank == 0 else slice(3, 6)
        trainer = Trainer(model, get_recipe(name, changes), lr=0.5, grad_clip=0.05, ranks=Group(),
                          micro_tokens=20 + 10 * rank)
        prepared = trainer.prepare(rows[mine], episodes[mine])
        if poison == rank:
            prepared.batch.advantage[0] = math.inf
        stats = trainer.step(prepared)
        out.append({"weights": model.state_dict(), "skipped": stats.skipped, "norm": stats.grad_norm,
                    "tokens": trainer.ranks.gather(stats.sums)["tokens"]})
    torch.save(out, f"{folder}/rank{rank}.pt")
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
