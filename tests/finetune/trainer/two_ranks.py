"""One of two processes that take optimiser steps together.

`python -m tapereel.tests.finetune.trainer.two_ranks RANK FOLDER`.

`group` is a copy of the model each, `sharded` a part of each weight. In the CASES each rank is given its part of the
batch; in the SHARED rank 0 has the whole, and shares it out. What came of each step is written to FOLDER.
"""

from __future__ import annotations

import copy
import math
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, cast

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from tapereel.agents.engines.embedded import weights_digest
from tapereel.agents.engines.embedded.pretrained import earlier_digest, in_rows
from tapereel.finetune import Critic, CriticTrainer, Episode, OptimiserConfig, Row, Trainer, UpdateStats
from tapereel.finetune.recipes import get_recipe
from tapereel.finetune.run import freeze
from tapereel.finetune.trainer import (
    DataParallelRanks,
    Division,
    EarlierWeights,
    Processes,
    Ranks,
    ShardedRanks,
    save_checkpoint,
)
from tapereel.finetune.trainer.ranks import shared_digest
from tapereel.tapes import Status

from ...agents.engines.embedded.odd_weights import odd_weights
from ..build import batch, mixture, tiny_model
from .seen import png, pretrained, sampled, shown
from .sequence_ranks import CASES as TOGETHER
from .sequence_ranks import merged, outcomes


class Case(NamedTuple):
    """One trainer, and what becomes of it."""

    name: str
    recipe: str
    changes: dict[str, Any] | None = None
    cut: int = 3
    """Episodes of rank 0; the other has the rest."""
    critic: str | None = None
    steps: int = 2
    poison: int | None = None
    """The rank whose batch holds a number that isn't finite."""
    demonstrations: bool = False
    tied: bool = True
    ema: float | None = None
    experts: bool = False
    offload: bool = False
    """Of the ranks; a process alone keeps the optimiser's state where the weights are."""


BALANCED = [{"kind": "nll", "coefficient": 0.3}, {"kind": "aux", "coefficient": 0.5}]
CASES = (
    Case("grpo", "grpo", {"adjust": [{"kind": "whiten"}]}, ema=0.9),
    Case("not local", "cpgd", tied=False),
    Case("nobody here", "grpo", cut=6, critic="own"),
    Case("own critic", "ppo", critic="own"),
    Case("head alone", "ppo", critic="policy"),
    Case("offloaded", "ppo", critic="own", offload=True),
    Case("poisoned", "reinforce", poison=1, steps=1),
    Case(
        "reference",
        "grpo",
        {"regulariser": [{"kind": "kl", "beta": 0.1, "estimator": "k3", "adaptive": {"target": 0.01, "horizon": 10}}]},
    ),
    Case(
        "reference in the reward",
        "ppo_kl",
        {"shape": [{"kind": "token_kl", "beta": 0.2, "adaptive": {"target": 0.01, "horizon": 10}}]},
        critic="own",
    ),
    Case("earlier weights", "grpo", {"regulariser": [{"kind": "kl", "beta": 0.5}]}, steps=4),
    Case("experts", "ppo", {"regulariser": BALANCED}, critic="own", demonstrations=True, experts=True),
    Case("poisoned experts", "rloo", {"regulariser": BALANCED}, poison=1, steps=1, demonstrations=True, experts=True),
    Case("imitates too", "grpo", {"regulariser": [{"kind": "nll", "coefficient": 0.3}]}, demonstrations=True),
)


def cut_off(episodes: list[Episode]) -> list[Episode]:
    """Every second episode was truncated, so that its last state has a value."""
    return [replace(one, status=Status.TRUNCATED) if k % 2 else one for k, one in enumerate(episodes)]


ARRIVED: list[Any] = []
"""Names of tapes and pictures that another process has sent to this one."""


def arrived(value: Any) -> Any:
    """What a `Named` or a `Picture` becomes in the process that it is sent to."""
    ARRIVED.append(value)
    return value


class Named(str):
    """The name of a tape, which is noted when it arrives in another process."""

    __slots__ = ()

    def __reduce__(self) -> tuple[Any, ...]:
        return arrived, (str(self),)


class Picture(bytes):
    """A PNG, which is noted when it arrives in another process."""

    __slots__ = ()

    def __reduce__(self) -> tuple[Any, ...]:
        return arrived, (bytes(self),)


