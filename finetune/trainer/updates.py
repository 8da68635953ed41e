"""The interface of a policy's trainer: a prepared batch goes into an update, and each step returns statistics."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NotRequired, TypedDict, cast

import torch
from torch import Tensor, nn

from ...agents.vision.vision import Vision
from ..data.rows import Row
from ..data.stream import BadBatch, Episode, Stream
from ..objective import Context, Sums
from ..objective.loss import Batch, Part, prepare
from ..objective.recipe import Recipe
from ..recipes import get_recipe
from .checkpoint import Checkpoint, unlike_state
from .critic import CriticState, CriticTrainer
from .options import OptimiserConfig
from .ranks import Ranks
from .reference import OtherModel


class TrainerState(TypedDict):
    """The state of a trainer, apart from the weights."""

    optimizer: dict[str, Any]
    steps: int
    updates: NotRequired[int]
    """Number of updates with a step. Checkpoints of earlier versions lack it, because schedules counted steps."""
    skips: dict[str, int]
    betas: list[float]
    moments: list[float]
    averaged: dict[str, Tensor]
    critic: CriticState | None
    others: NotRequired[dict[str, dict[str, object]]]
    """State of the reference and the teacher. A checkpoint from an earlier version lacks this key."""


Skip = Literal["log-prob", "loss", "gradient", "another rank", "nothing to train on", "critic first"]


@dataclass(kw_only=True)
class UpdateStats:
    """Results and metrics of one optimiser step."""

    step: int
    """Number of updates that the trainer has applied, including this one if it was applied."""
    skipped: Skip | None
    """Why the step was not applied, or None if it was applied. The reason is the value that wasn't finite, that there
    was nothing to train on, or that only the critic learns yet. The weights are then unchanged."""
    loss: float
    """The loss, which is the sum of `parts`, or NaN if it isn't finite. It covers only the tokens of this process,
    except with `DistributedTrainer`."""
    parts: dict[str, float]
    """The loss by term: `policy` (the surrogate) and each regulariser. Empty if no token was trained on or the loss
    wasn't finite."""
    grad_norm: float
    """The gradient's norm before clipping, or NaN if the update was skipped before the norm was computed."""
    lr: float | None
    """The learning rate of the update, or None if only the critic learns yet."""
    sums: Sums
    """All metrics, each stored as a sum and a count."""
    stream: Stream
    weight: Tensor
    """(T,) float64: the weight of each own token's loss, 0 for tokens that weren't part of the step."""
    advantage: Tensor
    """(T,) float64: the advantage of each own token."""
    shown: tuple[Sequence[Row], Stream, Tensor] | None = None
    """The demonstrations that were trained on with the batch: their rows, their stream, and the weights of their
    tokens."""

    @property
    def applied(self) -> bool:
        """Whether the step trained the policy, or as planned only the critic."""
        return self.skipped in (None, "critic first")

    @property
    def mismatch(self) -> float | None:
        """Largest |log-prob now - log-prob at sampling| over the tokens that were sampled with the weights before this
        step. Only tokens that were forwarded count. None if there are none."""
        return self.sums.highs.get("mismatch")

    @property
    def ess(self) -> float | None:
        """Effective sample size, divided by the number n of tokens: (sum r)^2 / (n sum r^2) with r = exp(log-prob now -
        log-prob at sampling). It is 1 on policy."""
        if not self.sums.counts.get("ratio"):
            return None
        return self.sums["ratio"] ** 2 / self.sums["ratio/square"] / self.sums.counts["ratio"]

    def line(self) -> dict[str, object]:
        """Return the fields of the step for a line of metrics.jsonl (see docs/reference/metrics.md). Values that
        weren't measured are None or absent."""
        sums = self.sums.without("mismatch/square").flat()
        values: dict[str, object] = {
            "loss": self.loss,
            **{f"loss/{name}": part for name, part in self.parts.items()},
            "grad_norm": self.grad_norm,
            "lr": self.lr,
            "skipped": self.skipped,
            "mismatch": self.mismatch,
            **{f"{name}/mean": sums.pop(name) for name in ("mismatch", "moved") if name in sums},
            "ess": self.ess,
            # The metric `tokens` isn't used here. Its sum counts a batch once for each of its steps, and its mean is
            # divided by the number of ranks.
            "tokens": round(len(self.stream) * sums.get("token/entered", 0.0)),
            # These are shares of all entered tokens. A token that isn't forwarded counts as unclipped.
            **{f"{name}/own": sums[name] * sums["token/live"] for name in sums if name.split("/")[0] == "clip"},
        }
        if spread := self.sums.std("value/target"):
            values["value/explained"] = 1 - sums["value/error"] / (spread * spread)
        return {**values, **{name: value for name, value in sums.items() if name not in (*values, "episodes")}}


