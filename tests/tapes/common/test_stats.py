"""Sums, means and variances never raise, and agree with `statistics` wherever that has an answer."""

from __future__ import annotations

import math
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tapereel.tapes.common.stats import ends_of, fixed, interval, mean, mean_of, number, total, variance

ORDINARY = st.lists(st.floats(-1e15, 1e15), min_size=2)
FINITE = st.lists(st.floats(allow_nan=False, allow_infinity=False) | st.sampled_from([1e308, -1e308]), min_size=1)


@given(ORDINARY)
def test_ordinary_numbers_have_the_exact_results(values: list[float]) -> None:
    assert total(values) == math.fsum(values)
    assert mean(values) == mean_of(values) == statistics.fmean(values)
    assert variance(values) == statistics.variance(values)


@given(FINITE)
def test_the_mean_of_finite_numbers_is_among_them(values: list[float]) -> None:
    found = mean(values)
    assert min(values) <= found <= max(values) or any(math.isclose(found, end) for end in (min(values), max(values)))
    assert not math.isnan(total(values))
    assert len(values) < 2 or variance(values) >= 0


@given(st.lists(st.floats() | st.sampled_from([1e308, -1e308, math.inf, -math.inf]), max_size=8))
def test_nothing_raises_and_no_result_that_is_unknown_looks_finite(values: list[float]) -> None:
    results = total(values), mean(values), variance(values)
    if not all(map(math.isfinite, values)):
        assert not any(map(math.isfinite, results))
    if any(map(math.isnan, values)) or {math.inf, -math.inf} <= set(values):
        assert all(map(math.isnan, results[:2]))


def test_too_few_values_are_unknown() -> None:
    assert (total([]), mean_of([])) == (0.0, None)
    assert math.isnan(mean([]))
    assert math.isnan(variance([1.0]))


@pytest.mark.parametrize("value", [0.0, -1.5, 999_999_999_999.0, 1e12, -1e15, 1e200, -1.7e308, math.inf, math.nan])
def test_every_number_fits_into_a_column(value: float) -> None:
    for text in (fixed(value), fixed(value, "+.3f"), number(value)):
        assert len(text) <= 17
        assert float(text) == pytest.approx(value, rel=1e-3, nan_ok=True)
    assert len(interval(value, value, value, "+.3f")) <= 56


def test_ordinary_numbers_keep_their_digits() -> None:
    assert (fixed(0.5), fixed(0.5, "+.3f"), fixed(1234.5, ",.2f"), fixed(None)) == ("0.500", "+0.500", "1,234.50", "-")
    assert (number(0.5), number(2.0), number(1e200), number(None)) == ("0.5", "2", "1e+200", "-")
    assert (interval(0.5, 0.25, 0.75), interval(0.5, None, None)) == ("0.500 [0.250, 0.750]", "0.500")


def test_the_ends_of_a_series_have_no_common_value():
    assert ends_of(range(12)) == (range(5), range(7, 12))
    assert ends_of(range(5)) == (range(2), range(3, 5))
    assert [(list(a), list(b)) for a, b in map(ends_of, (range(2), range(1), range(0)))] == [
        ([0], [1]),
        ([0], []),
        ([], []),
    ]
