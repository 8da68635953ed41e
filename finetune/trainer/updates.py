"""What goes into an update and what comes out: the prepared batch, the statistics of a step, and the order of steps."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NotRequired, TypedDict

import torch
from torch import Tensor, nn

from ...agents.vision.vision import Vision
from ..data.rows import Row
from ..data.stream import BadBatch, Episode, Stream
from ..objective import Context, Sums
from ..objective.loss import Batch, Part, prepare
from ..objective.recipe import Recipe
from ..recipes import get_recipe
from .critic import CriticState
from .options import TrainerOptions
from .ranks import Ranks
from .reference import OtherModel


class TrainerState(TypedDict):
    """The state of a trainer, apart from the weights."""

    optimizer: dict[str, Any]
    steps: int
    skips: dict[str, int]
    betas: list[float]
    moments: list[float]
    averaged: dict[str, Tensor]
    critic: CriticState | None
    others: NotRequired[dict[str, dict[str, object]]]
    """Of the reference and the teacher. Absent in a checkpoint of an earlier version."""


Skip = Literal["log-prob", "loss", "gradient", "another rank", "nothing to train on"]


@dataclass(kw_only=True)
class UpdateStats:
    """What one optimiser step did."""

    step: int
    """Updates that the trainer has applied, including this one if it was applied."""
    skipped: Skip | None
    """None: applied. Otherwise what wasn't finite, or that no token had a gradient; the weights are unchanged."""
    loss: float
    """Sum of w l over the tokens of this process; NaN when it wasn't finite."""
    parts: dict[str, float]
    """The loss by its terms: `policy` (the surrogate) and each regulariser. They add up to it; empty if no token was
    trained on, or it wasn't finite."""
    grad_norm: float
    """Before clipping; NaN when the update was skipped before."""
    lr: float
    sums: Sums
    """Every metric as a sum and a count."""
    stream: Stream
    weight: Tensor
    """(T,) float64: the weight of each own token's loss; 0 for tokens that took no part."""
    advantage: Tensor
    """(T,) float64: the advantage of each own token."""
    shown: tuple[Sequence[Row], Stream, Tensor] | None = None
    """Demonstrations that were trained on with the batch: their rows, their stream, and their tokens' weights."""

    @property
    def applied(self) -> bool:
        return self.skipped is None

    @property
    def mismatch(self) -> float | None:
        """Largest |log-prob now - at sampling| of a forwarded token that these weights sampled; None without one."""
        return self.sums.highs.get("mismatch")

    @property
    def ess(self) -> float | None:
        """Effective sample size / n: (sum r)^2 / (n sum r^2) with r = exp(lp now - lp at sampling); 1 on policy."""
        if not self.sums.counts.get("ratio"):
            return None
        return self.sums["ratio"] ** 2 / self.sums["ratio/square"] / self.sums.counts["ratio"]

    def line(self) -> dict[str, object]:
        """What a line of metrics.jsonl says of it (docs/metrics.md); without the names of what was not measured."""
        sums = self.sums.flat()
        values: dict[str, object] = {
            "loss": self.loss,
            **{f"loss/{name}": part for name, part in self.parts.items()},
            "grad_norm": self.grad_norm,
            "lr": self.lr,
            "skipped": self.skipped,
            "mismatch": self.mismatch,
            **{f"{name}/mean": sums.pop(name) for name in ("mismatch", "moved") if name in sums},
            "ess": self.ess,
            # The sum would count a batch once for each of its steps, and the mean divide it by the ranks.
            "tokens": round(len(self.stream) * sums.get("token/entered", 0.0)),
            # No bound takes effect on a token without an advantage, which isn't forwarded.
            **{f"{name}/own": sums[name] * sums["token/live"] for name in sums if name.split("/")[0] == "clip"},
        }
        if spread := self.sums.std("value/target"):
            values["value/explained"] = 1 - sums["value/error"] / (spread * spread)
        return {**values, **{name: value for name, value in sums.items() if name not in (*values, "episodes")}}


