"""An operator whose import blocks while a file exists, so that replicas that load it come back late."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from stateflow import Context, Operator, state

#: names the file that holds the import up
HELD_UP = "STATEFLOW_TEST_HELD_UP"

while Path(os.environ.get(HELD_UP, "/nowhere")).exists():
    time.sleep(0.02)


class Slow(Operator):
    key = "k"
    output = "k string, n long"
    n = state.value(int, default=0)

    def process(self, row: Any, ctx: Context) -> Iterator[Any]:
        self.n.value += 1
        yield row.k, self.n.value
