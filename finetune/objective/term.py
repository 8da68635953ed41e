"""The base of all terms: a frozen value that prints itself, and sums that become metrics.

A term is its constants and one pure function over the stream. Terms know nothing of each other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch
from pydantic import BaseModel, ConfigDict
from torch import Tensor


class Term(BaseModel):
    """One term of a recipe. An unknown key is an error."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    def __str__(self) -> str:
        values = {name: getattr(self, name) for name in type(self).model_fields}
        kind = values.pop("kind", None)
        inside = ", ".join(f"{name}={_show(value)}" for name, value in values.items())
        return f"{kind}({inside})" if kind is not None else inside


def _show(value: object) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


class Sums:
    """Metrics as sums and counts, so that parts (micro-batches, ranks, updates) add up exactly.

    Extremes are kept beside them. A mean is only ever taken when it is read.
    """

    def __init__(self) -> None:
        self.sums: dict[str, float] = {}
        self.counts: dict[str, float] = {}
        self.lows: dict[str, float] = {}
        self.highs: dict[str, float] = {}

    def add(self, name: str, values: Tensor, *, extremes: bool = False) -> None:
        """Adds every element of `values`; booleans count as 0 and 1."""
        n = values.numel()
        self.put(name, float(values.sum(dtype=torch.float64)) if n else 0.0, n)
        if extremes and n:
            self.lows[name] = min(self.lows.get(name, float("inf")), float(values.min()))
            self.highs[name] = max(self.highs.get(name, float("-inf")), float(values.max()))

    def put(self, name: str, total: float, n: float = 1) -> None:
        """Adds a sum that was taken elsewhere, over `n` elements."""
        self.sums[name] = self.sums.get(name, 0.0) + total
        self.counts[name] = self.counts.get(name, 0.0) + n

    def merge(self, other: Sums) -> None:
        """Adds all of `other`."""
        for name, value in other.sums.items():
            self.put(name, value, other.counts[name])
        for name, value in other.lows.items():
            self.lows[name] = min(self.lows.get(name, float("inf")), value)
        for name, value in other.highs.items():
            self.highs[name] = max(self.highs.get(name, float("-inf")), value)

    def without(self, *names: str) -> Sums:
        """A copy that lacks these."""
        copy = Sums()
        for mine, its in (
            (self.sums, copy.sums),
            (self.counts, copy.counts),
            (self.lows, copy.lows),
            (self.highs, copy.highs),
        ):
            its.update((name, value) for name, value in mine.items() if name not in names)
        return copy

    def mean(self, name: str) -> float | None:
        """Sum over count; None when nothing was counted, which is not zero."""
        n = self.counts.get(name, 0.0)
        return self.sums[name] / n if n else None

    def std(self, name: str) -> float | None:
        """Biased deviation, where `name/square` was added as well; None when nothing was counted."""
        mean, square = self.mean(name), self.mean(f"{name}/square")
        return None if mean is None or square is None else max(square - mean * mean, 0.0) ** 0.5

    def items(self) -> Iterator[tuple[str, float, float]]:
        """(name, sum, count) in the order of their first appearance."""
        for name, value in self.sums.items():
            yield name, value, self.counts[name]

    def flat(self) -> dict[str, float]:
        """Means, and extremes as `name/min` and `name/max`: for a line of metrics, not for adding up."""
        means = {name: value / n for name, value, n in self.items() if n}
        means |= {f"{name}/min": value for name, value in self.lows.items()}
        return means | {f"{name}/max": value for name, value in self.highs.items()}

    def __contains__(self, name: object) -> bool:
        return name in self.sums

    def __getitem__(self, name: str) -> float:
        return self.sums[name]


@dataclass
class Moments:
    """Running count, mean and sum of squared deviations of all rewards seen."""

    n: float = 0.0
    mean: float = 0.0
    m2: float = 0.0

    def take(self, n: float, mean: float, m2: float) -> None:
        """Joins a batch's moments (Chan's parallel form): the same numbers as in one pass over everything."""
        if n == 0:
            return
        delta, whole = mean - self.mean, self.n + n
        self.m2 += m2 + delta * delta * self.n * n / whole
        self.mean += delta * n / whole
        self.n = whole

    @property
    def std(self) -> float | None:
        """Unbiased; None while fewer than two values or no spread were seen, when nothing can be scaled by it."""
        return (self.m2 / (self.n - 1)) ** 0.5 if self.n > 1 and self.m2 > 0 else None


@dataclass
class Context:
    """What a term may touch beside the stream."""

    sums: Sums = field(default_factory=Sums)
    """Where it reports."""
    moments: Moments = field(default_factory=Moments)
    """Of the rewards, kept by the trainer from update to update."""
    add_up: Callable[[Tensor], Tensor] = lambda x: x
    """Adds a tensor up over all ranks; one process has nothing to add."""

    def mean_and_square(self, x: Tensor) -> tuple[float, float, float]:
        """(n, mean, sum of squared deviations) of x over all ranks, in two passes so that nothing cancels."""
        n, total = self.add_up(torch.tensor([len(x), float(x.sum())], dtype=torch.float64)).tolist()
        mean = total / max(n, 1.0)
        return n, mean, float(self.add_up((x - mean).square().sum().to(torch.float64)))