def together(steps: Sequence[UpdateStats]) -> UpdateStats:
    """Several steps on one prepared batch as one: applied if any was, sums and weights added up, losses and norms
    averaged.

    `mismatch` and `moved` belong to the first step alone. After it the weights differ from the sampler's on purpose,
    so a later mismatch says nothing of the numerics of sampler and trainer.
    """
    if len(steps) == 1:
        return steps[0]
    applied = [step for step in steps if step.applied]
    of = applied or steps
    sums = Sums()
    for k, step in enumerate(steps):
        sums.merge(step.sums if k == 0 else step.sums.without("mismatch", "moved"))
    last = steps[-1]
    weight = torch.stack([step.weight for step in of]).sum(0)
    return UpdateStats(
        step=last.step,
        skipped=None if applied else last.skipped,
        loss=sum(step.loss for step in of) / len(of),
        parts={name: sum(step.parts.get(name, 0.0) for step in of) / len(of) for step in of for name in step.parts},
        grad_norm=sum(step.grad_norm for step in of) / len(of),
        lr=last.lr,
        sums=sums,
        stream=last.stream,
        weight=weight,
        advantage=last.advantage,
    )


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """A rollout batch with its advantages, ready for one or several updates."""

    rows: Sequence[Row]
    batch: Batch
    sums: Sums
    """Metrics counted while preparing; each update reports them."""
    demonstrations: tuple[Sequence[Row], Part] | None = None
    """Rows whose cross-entropy is added to the loss, with their own denominator."""

    @property
    def imitated(self) -> tuple[Sequence[Row], Stream, Tensor] | None:
        """The demonstrations' rows, their stream, and what each of its tokens' loss counts; None without any."""
        if self.demonstrations is None:
            return None
        rows, part = self.demonstrations
        return rows, part.batch.stream, self.batch.recipe.imitation * part.weight


class PolicyTrainer(ABC):
    """A trainer as a training run uses it: one process (`Trainer`) or several (`DistributedTrainer`)."""

    model: nn.Module
    recipe: Recipe
    ranks: Ranks
    others: Mapping[str, OtherModel]
    """`reference` and `teacher`, those that the trainer has."""
    vision: Vision | None
    options: TrainerOptions
    steps: int
    """Updates applied."""
    version: str | None = None
    """Name of the present weights in rows, for `Stream.fresh`. None: unknown."""

    @abstractmethod
    def prepare(
        self,
        rows: Sequence[Row],
        episodes: Sequence[Episode],
        *,
        several: bool = False,
        batches: Sequence[int] = (),
        demonstrations: Sequence[Row] = (),
    ) -> Prepared:
        """Advantages and everything else that is computed once per rollout batch.

        several: more than one step will follow, so a recomputed anchor must be computed now, before weights change.
        batches: episodes of each rollout batch, in order, if there are several. A term that compares `by = batch`
        compares within one of them.
        """

    @abstractmethod
    def demonstrations_of(self, rows: Sequence[Row]) -> tuple[Sequence[Row], Part] | None:
        """The demonstrations with the weights of their tokens' cross-entropy; None without any."""

    @abstractmethod
    def step(self, prepared: Prepared, *, episodes: Tensor | None = None) -> UpdateStats:
        """One optimiser step on a prepared batch, or on its episodes `episodes` (E,) bool."""

    @abstractmethod
    def end_update(self) -> None:
        """After all steps of an update: moves a reference that follows the policy."""

    @abstractmethod
    def state_dict(self) -> TrainerState:
        """All state but the weights that the next update depends on: tensors, numbers and strings only. Tensors are
        whole, also where weights are sharded."""

    @abstractmethod
    def load_state_dict(self, state: TrainerState) -> None:
        """Continues from `state_dict`, bit for bit if the model has the weights that belong to it."""

    def updates(
        self,
        rows: Sequence[Row],
        episodes: Sequence[Episode],
        *,
        epochs: int = 1,
        minibatches: int = 1,
        seed: int | None = None,
        batches: Sequence[int] = (),
        demonstrations: Sequence[Row] = (),
    ) -> Iterator[UpdateStats]:
        """Several optimiser steps on one rollout batch, one at a time; advantages are computed once, over the whole.

        Each epoch cuts the episodes into `minibatches` parts of like size, in an order shuffled by `seed` and the
        number of updates so far; seed None keeps the order. Demonstrations are cut alike, by tape. batches: as
        in `prepare`.
        """
        imitated = cut_rows(demonstrations, minibatches)
        prepared = self.prepare(
            rows, episodes, several=epochs * minibatches > 1, batches=batches, demonstrations=imitated[0]
        )
        beside = [prepared.demonstrations, *map(self.demonstrations_of, imitated[1:])]
        for _ in range(epochs):
            cuts = cut_episodes(len(episodes), minibatches, seed, self.steps)
            for part, own in zip(cuts, beside, strict=True):
                yield self.step(replace(prepared, demonstrations=own), episodes=part)
        self.end_update()


