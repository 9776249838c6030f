"""Rows for the operator ``Ballast``. Each row sets the size of its key's state."""

from __future__ import annotations

import random
from typing import Any

OPERATOR = "Ballast"
KEYS, ROWS, SIZE = 2000, 100, 100


def rows(rng: random.Random) -> list[dict[str, Any]]:
    """Returns a batch of ``ROWS`` random rows."""
    return [{"k": rng.randrange(KEYS), "v": float(rng.randrange(100)), "size": SIZE} for _ in range(ROWS)]
