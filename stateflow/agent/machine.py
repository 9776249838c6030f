"""Cores, memory and disk that a machine has for replicas."""

from __future__ import annotations

import os
import shutil
from pathlib import Path


def cores() -> int:
    """Returns the number of cores that this process may use."""
    try:
        return max(len(os.sched_getaffinity(0)), 1)
    except AttributeError:
        return os.cpu_count() or 1


def memory_bytes(group: Path | None) -> int:
    """Returns the memory of the machine, or the limit of the control group if that is less; 0: unknown."""
    try:
        whole = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError):
        return 0
    try:
        allowed = int((group / "memory.max").read_text()) if group is not None else whole
    except (OSError, ValueError):  # "max"
        allowed = whole
    return min(whole, allowed)


def disk_bytes(directory: Path) -> tuple[int, int]:
    """Returns the size of the disk that a directory is on, and its free bytes."""
    usage = shutil.disk_usage(directory)
    return usage.total, usage.free
