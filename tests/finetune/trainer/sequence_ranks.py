"""One of several processes that forward the same rows together, each a part of their tokens.

`python -m tapereel.tests.finetune.trainer.sequence_ranks RANK WORLD FOLDER`.

`group` is a copy of the model each, `sharded` a part of each weight. The outcome of each case is written to FOLDER.
"""

from __future__ import annotations

import copy
import math
import sys
from collections.abc import Sequence
from dataclasses import replace
from datetime import timedelta
from typing import Any, NamedTuple, cast

import torch

from tapereel.finetune import Critic, CriticTrainer, Episode, OptimiserConfig, Row, Trainer
from tapereel.finetune.objective import Sums
from tapereel.finetune.recipes import get_recipe
from tapereel.finetune.run import freeze
from tapereel.finetune.trainer import DataParallelRanks, Ranks, ShardedRanks
from tapereel.finetune.trainer.updates import share
from tapereel.tapes import Status

from ..build import batch, tiny_qwen3
from .seen import png, pretrained, sampled, shown


class Case(NamedTuple):
    """A model, a batch and a recipe, whose gradient and steps are compared."""

    name: str
    recipe: str = "grpo"
    changes: dict[str, Any] | None = None
    pack: bool = True
    experts: bool = False
    dtype: torch.dtype = torch.float64
    critic: str | None = None
    config: dict[str, Any] | None = None
    family: str | None = None
    """The family of a vision model, whose rows show pictures."""
    degrees: tuple[int, ...] = (2, 4)
    poison: bool = False
    checkpointing: bool = False
    micro_tokens: int = 40
    demonstrations: bool = False
    quick: bool = False
    """Whether the default suite has this case."""


BALANCED = {"regulariser": [{"kind": "nll", "coefficient": 0.3}, {"kind": "aux", "coefficient": 0.5}]}
WINDOW = {"use_sliding_window": True, "sliding_window": 3, "layer_types": ["sliding_attention", "full_attention"]}
CASES = (
    Case("packed", quick=True),
    Case("packed in float32", dtype=torch.float32),
    Case("padded", pack=False),
    Case("one row longer than a micro-batch", micro_tokens=1),
    Case("experts", experts=True),
    Case("experts in float32", experts=True, dtype=torch.float32),
    Case(
        "balanced experts",
        "ppo",
        BALANCED,
        experts=True,
        critic="own",
        demonstrations=True,
        quick=True,
    ),
    Case("not local", "cpgd", {"regulariser": [{"kind": "kl", "beta": 0.1}]}, quick=True),
    Case("a ratio per row", "gspo"),
    Case("one micro-batch, not local", "cpgd", micro_tokens=10_000),
    Case("entropy", changes={"regulariser": [{"kind": "entropy", "coefficient": 0.1}]}),
    Case("head alone", "ppo", critic="policy"),
    Case("grouped heads", config={"num_key_value_heads": 2}, degrees=(2,)),
    Case("sliding window", config=WINDOW),
    Case("checkpointing", checkpointing=True),
    Case("poisoned", poison=True, quick=True),
    *(
        Case(family, pack=family != "qwen2_vl", family=family, degrees=(2,), dtype=torch.float32, quick=k == 0)
        for k, family in enumerate(("qwen3_vl", "qwen2_vl", "idefics3"))
    ),
)


