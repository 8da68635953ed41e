"""What goes into an update and what comes out of it: a prepared batch, and the account of one optimiser step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from ..data.rows import Row
from ..data.stream import Stream
from ..objective import Sums
from ..objective.loss import Batch, Part

Skip = Literal["log-prob", "loss", "gradient", "another rank", "nothing to train on"]


@dataclass(kw_only=True)
class UpdateStats:
    """What one optimiser step did."""

    step: int
    """Applied updates of the trainer, this one included if it was applied."""
    skipped: Skip | None
    """None: applied. Else what wasn't finite, or that no token had a gradient; weights are as before."""
    loss: float
    """sum of w l of this process; NaN when it wasn't finite."""
    grad_norm: float
    """Before clipping; NaN when the update was skipped before."""
    lr: float
    sums: Sums
    """Every metric as a sum and a count."""
    stream: Stream
    weight: Tensor
    """(T,) float64 what each own token's loss counted; 0 for those that took no part."""
    advantage: Tensor
    """(T,) float64."""
    shown: tuple[Sequence[Row], Stream, Tensor] | None = None
    """Rows that were imitated beside the batch, their stream, and what each of its tokens' loss counted."""

    @property
    def applied(self) -> bool:
        return self.skipped is None

    @property
    def mismatch(self) -> float | None:
        """Largest |log-prob now - at sampling| of a scored token; None when none was scored."""
        return self.sums.highs.get("mismatch")

    @property
    def ess(self) -> float | None:
        """Effective share of the sample: (sum r)^2 / sum r^2 / n of r = exp(now - at sampling); 1 on policy."""
        if not self.sums.counts.get("ratio"):
            return None
        return self.sums["ratio"] ** 2 / self.sums["ratio/square"] / self.sums.counts["ratio"]


def together(steps: Sequence[UpdateStats]) -> UpdateStats:
    """Several steps on one prepared batch as one: applied if any was, weights and sums added up, the mean of losses
    and norms. `mismatch` is that of the first step: after it the weights are not those that sampled."""
    if len(steps) == 1:
        return steps[0]
    applied = [step for step in steps if step.applied]
    of = applied or steps
    sums = Sums()
    for k, step in enumerate(steps):
        sums.merge(step.sums if k == 0 else step.sums.without("mismatch"))
    last = steps[-1]
    weight = torch.stack([step.weight for step in of]).sum(0)
    return UpdateStats(
        step=last.step,
        skipped=None if applied else last.skipped,
        loss=sum(step.loss for step in of) / len(of),
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
    """What was counted while preparing; reported with each update."""
    demonstrations: tuple[Sequence[Row], Part] | None = None
    """Rows whose cross-entropy is added to the loss, with weights of their own."""


@dataclass(kw_only=True)
class Accumulated:
    """What the micro-batches of one update came to."""

    loss: float = 0.0
    skipped: Skip | None = None
    sums: Sums = field(default_factory=Sums)


def observe(lp: Tensor, old: Tensor, sums: Sums) -> None:
    """Adds up how far the log-probs now (n,) are from those at sampling (n,): what ESS and KL follow from."""
    delta = lp.cpu().double() - old.double()
    sums.add("mismatch", delta.abs(), extremes=True)
    sums.add("kl/old", -delta)
    ratio = delta.clamp(max=20).exp()
    sums.add("ratio", ratio, extremes=True)
    sums.add("ratio/square", ratio.square())
