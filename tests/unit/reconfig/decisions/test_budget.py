from __future__ import annotations

import math
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reconfig.decisions.budget import (
    FIXED_MS_DEFAULT,
    LEAST_MS,
    MOVES_ENOUGH,
    PRIOR_PROMISE_MS,
    Experience,
    Measured,
    fixed_cost_of,
    lag_ms,
    predicted_pause_ms,
)


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
        # nothing had to cross, so the bandwidth is unknown: only latency counts
        (Measured(0, 5.0, 0.0, 6.0), 2.0, 5.0),
        # the base was too small to tell, or was there already: what lags behind crosses as fast as changes arrive
        (Measured(50_000, 1e6, 0.0, 4.0), 8.0, 60.0),
        (Measured(50_000, 0.0, 0.0, 4.0), 8.0, math.inf),
        # the fixed cost contains a durable write, unless the disk is busy
        (Measured(50_000, 0.0, 1e6, 4.0, 5.0), 8.0, 60.0),
        (Measured(0, 5.0, 0.0, 6.0, 300.0), 2.0, 303.0),
    ],
)
def test_formula(measured: Measured, fixed: float, pause: float) -> None:
    assert predicted_pause_ms(measured, fixed) == pytest.approx(pause)


@pytest.mark.parametrize(
    ("lag", "rate", "lag_ms_"), [(0, 0.0, 0.0), (50_000, 0.0, 50.0), (50_000, 5e5, 100.0), (1, 1e6, math.inf)]
)
def test_what_is_behind_is_apart_from_what_every_cutover_costs(lag: int, rate: float, lag_ms_: float) -> None:
    assert lag_ms(Measured(lag, rate, 1e6, 4.0, 300.0)) == pytest.approx(lag_ms_)


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
    assert predicted_pause_ms(Measured(lag, rate, band, rtt, 50.0), fixed) >= base
    assert predicted_pause_ms(Measured(lag, rate, band * 2, rtt), fixed) <= base


def test_the_fixed_cost_is_what_the_delta_does_not_explain() -> None:
    cost = fixed_cost_of([(2.0, 5.0), (4.0, 7.5), (0.0, 3.0)] * 10)
    assert cost.expected_ms == 3.0
    assert 0 < cost.margin_ms < fixed_cost_of([]).margin_ms


def test_a_rare_outlier_goes_into_neither() -> None:
    regular = [(0.0, each) for each in (4.0, 5.0, 6.0, 7.0, 8.0)] * 6
    before, after = fixed_cost_of(regular), fixed_cost_of([*regular, (0.0, 500.0)])
    assert after.expected_ms == before.expected_ms
    assert after.expected_ms + after.margin_ms < 2 * 8.0
    assert after.margin_ms < 2 * before.margin_ms


@pytest.mark.parametrize("deviation", [0.25, 0.5, 1.0])
def test_nearly_every_move_keeps_what_the_others_promise(deviation: float) -> None:
    """Pauses of machines with a steady distribution stay within the promise learnt from earlier ones."""
    random = Random(1)
    kept = 0
    for _ in range(200):
        pauses = [(0.0, random.lognormvariate(2.0, deviation)) for _ in range(164)]
        cost = fixed_cost_of(pauses[:64])
        kept += sum(actual <= cost.expected_ms + cost.margin_ms for _, actual in pauses[64:])
    assert kept >= 0.98 * 200 * 100


#: pauses of moves on two cores that four processes shared, in milliseconds, in order
HUMPED = (
    5.3, 39.1, 4.8, 7.7, 5.1, 32.9, 12.1, 6.7, 25.7, 5.9, 38.4, 5.9, 18.0, 3.5, 4.0, 3.7, 3.7, 7.1, 5.6, 46.5,
    3.9, 6.1, 17.2, 28.1, 14.5, 21.8, 6.5, 6.2, 6.5, 9.0, 30.5, 5.1, 22.4, 6.1, 2.7, 4.0, 2.6, 7.0, 3.4, 8.6,
)  # fmt: skip


