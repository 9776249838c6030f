"""On the path of a process: its wall clock is off by ``STATEFLOW_TEST_CLOCK_OFF_S`` seconds.

``time.time`` stays: gRPC makes deadlines of it, which its core holds against the system's clock.
"""

import os
import time

_OFF_NS = int(float(os.environ.get("STATEFLOW_TEST_CLOCK_OFF_S", "0")) * 1e9)
_time_ns = time.time_ns
if _OFF_NS:
    time.time_ns = lambda: _time_ns() + _OFF_NS
