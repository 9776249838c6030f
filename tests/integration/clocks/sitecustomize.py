"""Shifts the wall clock of a process that has this folder on its path by ``STATEFLOW_TEST_CLOCK_OFF_S`` seconds.

``time.time`` stays as it is: gRPC makes deadlines from it, and its core compares them with the system's clock.
"""

import os
import time

_OFF_NS = int(float(os.environ.get("STATEFLOW_TEST_CLOCK_OFF_S", "0")) * 1e9)
_time_ns = time.time_ns
if _OFF_NS:
    time.time_ns = lambda: _time_ns() + _OFF_NS
