"""Sizes of randomised tests by tier (``tests/gate.py``), and their first seed.

STATEFLOW_TEST_TIER   ``gate`` (default): a sixteenth; ``all``: a quarter; ``hunt``: everything.
STATEFLOW_TEST_SEED   where seeds begin; ``tests/gate.py`` derives it from the commit.
"""

from __future__ import annotations

import os

TIER = os.environ.get("STATEFLOW_TEST_TIER", "gate")
SEED = int(os.environ.get("STATEFLOW_TEST_SEED", "0"))
_SHARE = {"gate": 16, "all": 4, "hunt": 1}[TIER]
THOROUGH = TIER != "gate"


def sized(most: int) -> int:
    """Returns the share of ``most`` that the tier does; at least 1."""
    return max(1, most // _SHARE)