def trained(case: Case, ranks: Ranks) -> dict[str, Any]:
    """What came of the case on this rank."""
    model = mixture(torch.float64) if case.experts else tiny_model(tie_word_embeddings=case.tied)
    rows, episodes = batch(model=model)
    if case.critic is not None:
        episodes = cut_off(episodes)
    reference: Any = tiny_model(seed=1) if "reference" in case.name else None
    if case.name == "earlier weights":
        reference = EarlierWeights(model, "base", every=2, decay=0.25, ranks=ranks)
    mine = slice(None) if ranks.size == 1 else slice(0, case.cut) if ranks.rank == 0 else slice(case.cut, None)
    shown = [replace(row, tape=f"d{k}", group=f"d{k}") for k, row in enumerate(rows[:3])]
    if ranks.size > 1:
        shown = shown[:1] if ranks.rank == 0 else shown[1:]
    critic, offload = None, case.offload and ranks.size > 1
    if case.critic is not None:
        body = Critic.of(model, normalised=True) if case.critic == "own" else Critic.on(model)
        balance = get_recipe(case.recipe, case.changes).balance
        critic = CriticTrainer(
            body,
            OptimiserConfig(lr=0.1, grad_clip=0.05, micro_tokens=15 + 10 * ranks.rank),
            balance=balance,
            offload=offload,
            ranks=ranks,
        )
    trainer = Trainer(
        model,
        get_recipe(case.recipe, case.changes),
        OptimiserConfig(lr=0.05, grad_clip=0.05, ema=case.ema, micro_tokens=20 + 10 * ranks.rank),
        offload=offload,
        ranks=ranks,
        critic=critic,
        reference=reference,
    )
    out: list[Any] = []
    for _ in range(case.steps):
        prepared = trainer.prepare(rows[mine], episodes[mine], demonstrations=shown if case.demonstrations else ())
        if case.poison == ranks.rank:
            prepared.batch.advantage[0] = math.inf
        stats = trainer.step(prepared)
        trainer.end_update()
        sums = merged(ranks, stats.sums)
        out.append(
            {
                "skipped": stats.skipped,
                "norm": stats.grad_norm,
                "loss": stats.loss,
                "sums": dict(sums.sums),
                "counts": dict(sums.counts),
            }
        )
    state = trainer.state_dict()
    trainer.load_state_dict(state)
    return {
        "steps": out,
        "weights": ranks.whole(dict(model.state_dict())),
        "state": state,
        "again": trainer.state_dict(),
        "betas": trainer.betas,
        "skips": critic.skips if critic else 0,
    }


class SharedCase(NamedTuple):
    """A trainer whose batches are shared out."""

    name: str
    recipe: str
    changes: dict[str, Any] | None = None
    minibatches: int = 1
    batches: tuple[int, ...] = ()
    critic: str | None = None
    demonstrations: bool = False
    groups: int = 3
    poison: bool = False


SHARED = (
    SharedCase("epochs", "reinforce_pp_baseline", minibatches=2),
    SharedCase("batches", "grpo", {"adjust": [{"kind": "whiten"}]}, batches=(3, 6)),
    SharedCase("critic", "ppo", critic="own", minibatches=2),
    SharedCase("head alone", "ppo", critic="policy"),
    SharedCase(
        "imitates too",
        "grpo",
        {"regulariser": [{"kind": "nll", "coefficient": 0.3}]},
        demonstrations=True,
        minibatches=2,
    ),
    SharedCase("one group for two", "grpo", groups=1),
    SharedCase("poisoned", "grpo", poison=True),
)


class Noting(Trainer):
    """Notes the tapes of its share."""

    mine: frozenset[str] = frozenset()

    def train_on(self, share: Any, **how: Any) -> Iterator[UpdateStats]:
        self.mine = frozenset(str(row.tape) for row in share.rows)
        return super().train_on(share, **how)