@pytest.mark.parametrize("seen", range(2, len(HUMPED)))
def test_a_promise_is_between_what_was_needed_twice_and_what_was_ever_needed(seen: int) -> None:
    """The promise lies between the second longest and the longest pause seen.

    While few moves were seen, the initial promise is allowed too.
    """
    pauses = sorted(HUMPED[:seen])
    cost = fixed_cost_of([(0.0, each) for each in pauses])
    promised = cost.expected_ms + cost.margin_ms
    assert pauses[-2] <= promised <= max(pauses[-1], PRIOR_PROMISE_MS if seen < MOVES_ENOUGH else 0.0)


def test_a_busy_machine_is_not_refused_what_it_always_kept() -> None:
    """A budget of 50 ms is accepted though pauses vary widely, as none was longer than 46.5 ms."""
    experience = Experience()
    refused = exceeded = 0
    for number, pause_ms in enumerate(HUMPED * 3):
        cost = experience.cost(float(number))
        exceeded += pause_ms > cost.expected_ms + cost.margin_ms
        if cost.expected_ms + cost.margin_ms > 50.0:
            refused += 1
            experience.kept_out(float(number))
        else:
            experience.completed(float(number), 0.0, pause_ms)
    assert refused == 0
    assert exceeded <= 0.05 * len(HUMPED) * 3, "what nobody had seen before, and nothing else"


def test_the_first_moves_promise_little() -> None:
    cost = fixed_cost_of([])
    assert cost.expected_ms == FIXED_MS_DEFAULT
    assert 17.0 < cost.margin_ms < 25.0
    assert fixed_cost_of([(2.0, 3.0)] * 3).margin_ms > fixed_cost_of([(2.0, 3.0)] * 20).margin_ms


@pytest.mark.parametrize("predicted", [5.0, 40.0, math.inf])
def test_a_delta_that_crosses_faster_than_was_thought_says_nothing(predicted: float) -> None:
    unknown = [(predicted, 5.0)] * 20
    assert fixed_cost_of(unknown) == fixed_cost_of([])
    regular = [(0.0, each) for each in (4.0, 5.0, 6.0, 7.0, 8.0)] * 6
    assert fixed_cost_of([*regular, *unknown]) == fixed_cost_of(regular)


def test_it_stays_positive_and_finite() -> None:
    cost = fixed_cost_of([(100.0, 100.0 + LEAST_MS)] * 30)
    assert cost.expected_ms == LEAST_MS
    assert 0 < cost.margin_ms < 1


def busy() -> Experience:
    """Makes the experience of a machine with widely scattered pauses."""
    experience = Experience()
    for number in range(30):
        experience.completed(float(number), 0.0, 4.0 * 16 ** (number % 3))
    return experience


def test_what_a_busy_machine_did_is_forgotten_in_time() -> None:
    experience = busy()
    assert experience.cost(30.0).margin_ms > 500
    assert experience.cost(631.0) == fixed_cost_of([])


def test_moves_that_only_the_margin_kept_out_are_tried_again() -> None:
    """Moves that only the margin kept out are tried again.

    After a few refusals, and before the experience expires by itself.
    """
    experience, refused = busy(), 0
    while (cost := experience.cost(30.0)).expected_ms + cost.margin_ms > 250.0:
        experience.kept_out(30.0)
        refused += 1
    assert 3 <= refused < 30
    experience.completed(30.0, 0.0, 5.0)
    for _ in range(100):
        experience.kept_out(30.0)
    assert experience.cost(30.0) == fixed_cost_of([])


def test_a_refusal_is_not_spent_on_what_is_forgotten_anyway() -> None:
    experience = busy()
    experience.completed(700.0, 0.0, 500.0)
    experience.kept_out(700.0)
    assert experience.cost(700.0) == fixed_cost_of([])
