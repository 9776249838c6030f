"""Shifts the wall clock of a process that has this folder on its path.

The offset, in seconds, is in the file ``STATEFLOW_TEST_CLOCK``, which is read at each call, so that a clock can jump.
``time.time`` stays as it is: gRPC makes deadlines from it, and its core compares them with the system's clock.
"""

import os
import time
from pathlib import Path

_time_ns = time.time_ns


def _shifted_ns() -> int:
    return _time_ns() + int(float(Path(_FILE).read_bytes()) * 1e9)


if _FILE := os.environ.get("STATEFLOW_TEST_CLOCK"):
    time.time_ns = _shifted_ns