def together(steps: Sequence[UpdateStats]) -> UpdateStats:
    """Combine the statistics of several steps on one prepared batch. The result counts as applied if any step was. Sums
    and weights are added up, and losses and norms are averaged.

    `mismatch` and `moved` come from the first step only. They should show numerical differences between sampler and
    trainer. After the first step, they would also show the effect of training.
    """
    if len(steps) == 1:
        return steps[0]
    applied = [step for step in steps if step.applied]
    of = applied or steps
    sums = Sums()
    for k, step in enumerate(steps):
        sums.merge(step.sums if k == 0 else step.sums.without("mismatch", "mismatch/square", "moved"))
    last = steps[-1]
    weight = torch.stack([step.weight for step in of]).sum(0)
    return UpdateStats(
        step=last.step,
        skipped=of[-1].skipped,
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
    """Metrics of the preparation, such as rewards and advantages. Each step on the batch reports them."""
    demonstrations: tuple[Sequence[Row], Part] | None = None
    """Demonstrations to imitate in addition, with the weight of each token's loss. Their loss has its own
    denominator."""

    @property
    def imitated(self) -> tuple[Sequence[Row], Stream, Tensor] | None:
        """The demonstrations' rows, their stream, and the weight of each token's loss, or None if there are no
        demonstrations."""
        if self.demonstrations is None:
            return None
        rows, part = self.demonstrations
        return rows, part.batch.stream, self.batch.recipe.imitation * part.weight


class PolicyTrainer(ABC):
    """Base class of the trainers for a policy, in one process (`Trainer`) or in several (`DistributedTrainer`)."""

    model: nn.Module
    recipe: Recipe
    ranks: Ranks
    others: Mapping[str, OtherModel]
    """`reference` and `teacher`, if the trainer has them."""
    critic: CriticTrainer | None
    vision: Vision | None
    options: OptimiserConfig
    steps: int
    """Number of applied updates."""
    version: str | None = None
    """Name of the current version of the weights. Rows name the version that sampled a token in the same way. None if
    the name is unknown."""

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
        """Compute the advantages and everything else that is computed once per rollout batch.

        Pass `several=True` if more than one step will follow. A recomputed anchor is then computed now, before the
        weights change. If there are several rollout batches, `batches` gives the number of episodes in each, in order.
        A term with `by = batch` compares episodes only within one rollout batch.
        """

    @abstractmethod
    def demonstrations_of(self, rows: Sequence[Row]) -> tuple[Sequence[Row], Part] | None:
        """Return the demonstrations `rows` with the weight of each token's loss, or None if there are none."""

    @abstractmethod
    def step(self, prepared: Prepared, *, episodes: Tensor | None = None) -> UpdateStats:
        """Take one optimiser step on a prepared batch. `episodes`, a bool mask (E,), limits it to these episodes."""

    def compared(self, recorded: Mapping[str, str | None]) -> dict[str, str]:
        """Return name and digest of the reference and the teacher. `recorded` has those in the record of an update that
        is applied again (see `OtherModel.described`)."""
        return {name: other.described(recorded.get(name)) for name, other in self.others.items()}

    @abstractmethod
    def end_update(self) -> None:
        """Finish an update, after all of its steps: a reference that follows the policy is changed now."""

    @abstractmethod
    def state_dict(self) -> TrainerState:
        """Return all state that the next update depends on, except the weights.

        The state consists of tensors, numbers and strings. Its tensors are whole, even if the weights are sharded.
        """

    def unlike(self, checkpoint: Checkpoint) -> list[tuple[str, str, str]]:
        """Return (place, saved, current) for each value in the checkpoint's state that isn't the current one bit for
        bit. Random numbers aren't compared. Raises BadCheckpoint if the state can't be read."""
        return unlike_state(checkpoint.trainer_state(), self.state_dict())

    def resume(self, checkpoint: Checkpoint) -> None:
        """Continue from the state in a checkpoint."""
        self.load_state_dict(cast(TrainerState, checkpoint.trainer_state()))

    @abstractmethod
    def load_state_dict(self, state: TrainerState) -> None:
        """Continue from a `state_dict()`. If the model has the weights of the same time, further updates are equal bit
        for bit."""

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
        """Take several optimiser steps on one rollout batch and yield each step's statistics. Advantages are computed
        once, over the whole batch.

        Each epoch splits the episodes into `minibatches` parts of similar size. Before the split, episodes are shuffled
        with a seed made from `seed` and the number of updates so far. If `seed` is None, they keep their order.
        Demonstrations are split into the same number of parts, and no tape is split. For `batches`, see `prepare`.
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
    """Split the episodes of one epoch into mini-batches, and return a mask (E,) bool for each. None means all episodes.

    The split depends only on `seed` and on `steps`, the number of updates so far. So it differs from epoch to epoch,
    and a resumed run has the same splits as a run that was never stopped.
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
    """Split the rows into `parts` parts without splitting a tape. Without rows, all parts are empty."""
    tapes = list(dict.fromkeys(row.tape for row in rows))
    if tapes and len(tapes) < parts:
        raise BadBatch(f"{len(tapes)} demonstrations can't be cut into {parts} mini-batches: give at least {parts}")
    owner = {tape: k * parts // len(tapes) for k, tape in enumerate(tapes)}
    return [[row for row in rows if owner[row.tape] == part] for part in range(parts)]


def imitation_part(rows: Sequence[Row], add_up: Callable[[Tensor], Tensor] = lambda x: x) -> Part:
    """Return the demonstrations `rows` with the weight of each token's loss. The loss is the mean cross-entropy over
    the own tokens of the demonstrations on all ranks."""
    episodes = [Episode(tape=t, group=g, reward=None) for t, g in dict.fromkeys((r.tape, r.group) for r in rows)]
    return prepare(get_recipe("sft"), Stream.of(rows, episodes), Context(add_up=add_up)).part(add_up=add_up)


@dataclass(kw_only=True)
class Accumulated:
    """Loss and metrics of an update's micro-batches so far."""

    loss: float = 0.0
    parts: dict[str, float] = field(default_factory=dict)
    skipped: Skip | None = None
    sums: Sums = field(default_factory=Sums)

    def fail(self, why: Skip) -> None:
        """Record why the update can't be applied: a number isn't finite on this rank or on another."""
        self.skipped, self.loss = why, float("nan")
        self.parts.clear()


def observe(lp: Tensor, old: Tensor, sums: Sums, fresh: Tensor | None = None) -> None:
    """Add metrics to `sums` that compare the current log-probs `lp` (n,) with the log-probs at sampling `old` (n,).

    ESS and KL are computed from them. `fresh` (n,) bool marks the tokens that were sampled with the weights before the
    update (`Stream.fresh`).

    The sums are in float64. On policy, the differences are near 0, and float32 sums over a batch would be mostly
    rounding error. The ratio is capped at e^20, so that one token with a broken log-prob can't make the sums infinite.
    """
    delta = lp.cpu().double() - old.double()
    sums.add("moved", delta.abs(), extremes=True)
    mismatch = delta.abs() if fresh is None else delta[fresh].abs()
    sums.add("mismatch", mismatch, extremes=True)
    sums.add("mismatch/square", mismatch.square())
    sums.add("kl/old", -delta)
    ratio = delta.clamp(max=20).exp()
    sums.add("ratio", ratio, extremes=True)
    sums.add("ratio/square", ratio.square())
