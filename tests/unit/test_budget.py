from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reconfig.budget import FIXED_MS_DEFAULT, FixedCost, Measured, fixed_cost_of, predicted_pause_ms


@pytest.mark.parametrize(
    ("measured", "fixed", "pause"),
    [
        (Measured(0, 0.0, 0.0, 0.0), 8.0, 8.0),
        (Measured(0, 0.0, 1e6, 4.0), 8.0, 10.0),
        (Measured(50_000, 0.0, 1e6, 4.0), 8.0, 60.0),
        (Measured(50_000, 5e5, 1e6, 4.0), 8.0, 120.0),
        (Measured(0, 9e5, 1e6, 4.0), 8.0, 100.0),
        (Measured(0, 1e6, 1e6, 4.0), 8.0, math.inf),
        (Measured(0, 2e6, 1e6, 4.0), 8.0, math.inf),
        # the bandwidth is not known because nothing had to cross: only latency counts
        (Measured(0, 5.0, 0.0, 6.0), 2.0, 5.0),
    ],
)
def test_formula(measured: Measured, fixed: float, pause: float) -> None:
    assert predicted_pause_ms(measured, fixed) == pytest.approx(pause)


def test_default_fixed_cost() -> None:
    assert predicted_pause_ms(Measured(0, 0.0, 0.0, 0.0)) == FIXED_MS_DEFAULT


positive = st.floats(1.0, 1e9)


@given(st.integers(0, 10**9), positive, positive, st.floats(0, 1e3), st.floats(0.5, 100))
def test_more_of_anything_bad_is_never_faster(lag: int, rate: float, band: float, rtt: float, fixed: float) -> None:
    base = predicted_pause_ms(Measured(lag, rate, band, rtt), fixed)
    assert base >= rtt / 2 + fixed
    assert predicted_pause_ms(Measured(lag + 1000, rate, band, rtt), fixed) >= base
    assert predicted_pause_ms(Measured(lag, rate * 1.5, band, rtt), fixed) >= base
    assert predicted_pause_ms(Measured(lag, rate, band, rtt + 1), fixed) >= base
    assert predicted_pause_ms(Measured(lag, rate, band, rtt), fixed + 1) >= base
    assert predicted_pause_ms(Measured(lag, rate, band * 2, rtt), fixed) <= base


def test_the_fixed_cost_is_what_the_delta_does_not_explain() -> None:
    assert fixed_cost_of([(2.0, 5.0), (4.0, 7.5), (0.0, 3.0)] * 10) == FixedCost(3.0, 0.5)


def test_rare_outliers_go_into_neither_and_frequent_ones_into_the_margin() -> None:
    assert fixed_cost_of([(2.0, 5.0)] * 30 + [(2.0, 500.0)]) == FixedCost(3.0, 0.0)
    assert fixed_cost_of([(2.0, 5.0)] * 30 + [(2.0, 500.0)] * 4) == FixedCost(3.0, 495.0)


def test_the_first_moves_promise_little() -> None:
    assert fixed_cost_of([]) == FixedCost(FIXED_MS_DEFAULT, 12.0)
    assert fixed_cost_of([(2.0, 3.0)] * 10) == FixedCost(1.0, 19.0)


def test_it_stays_positive_and_finite() -> None:
    assert fixed_cost_of([(100.0, 1.0)] * 30) == FixedCost(0.5, 0.0)
    assert fixed_cost_of([(math.inf, 5.0)] * 30) == fixed_cost_of([])
