"""One of several processes that share the weights, the optimiser, the critic, the reference and the average.

`python -m tapereel.tests.finetune.trainer.parts RANK SIZE FOLDER CHECKPOINT [UPDATE]` reads the checkpoint of UPDATE if
there is one, trains up to UPDATES, and writes what came of it to FOLDER.
"""

from __future__ import annotations

import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tapereel.finetune import CriticTrainer, OptimiserConfig, Trainer
from tapereel.finetune.recipes import get_recipe
from tapereel.finetune.trainer import Division, EarlierWeights, Processes, Ranks, ShardedRanks, save_checkpoint
from tapereel.finetune.trainer.checkpoint import Checkpoint, read_checkpoint

from ..build import tiny_model
from .two_ranks import cut_off, held, odd_digests, own_critic, three_groups

UPDATES, CUT = 20, 10
RECIPE = {"regulariser": [{"kind": "kl", "beta": 0.1}]}


def trained(ranks: Ranks, folder: Path, resumed: Path | None = None, *, save: bool = False) -> dict[str, Any]:
    """What came of the updates on this rank: weights, state and share of the weights. With `save`, a checkpoint is
    written to `folder` after CUT of them. After a checkpoint, the optimisers' state is kept in main memory."""
    model = tiny_model()
    rows, episodes = three_groups(model)
    episodes, offload = cut_off(episodes), resumed is not None

    def build(phase: str, work: nn.Module, ranks: Ranks) -> Trainer:
        return Trainer(
            work,
            get_recipe("ppo", RECIPE),
            OptimiserConfig(lr=0.01, ema=0.9),
            ranks=ranks,
            offload=offload,
            reference=EarlierWeights(work, "base", every=4, decay=0.5, ranks=ranks),
            critic=CriticTrainer(own_critic(processes), OptimiserConfig(lr=0.01), ranks=ranks, offload=offload),
        )

    processes = Processes(ranks, model, build)
    made, compared = None, list[Any]()
    if ranks.rank:
        digest = processes.follow()
    else:
        with processes.leading():
            done = 0
            if resumed is not None:
                checkpoint = read_checkpoint(resumed)
                done = checkpoint.update
                processes.read(checkpoint)
            processes.enter("rl")
            if resumed is not None:
                processes.resume(read_checkpoint(resumed))
            for update in range(done, UPDATES):
                if save and update == CUT:
                    state = {} if processes.shared else processes.state()
                    made = save_checkpoint(folder, model, state, {}, update=update, held=processes)
                    compared.append(compare(processes, made))
                assert all(stats.applied for stats in processes.updates(Division.of(rows, episodes, ranks.shares)))
            digest = processes.digest()
            compared += [compare(processes, one) for one in ([made] if made is not None else [])]
        processes.finish(digest)
    member = processes.member
    return {
        "weights": ranks.whole(dict(model.state_dict())),
        "state": member.state_dict(),
        "digest": digest,
        "compared": compared,
        "held": held(processes),
        "critic": sum(p.numel() for p in (q.to_local() if ranks.sharded else q for q in _own(member))),  # type: ignore[operator]
    }


def compare(processes: Processes, made: Checkpoint) -> tuple[bool, list[str]]:
    """Whether a checkpoint has the current weights, and the values in the trainer's state that differ. If the weights
    are shared, no process reads the whole checkpoint."""
    with pytest.MonkeyPatch.context() as patch:
        if processes.shared:
            patch.delattr(Checkpoint, "weights")
            patch.delattr(Checkpoint, "trainer_state")
        same = processes.digest_in(made) == processes.digest()
        return same, sorted({place for place, _, _ in processes.unlike(made)})


def _own(member: Trainer) -> list[Any]:
    assert member.critic is not None
    return list(member.critic.critic.parameters())


def main(rank: int, size: int, folder: Path, resumed: Path | None) -> None:
    torch.set_num_threads(1)
    meet = f"file://{folder}/meet"
    torch.distributed.init_process_group(
        "gloo", init_method=meet, rank=rank, world_size=size, timeout=timedelta(seconds=200)
    )
    found = trained(ShardedRanks(), folder, resumed, save=resumed is None)
    torch.save({**found, "digests": odd_digests()}, folder / f"rank{rank}.pt")
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), Path(sys.argv[4]) if len(sys.argv) > 4 else None)