def cut_episodes(episodes: int, minibatches: int, seed: int | None, steps: int) -> list[Tensor | None]:
    """(E,) bool masks of the mini-batches of one epoch; None for all episodes.

    The order depends on `seed` and the number of updates so far, so each epoch has another order and a resumed run has
    the order of a run that was never stopped.
    """
    if minibatches == 1:
        return [None]
    if minibatches > episodes:
        raise BadBatch(f"{episodes} episodes can't be cut into {minibatches} mini-batches: take fewer mini-batches")
    order = torch.arange(episodes)
    if seed is not None:
        order = torch.randperm(episodes, generator=torch.Generator().manual_seed(seed * 1_000_003 + steps))
    cuts: list[Tensor | None] = []
    for members in order.tensor_split(minibatches):
        mask = torch.zeros(episodes, dtype=torch.bool)
        mask[members] = True
        cuts.append(mask)
    return cuts


def cut_rows(rows: Sequence[Row], parts: int) -> list[Sequence[Row]]:
    """The rows in `parts` parts, each tape whole. Parts may be empty."""
    tapes = list(dict.fromkeys(row.tape for row in rows))
    if tapes and len(tapes) < parts:
        raise BadBatch(f"{len(tapes)} demonstrations can't be cut into {parts} mini-batches: give at least {parts}")
    owner = {tape: k * parts // len(tapes) for k, tape in enumerate(tapes)}
    return [[row for row in rows if owner[row.tape] == part] for part in range(parts)]


def imitation_part(rows: Sequence[Row], add_up: Callable[[Tensor], Tensor] = lambda x: x) -> Part:
    """The demonstrations with the weights of their cross-entropy, a mean over their own tokens on all ranks."""
    episodes = [Episode(tape=t, group=g, reward=None) for t, g in dict.fromkeys((r.tape, r.group) for r in rows)]
    return prepare(get_recipe("sft"), Stream.of(rows, episodes), Context(add_up=add_up)).part(add_up=add_up)


@dataclass(kw_only=True)
class Accumulated:
    """Loss and metrics of the micro-batches of one update so far."""

    loss: float = 0.0
    parts: dict[str, float] = field(default_factory=dict)
    skipped: Skip | None = None
    sums: Sums = field(default_factory=Sums)

    def fail(self, why: Skip) -> None:
        """The update can't be applied: a number of it isn't finite, on this rank or on another."""
        self.skipped, self.loss = why, float("nan")
        self.parts.clear()


def observe(lp: Tensor, old: Tensor, sums: Sums, fresh: Tensor | None = None) -> None:
    """Adds up the differences between the log-probs now (n,) and at sampling (n,): ESS and KL are read from these sums.
    fresh: (n,) bool, as `Stream.fresh`.

    In float64: the differences are near 0 on policy, and float32 sums over a batch would be mostly rounding. The ratio
    is capped at e^20, so that one token with a broken log-prob can't make the sums infinite.
    """
    delta = lp.cpu().double() - old.double()
    sums.add("moved", delta.abs(), extremes=True)
    sums.add("mismatch", delta.abs() if fresh is None else delta[fresh].abs(), extremes=True)
    sums.add("kl/old", -delta)
    ratio = delta.clamp(max=20).exp()
    sums.add("ratio", ratio, extremes=True)
    sums.add("ratio/square", ratio.square())
