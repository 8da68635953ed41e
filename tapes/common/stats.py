"""Limits rewards, and computes and formats sums, means and variances for display.

Sums and means never raise an error, even if metrics or rewards from earlier versions are as large as the largest float.
A result beyond the range of floats is infinite. A result is NaN if there are too few values, or if the values include
NaN or infinities of both signs.
"""

from __future__ import annotations

import math
import statistics
import sys
from collections.abc import Iterable, Sequence

from ..errors import BadArgument
from .arguments import shown

REWARD_LIMIT = 1e15
"""Largest absolute value of a reward, before and after its weight is applied. Up to this value, a float holds every
whole number exactly. Training computes squares of rewards, and these squares are finite in float32. A larger value is a
mistake in the environment."""
TOLERANCE = 1e-9
"""A reward reaches a limit, such as 1.0 for success, if it is less than this below it. Products of weights and values
are rounded."""
DOWN = 2.0**-64
"""Floats are scaled by this factor before they are added up, so that even a sum of the largest floats is finite. A
power of two causes no rounding."""


def plain(value: object) -> object:
    """Return the Python number or bool in a scalar of numpy or torch, and any other value unchanged."""
    if isinstance(value, int | float):
        return float(value) if isinstance(value, float) else value  # numpy's float64 is a float
    item = getattr(value, "item", None)
    return item() if callable(item) and getattr(value, "ndim", None) == 0 else value


def reward_value(name: str, value: object, weight: float = 1.0) -> float:
    """Return `value` as a component of a reward, or as a metric if its weight is 0.

    A bool counts as 0 or 1, and a scalar of numpy or torch as its number. Raises BadArgument if `value` isn't a finite
    number, or if it is a reward beyond REWARD_LIMIT.
    """
    if type(value) is not float:  # almost every value is one, and each turn checks some
        given, value = value, plain(value)
        if not isinstance(value, int | float):
            raise BadArgument(f"{name} must be a number, not {shown(given)}")
    most = REWARD_LIMIT if weight else sys.float_info.max
    if not (-most <= value <= most and -most <= weight * value <= most):
        known = isinstance(value, float) or abs(value) <= sys.float_info.max
        text = repr(float(value)) if known else "an integer that no float can hold"
        raise BadArgument(
            f"{name} is {text}{'' if weight in (0, 1) else f' with the weight {weight!r}'}, but it must be from "
            f"{-most:g} to {most:g}: scale it down, or leave it out if there is no score"
        )
    return float(value)


def total(values: Iterable[float], n: int = 1) -> float:
    """Return the sum of the values, divided by `n`. Return 0.0 if there are no values."""
    values = [*values]
    try:
        return math.fsum(values) / n
    except (OverflowError, ValueError):
        odd = [value for value in values if not math.isfinite(value)]
        return sum(odd) if odd else math.fsum(DOWN * value for value in values) / n / DOWN


def mean(values: Sequence[float]) -> float:
    """Return the arithmetic mean, or NaN if there are no values."""
    return total(values, len(values)) if values else math.nan


def mean_of(values: Sequence[float]) -> float | None:
    """Return the arithmetic mean, or None if there are no values."""
    return mean(values) if values else None


def ends_of(values: Sequence[float]) -> tuple[Sequence[float], Sequence[float]]:
    """Return the first five and the last five values. Of fewer than ten, return the first and the last half, without
    the middle one. A single value is a first one."""
    n = min(5, max(1, len(values) // 2))
    return values[:n], values[n:][-n:]


def variance(values: Sequence[float]) -> float:
    """Return the variance with the divisor n - 1, or NaN for fewer than two values."""
    try:
        return statistics.variance(values) if len(values) > 1 else math.nan
    except OverflowError:
        return math.inf


def fixed(value: float | None, spec: str = ".3f") -> str:
    """Return `value` in a format such as `.3f` or `+.3f`. Values from 1e12 on have a form such as `1e+200`, and None
    becomes `-`."""
    if value is None:
        return "-"
    return format(value, spec if abs(value) < 1e12 else "+.4g" if spec[0] == "+" else ".4g")


def number(value: float | None) -> str:
    """Return a reward or a mean with at most three decimals. Return `-` for None."""
    text = fixed(value)
    return text.rstrip("0").rstrip(".") if "." in text and "e" not in text else text


def interval(value: float | None, low: float | None, high: float | None, spec: str = ".3f") -> str:
    """Return the value with its interval, such as `0.5 [0.4, 0.6]`, in the format `spec`. Return only the value if a
    bound is None."""
    bounds = "" if low is None or high is None else f" [{fixed(low, spec)}, {fixed(high, spec)}]"
    return fixed(value, spec) + bounds
