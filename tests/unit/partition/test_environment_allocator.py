"""Freed buffers stay with the process, measured by page faults in a process of its own."""

from __future__ import annotations

import platform
import subprocess
import sys

import pytest

BUFFER_BYTES, BUFFERS, BATCHES, PAGE_BYTES = 800_000, 4, 20, 4096
PROGRAM = f"""
import resource
from stateflow.partition.environment import keep_buffers

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range({BATCHES}):
        [bytearray({BUFFER_BYTES}) for _ in range({BUFFERS})]  # cleared: every page is touched
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

print(keep_buffers())
faults()  # the first of them are new to the process
print(faults())
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another C library keeps its own counsel")
def test_a_buffer_that_was_freed_serves_the_next() -> None:
    said = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True).stdout.split()
    assert said[0] == "True"
    # without it every batch faults on every page of all its buffers
    assert int(said[1]) < BATCHES * BUFFERS * BUFFER_BYTES // PAGE_BYTES // 20
