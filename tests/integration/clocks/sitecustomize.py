"""Shifts the wall clock of a process that has this folder on its path.

The offset, in seconds, stands in the file ``STATEFLOW_TEST_CLOCK``, which is read at each call, so that a clock can jump;
without the file the clock is right. ``time.time`` stays as it is: gRPC makes deadlines from it, and its core compares
them with the system's clock.
"""

import os
import time

_time_ns = time.time_ns


def _shifted_ns() -> int:
    try:
        with open(_FILE, "rb") as file:
            return _time_ns() + int(float(file.read()) * 1e9)
    except OSError:
        return _time_ns()


if _FILE := os.environ.get("STATEFLOW_TEST_CLOCK"):
    time.time_ns = _shifted_ns
