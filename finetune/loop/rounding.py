"""Which differences between two log-probs of a token rounding explains, by a measurement of the model itself.

In bfloat16, rounding alone moves some log-probs by tenths of a nat. The log-prob that a sampler recorded and the one
computed again in the same precision are two roundings of one number, which float32 arithmetic with the same weights
gives. So both are equally far from it, whatever the model. The root mean square over many tokens is compared, because
rounding errors have heavy tails.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from ...agents.vision.vision import Vision
from ..data.rows import Row
from ..trainer.logprobs import casting, score

TOLERANCE = 1e-4
"""Two log-probs in float32 count as equal up to this difference in nats. It is ten times the observed rounding error,
but less than the effect of one update."""
MARGIN = 1.25
"""In bfloat16, recorded log-probs may be this many times further from float32 than those computed again, because a
sampler rounds at other places. On a CPU, the measured ratios are between 0.9 and 1.12."""
SURE, TAIL = 5.0, 10.0
"""The tolerance in bfloat16 includes SURE standard deviations of a mean square. They are computed for a kurtosis of at
least TAIL, as measured for SmolLM2-135M, because few tokens don't show how heavy the tails are."""
SAMPLE = 1024
"""An update measures the rounding of about this many tokens."""


def allowed(n: int, rounding: NDArray[np.float64]) -> float:
    """Return the tolerance in nats for the root mean square error of `n` recorded log-probs. `rounding` are the errors
    (N,) of those computed again.

    As in Bernstein's inequality, a term for the variance is followed by one for tails, which counts for few tokens.
    """
    size = rms(rounding)
    kurtosis = max(float(((rounding / size) ** 4).mean()), TAIL) if size else TAIL
    x = SURE * math.sqrt((kurtosis - 1) * (1 / n + 1 / len(rounding)))
    return max(MARGIN * size * math.sqrt(1 + x + x * x / 2), TOLERANCE)


def rms(errors: NDArray[np.float64]) -> float:
    """Return the root mean square of errors (N,)."""
    return math.sqrt((errors**2).mean())


def sample_of(rows: Sequence[Row], version: str) -> list[Row]:
    """Return rows with about `SAMPLE` own tokens that `version` sampled, or all of its tokens if there are fewer."""
    found, n = list[Row](), 0
    for row in rows:
        its = [k for k, name in enumerate(row.versions) if name == version]
        own = row.where(np.isfinite(row.old) & np.isin(row.version, its))
        # Whole rows are taken, because the forward pass costs the same whatever share of a row is scored.
        if len(own.own) and n < SAMPLE:
            found, n = [*found, own], n + len(own.own)
    return found


def rounding_of(
    model: nn.Module, *, rows: Sequence[Row], autocast: torch.dtype, vision: Vision | None
) -> NDArray[np.float64]:
    """Return the errors (N,) of the log-probs of `rows` under autocast, in nats: what the model gives there and without
    autocast. The errors include those of rounded weights."""
    with casting(model, autocast):
        narrow = score(model, rows, vision=vision).logprob
    return (narrow - score(model, rows, vision=vision).logprob).double().cpu().numpy()