def led(case: SharedCase, ranks: Ranks) -> dict[str, Any]:
    """What came of two epochs, a checkpoint in between, on rank 0 (and alone); the weights, on every rank."""
    model = tiny_model()
    rows, episodes = three_groups(model)
    rows, episodes = rows[: 3 * case.groups], episodes[: 3 * case.groups]
    if case.critic is not None:
        episodes = cut_off(episodes)
    if case.poison:
        episodes[0] = replace(episodes[0], reward=math.inf)
    ARRIVED.clear()
    rows = [replace(row, tape=Named(row.tape)) for row in rows]
    imitated = enumerate(rows[:3] if case.demonstrations else ())
    shown = [replace(row, tape=Named(f"d{k}"), group=f"d{k}") for k, row in imitated]

    def build(phase: str, work: Any, ranks: Ranks) -> Trainer:
        assert phase == "rl"
        critic = None
        if case.critic is not None:
            critic = CriticTrainer(
                own_critic(processes) if case.critic == "own" else Critic.on(work), OptimiserConfig(lr=0.1), ranks=ranks
            )
        return Noting(
            work,
            get_recipe(case.recipe, case.changes),
            OptimiserConfig(lr=0.05, grad_clip=0.05, micro_tokens=20 + 10 * ranks.rank),
            ranks=ranks,
            critic=critic,
        )

    if ranks.rank:
        with torch.no_grad():
            next(iter(model.parameters())).zero_()  # rank 0's weights are those that count
    processes = Processes(ranks, model, build)
    if ranks.rank:
        steps = processes.follow()
        return {
            "steps": steps,
            "weights": ranks.whole(dict(model.state_dict())),
            "held": held(processes),
            "mine": sorted(cast(Noting, processes.member).mine),
            "arrived": sorted(set(ARRIVED)),
        }
    steps: list[UpdateStats] = []
    state: Any = None
    with processes.leading():
        for _ in range(2):
            trainer = processes.enter("rl")
            trainer.version = "run:1"
            if state is not None:
                processes.load(state)
            divided = Division.of(
                rows,
                episodes,
                ranks.shares,
                minibatches=case.minibatches,
                batches=case.batches,
                demonstrations=shown,
            )
            steps += processes.updates(divided, epochs=2, seed=3)
            state = processes.state()
        with gathering() as gathered:
            hashed = processes.digest()
        weights = processes.weights()
        earlier = earlier_digest(weights)
        known = [processes.digest(earlier) == earlier, processes.digest("0" * 64) == hashed]
    processes.finish(len(steps))
    weights = ranks.whole(dict(model.state_dict()))
    return {
        "held": held(processes),
        "hashes": [*known, hashed == weights_digest(weights), gathered],
        "steps": [
            [
                s.skipped,
                s.loss,
                s.grad_norm,
                s.step,
                s.line() if s.applied else s.sums["tokens"],
                s.weight,
                s.advantage,
                s.sums.mean("ratio") if s.applied else None,
                None if s.shown is None else s.shown[2],
            ]
            for s in steps
        ],
        "weights": weights,
        "state": state,
    }


@contextmanager
def gathering() -> Iterator[list[tuple[int, ...]]]:
    """Yield the shapes of the weights with rows that this process gathers in the block."""
    gathered: list[tuple[int, ...]] = []
    gather = DTensor.full_tensor

    def noting(tensor: DTensor, **more: Any) -> torch.Tensor:
        if in_rows(tensor) and (tensor.dtype, tensor.shape[1:]) != (torch.uint8, (32,)):
            gathered.append(tuple(tensor.shape))
        return gather(tensor, **more)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(DTensor, "full_tensor", noting)
        yield gathered


def odd_digests() -> dict[str, Any]:
    """The digests that this group computes of `odd_weights`, spread over its ranks in several ways."""
    mesh = DeviceMesh.from_group(cast(Any, torch.distributed.group.WORLD), "cpu")
    state = odd_weights(float8=False)

    def spread(placement: Any) -> dict[str, torch.Tensor]:
        return {
            name: distribute_tensor(tensor, mesh, [placement(tensor)], src_data_rank=None)
            for name, tensor in state.items()
        }

    rows = {**spread(lambda tensor: Shard(0) if tensor.dim() else Replicate()), "number": state["number"]}
    with gathering() as gathered:
        found: dict[str, Any] = {"rows": shared_digest(rows), "gathered": gathered}
    found["earlier"] = shared_digest(rows, earlier_digest(state))
    found["columns"] = shared_digest(spread(lambda tensor: Shard(tensor.dim() - 1) if tensor.dim() else Replicate()))
    found["copies"] = shared_digest(spread(lambda _: Replicate()))
    own = cast(DTensor, rows["bfloat16"]).to_local()
    if torch.distributed.get_rank() == torch.distributed.get_world_size() - 1:
        own.view(torch.uint8)[-1, -1] ^= 1
    return {**found, "flipped": shared_digest(rows), "flipped and earlier": shared_digest(rows, found["earlier"])}


def held(processes: Processes) -> float:
    """The share of the weights that this process holds."""
    parameters = list(processes.model.parameters())
    local = [p.to_local() if isinstance(p, DTensor) else p for p in parameters]
    return sum(p.numel() for p in local) / sum(p.numel() for p in parameters)


def own_critic(processes: Processes, vision: Any = None) -> Critic:
    """A critic with a body of its own, as `TrainerFactory` makes it."""
    if processes.empty is None:
        return Critic.of(processes.model, vision=vision)
    critic = Critic.of(processes.empty, vision=vision)
    processes.ranks.shard(critic, critic.weights_of(processes.model), torch.device("cpu"))
    return critic


def three_groups(model: Any) -> tuple[list[Row], list[Episode]]:
    """Three groups of three, of other sizes."""
    rows, episodes = batch(model=model)
    more = batch(seed=5, model=model)
    names = {row.tape: f"{row.tape}'" for row in more[0][:3]}
    rows = rows + [replace(row, tape=names[row.tape], group="g2", versions=("run:1",)) for row in more[0][:3]]
    return rows, episodes + [replace(e, tape=names[e.tape], group="g2") for e in more[1][:3]]


