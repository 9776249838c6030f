"""How much the tests that draw at random do: ``.ci/run`` sets STATEFLOW_TEST_THOROUGH, ``make test`` does a quarter."""

from __future__ import annotations

import os

THOROUGH = bool(os.environ.get("STATEFLOW_TEST_THOROUGH"))


def sized(thorough: int) -> int:
    return thorough if THOROUGH else thorough // 4
