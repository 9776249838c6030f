"""Intervals of an autopilot. Its decisions: test_placement.py."""

from __future__ import annotations

import pytest

from reconfig.decisions.joining import AutopilotSettings


@pytest.mark.parametrize(("cool_down_s", "look_s"), [(60.0, 5.0), (20.0, 5.0), (12.0, 3.0), (8.0, 2.0), (1.0, 2.0)])
def test_a_wish_that_stood_for_long_enough_is_seen_soon(cool_down_s: float, look_s: float) -> None:
    assert AutopilotSettings(cool_down_s=cool_down_s).look_s == look_s
