"""Durations that vary: within their bounds, the same under one seed, and the same on average."""

from __future__ import annotations

from random import Random
from statistics import fmean

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stateflow.schedule import JITTER, jittered
from tests.sizes import sized


@settings(max_examples=sized(1600), deadline=None)
@given(st.floats(1e-3, 1e6), st.integers())
def test_a_duration_varies_within_its_bounds_and_a_seed_makes_it_the_same_again(seconds: float, seed: int) -> None:
    random, again = Random(seed), Random(seed)
    durations = [jittered(seconds, random) for _ in range(20)]
    least, most = seconds * (1 - JITTER), seconds * (1 + JITTER)
    assert least <= min(durations) < max(durations) <= most
    assert durations == [jittered(seconds, again) for _ in range(20)]


@pytest.mark.parametrize("seed", range(4))
def test_the_mean_stays_as_it_was(seed: int) -> None:
    random = Random(seed)
    durations = [jittered(2.0, random) for _ in range(10_000)]
    assert fmean(durations) == pytest.approx(2.0, rel=0.01), "seven standard deviations"
    assert min(durations) < 1.51
    assert max(durations) > 2.49
