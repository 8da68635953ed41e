"""Sums, means and extremes over the segments of a column, and the recurrence for credit assignment.

A segment is a set of elements with the same index in `segment`, such as the tokens of one episode. The elements may be
in any order, except in `recur`. All functions are pure.
"""

from __future__ import annotations

import torch
from torch import Tensor


def total(x: Tensor, segment: Tensor, n: int) -> Tensor:
    """Return the sum (n,) of x over each segment."""
    return torch.zeros(n, dtype=x.dtype, device=x.device).index_add(0, segment, x)


def count(segment: Tensor, n: int) -> Tensor:
    """Return the number of elements (n,) int64 in each segment."""
    return torch.bincount(segment, minlength=n)


def mean(x: Tensor, segment: Tensor, n: int) -> Tensor:
    """Return the mean (n,) of x over each segment, 0 for an empty segment."""
    return total(x, segment, n) / count(segment, n).clamp(min=1).to(x.dtype)


def extremes(x: Tensor, segment: Tensor, n: int) -> tuple[Tensor, Tensor]:
    """Return the smallest and the largest x (n,) in each segment, or +inf and -inf for an empty segment."""
    low = torch.full((n,), torch.inf, dtype=x.dtype, device=x.device).scatter_reduce(0, segment, x, "amin")
    high = torch.full((n,), -torch.inf, dtype=x.dtype, device=x.device).scatter_reduce(0, segment, x, "amax")
    return low, high


def recur(x: Tensor, decay: Tensor) -> Tensor:
    """Return y, where y[t] = x[t] + decay[t] * y[t + 1], with 0 after the last element. A decay of 0 ends a segment.

    Each pass doubles the number of elements that are added up in y[t], so the number of passes is logarithmic in the
    length of the longest segment. If |decay| <= 1, no factor grows. Elements of other segments are multiplied by an
    exact 0.
    """
    y, carry, step = x.clone(), decay.clone(), 1
    while step < len(x) and bool(carry.any()):
        y[:-step] = y[:-step] + carry[:-step] * y[step:]
        carry[:-step] = carry[:-step] * carry[step:]
        step *= 2
    return y
