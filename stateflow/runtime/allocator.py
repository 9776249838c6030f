"""The C library's memory, kept between batches.

glibc takes large buffers from the kernel, which clears each page at its first touch, and gives them back when they are
freed. A batch has several for every megabyte of rows, all alike from batch to batch: to encode a message of 800 KB took
0.94 ms, 0.91 of them for page faults.
"""

from __future__ import annotations

import ctypes
from typing import Final

#: mallopt(3)
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
#: the most that glibc takes; a larger buffer still comes from the kernel and goes back to it
KEPT_WHOLE_BYTES: Final = 32 << 20
#: free memory at the end of a heap that stays with the process
KEPT_FREE_BYTES: Final = 64 << 20


def keep_buffers() -> bool:
    """Have this process keep the memory of freed buffers for the next ones. False where the C library is not glibc
    and decides for itself."""
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):  # musl, macOS, Windows
        return False
    return bool(mallopt(_M_MMAP_THRESHOLD, KEPT_WHOLE_BYTES)) and bool(mallopt(_M_TRIM_THRESHOLD, KEPT_FREE_BYTES))
