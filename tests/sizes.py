"""How much the tests that draw at random do: with STATEFLOW_TEST_THOROUGH=1 in the environment four times as much."""

from __future__ import annotations

import os

THOROUGH = bool(os.environ.get("STATEFLOW_TEST_THOROUGH"))


def sized(thorough: int) -> int:
    return thorough if THOROUGH else thorough // 4
