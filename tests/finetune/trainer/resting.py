"""One of two processes, of which the second rests while rank 0 takes longer than the time limit of a collective.

`python -m tapereel.tests.finetune.trainer.resting RANK FOLDER SECONDS`: rank 0 takes a step, waits for SECONDS, and
takes another one.
"""

from __future__ import annotations

import sys
import time
from datetime import timedelta
from typing import Any

import torch

from tapereel.finetune import OptimiserConfig, Trainer
from tapereel.finetune.recipes import get_recipe
from tapereel.finetune.trainer import DataParallelRanks, Division, Ranks, distributed
from tapereel.finetune.trainer.ranks import RankLost

from ..build import batch, tiny_model

LIMIT = 4.0
"""Seconds that a collective operation may take."""
distributed.SILENCE = 4.0


def main(rank: int, folder: str, seconds: float) -> None:
    torch.set_num_threads(1)
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2, timeout=timedelta(seconds=LIMIT)
    )
    model = tiny_model()

    def build(phase: str, work: Any, ranks: Ranks) -> Trainer:
        return Trainer(work, get_recipe("grpo"), OptimiserConfig(lr=0.01), ranks=ranks)

    processes = distributed.Processes(DataParallelRanks(), model, build)
    if rank:
        try:
            print(processes.follow())
        except RankLost as error:
            print(error)
        return
    rows, episodes = batch(model=model)
    with processes.leading():
        processes.enter("rl")
        for k in range(2):
            assert all(stats.applied for stats in processes.updates(Division.of(rows, episodes, 2)))
            if not k:
                print("waits", flush=True)
                time.sleep(seconds)
    processes.finish("the end")
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], float(sys.argv[3]))
