"""The limit of rewards; sums, means and variances for people, and their formatting.

Sums and means never raise, although metrics, and rewards of earlier versions, may be as large as a float can be.
A result beyond the range of floats is infinite. NaN means too few values, a NaN value, or infinities of both signs.
"""

from __future__ import annotations

import math
import statistics
import sys
from collections.abc import Iterable, Sequence

from ..errors import BadArgument
from .arguments import shown

REWARD_LIMIT = 1e15
"""Largest absolute value of a reward, before and after its weight. Up to here floats tell whole numbers apart, and the
square of a reward, which training computes, is finite in float32. A larger value is a mistake of the environment."""
DOWN = 2.0**-64
"""Scales floats so that any number of the largest can be added up. A power of two, so the result is the same."""


def check_reward(name: str, value: object, weight: float = 1.0) -> None:
    """Raise unless `value` can be a component of a reward or, with the weight 0, a metric.

    BadArgument if it isn't a finite number or, with a weight, lies beyond REWARD_LIMIT.
    """
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise BadArgument(f"{name} must be a float, not {shown(value)}: write float(...) around it")
    most = REWARD_LIMIT if weight else sys.float_info.max
    if not (-most <= value <= most and abs(weight * value) <= most):
        known = isinstance(value, float) or abs(value) <= sys.float_info.max
        text = repr(float(value)) if known else "an integer that no float can hold"
        raise BadArgument(
            f"{name} is {text}{'' if weight in (0, 1) else f' with the weight {weight!r}'}, but it must be from "
            f"{-most:g} to {most:g}: scale it down, or leave it out if there is no score"
        )


def total(values: Iterable[float], n: int = 1) -> float:
    """The sum divided by `n`; 0.0 without values."""
    values = [*values]
    try:
        return math.fsum(values) / n
    except (OverflowError, ValueError):
        odd = [value for value in values if not math.isfinite(value)]
        return sum(odd) if odd else math.fsum(DOWN * value for value in values) / n / DOWN


def mean(values: Sequence[float]) -> float:
    """The arithmetic mean; NaN without values."""
    return total(values, len(values)) if values else math.nan


def mean_of(values: Sequence[float]) -> float | None:
    """The arithmetic mean; None without values."""
    return mean(values) if values else None


def variance(values: Sequence[float]) -> float:
    """The variance with the divisor n - 1; NaN for fewer than two values."""
    try:
        return statistics.variance(values) if len(values) > 1 else math.nan
    except OverflowError:
        return math.inf


def fixed(value: float | None, spec: str = ".3f") -> str:
    """`value` by a format such as `.3f` or `+.3f`, as `1e+200` if it is 1e12 or larger; `-` for None."""
    if value is None:
        return "-"
    return format(value, spec if abs(value) < 1e12 else "+.4g" if spec[0] == "+" else ".4g")


def number(value: float | None) -> str:
    """A reward or a mean with at most three decimals; `-` for None."""
    text = fixed(value)
    return text.rstrip("0").rstrip(".") if "." in text and "e" not in text else text


def interval(value: float | None, low: float | None, high: float | None, spec: str = ".3f") -> str:
    """`0.5 [0.4, 0.6]` by the format `spec`; the number alone if a bound is None."""
    bounds = "" if low is None or high is None else f" [{fixed(low, spec)}, {fixed(high, spec)}]"
    return fixed(value, spec) + bounds