SEEN = ("tower", "nothing", "shared out")


def seen(case: str, ranks: Ranks) -> dict[str, Any]:
    """What came of two steps of PPO on two groups: that of rank 0 shows pictures, the other's is text alone. In `shared
    out`, a third group shows pictures to the other rank."""
    found = pretrained("qwen2_vl")
    model: Any = copy.deepcopy(found.model)
    assert found.vision is not None
    freeze(model, found.vision, "tower" if case == "tower" else "nothing")
    rows = [
        *(shown("qwen2_vl", [(["Where? ", png(24, 16, k), "?"], sampled(3, k))], f"t{k}", "g0") for k in range(3)),
        *(shown("qwen2_vl", [(["And in words?"], sampled(2, 9 + k))], f"u{k}", "g1") for k in range(2)),
    ]
    if case == "shared out":
        ARRIVED.clear()
        rows += [shown("qwen2_vl", [([png(16, 16, k), "?"], sampled(2, k))], f"v{k}", "g2") for k in range(2)]
    episodes = [Episode(tape=r.tape, group=r.group, reward=float(k % 2)) for k, r in enumerate(rows)]

    def build(phase: str, work: Any, ranks: Ranks) -> Trainer:
        # With eps 1 a step is nearly linear in the gradient, so that its rounding isn't enlarged.
        body = own_critic(processes, found.vision) if case == "shared out" else Critic.of(model, vision=found.vision)
        critic = CriticTrainer(body, OptimiserConfig(lr=0.1, eps=1.0, micro_tokens=30), ranks=ranks)
        options = OptimiserConfig(lr=0.1, eps=1.0, micro_tokens=30)
        return Trainer(work, get_recipe("ppo"), options, critic=critic, ranks=ranks, vision=found.vision)

    if case != "shared out":
        mine = slice(None) if ranks.size == 1 else slice(0, 3) if ranks.rank == 0 else slice(3, None)
        trainer = build("rl", model, ranks)
        steps = [trainer.update(rows[mine], episodes[mine]) for _ in range(2)]
    else:
        processes = Processes(ranks, model, build)
        if ranks.rank:
            processes.follow()
            return {"weights": ranks.whole(dict(model.state_dict())), "arrived": list(ARRIVED)}
        with processes.leading():
            # A tape's method, which no other process can be sent.
            lock = threading.Lock()
            held = [replace(row, file=partial(_locked, lock, row.file)) if row.file else row for row in rows]
            steps = list[UpdateStats]()
            for _ in range(2):
                processes.enter("rl")
                steps += processes.updates(Division.of(held, episodes, ranks.shares))
        processes.finish(None)
    norms = [stats.grad_norm for stats in steps]
    return {"weights": ranks.whole(dict(model.state_dict())), "norms": norms, "skipped": [s.skipped for s in steps]}


def _locked(lock: threading.Lock, file: Callable[[str], bytes], name: str) -> bytes:
    with lock:
        return Picture(file(name))


def damaged(ranks: Ranks, folder: Path) -> Any:
    """How many files of a checkpoint the ranks damage, and how many of them rank 0 hears of."""
    processes = Processes(ranks, tiny_model(), lambda *_: sys.exit("no phase begins"))
    if ranks.rank:
        return processes.follow()
    with processes.leading():
        made = save_checkpoint(folder, processes.model, {}, {}, update=1, held=processes)
        files = list(made.path.glob("policy/*.safetensors"))
        for file in files:
            file.write_bytes(b"")
        found = len(files), len(processes.damage(made))
    processes.finish(found)
    return found


def main(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    for family in ("qwen2_vl", "qwen3_vl"):
        pretrained(family)  # made before: in a group, rank 0 alone saves a model
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2, timeout=timedelta(seconds=60)
    )
    found: dict[str, Any] = {}
    for kind, make in (("group", DataParallelRanks), ("sharded", ShardedRanks)):
        found[kind] = {case.name: trained(case, make()) for case in CASES}
        found[f"{kind} shared"] = {case.name: led(case, make()) for case in SHARED}
        found[f"{kind} seen"] = {case: seen(case, make()) for case in SEEN}
    across, within = DataParallelRanks(), DataParallelRanks(sequence_parallel=2)
    found["moved"] = [
        across.gather(rank),
        across.scatter(None if rank else ["a", "b"]),
        within.gather(rank),
        within.scatter(None if rank else ["both"]),
    ]
    found["damaged"] = damaged(ShardedRanks(sequence_parallel=2), Path(folder))
    found["together"] = outcomes((2,), [case for case in TOGETHER if case.quick])
    found["digests"] = odd_digests()
    torch.save(found, f"{folder}/rank{rank}.pt")
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