def outcome(case: Case, ranks: Ranks) -> dict[str, Any]:
    """Gradient of the first step, and weights, sums and norms of two steps."""
    model, rows, episodes, vision = made(case)
    mine = share(rows, episodes, ranks.shares)[ranks.share]
    names = {episodes[k].tape for k in mine}
    demonstrations = [replace(row, tape=f"d{k}", group=f"d{k}") for k, row in enumerate(rows[:3])]
    critic = None
    if case.critic is not None:
        body = Critic.of(model, normalised=True) if case.critic == "own" else Critic.on(model)
        balance = get_recipe(case.recipe, case.changes).balance
        critic = CriticTrainer(
            body, OptimiserConfig(lr=0.1, eps=1.0, micro_tokens=case.micro_tokens), balance=balance, ranks=ranks
        )
    recipe = get_recipe(case.recipe, case.changes)
    trainer = Trainer(
        model,
        recipe,
        OptimiserConfig(
            lr=0.05,
            eps=1.0,
            micro_tokens=case.micro_tokens,
            pack=case.pack,
            gradient_checkpointing=case.checkpointing,
        ),
        reference=tiny_qwen3() if recipe.needs_reference else None,
        critic=critic,
        ranks=ranks,
        vision=vision,
    )
    prepared = trainer.prepare(
        [row for row in rows if row.tape in names],
        [episodes[k] for k in mine],
        demonstrations=demonstrations[ranks.share :: ranks.shares] if case.demonstrations else (),
    )
    if case.poison and not ranks.share:
        prepared.batch.advantage[0] = math.inf
    _, done, norm = trainer._gradient(prepared, None, None)
    grads = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    if case.poison:
        return {"skipped": done.skipped}
    steps = []
    for _ in range(2):
        stats = trainer.step(prepared)
        trainer.end_update()
        sums = merged(ranks, stats.sums)
        steps.append({"norm": stats.grad_norm, "sums": dict(sums.sums), "counts": dict(sums.counts)})
    return {
        "norm": norm,
        "gradient": ranks.whole(grads),
        "loss": float(ranks.add_up(torch.tensor(done.loss, dtype=torch.float64))),
        "steps": steps,
        "weights": ranks.whole(dict(model.state_dict())),
        "state": trainer.state_dict(),
    }


def merged(ranks: Ranks, sums: Sums) -> Sums:
    """The sums of all shares, on every rank."""
    whole = Sums()
    for part in cast("list[Sums]", ranks.broadcast(ranks.gather(sums))):
        whole.merge(part)
    return whole


def made(case: Case) -> tuple[Any, Sequence[Row], Sequence[Episode], Any]:
    """The case's model, rows and episodes, and how the model sees."""
    if case.family is None:
        model = tiny_qwen3(case.dtype, experts=case.experts, **(case.config or {}))
        rows, episodes = batch(model=model)
        cut = [
            replace(one, status=Status.TRUNCATED) if case.critic and k % 2 else one for k, one in enumerate(episodes)
        ]
        return model, rows, cut, None
    found = pretrained(case.family)
    model = copy.deepcopy(found.model)
    assert found.vision is not None
    freeze(model, found.vision, "nothing")
    rows = [
        *(shown(case.family, [(["Where? ", png(24, 16, k), "?"], sampled(3, k))], f"t{k}", "g0") for k in range(3)),
        *(shown(case.family, [(["And in words?"], sampled(2, 9 + k))], f"u{k}", "g1") for k in range(2)),
    ]
    return (
        model,
        rows,
        [Episode(tape=r.tape, group=r.group, reward=float(k % 2)) for k, r in enumerate(rows)],
        found.vision,
    )


def outcomes(degrees: Sequence[int], cases: Sequence[Case]) -> dict[str, Any]:
    """The outcome of each case on this rank, by `name`."""
    return {
        name(kind, degree, case): outcome(case, make(sequence_parallel=degree))
        for kind, make in (("group", DataParallelRanks), ("sharded", ShardedRanks))
        for degree in degrees
        for case in cases
        if degree in case.degrees
    }


def name(kind: str, degree: int, case: Case) -> str:
    return f"{kind} by {degree}: {case.name}"


def main(rank: int, world: int, folder: str) -> None:
    torch.set_num_threads(1)
    for case in CASES:
        if case.family is not None:
            pretrained(case.family)  # made before: in a group, rank 0 alone saves a model
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=world, timeout=timedelta(seconds=60)
    )
    degrees = (2, 4) if world == 4 else (2,)
    torch.save(outcomes(degrees, CASES), f"{folder}/rank{rank}.pt")
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
