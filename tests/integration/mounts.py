"""Disks of a few megabytes."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

Mount = Callable[..., Path]


@contextlib.contextmanager
def mounts(below: Path) -> Iterator[Mount]:
    """Mounts small disks. They go when this process ends, however it ends: a full one would disturb later runs."""
    made: list[tuple[Path, subprocess.Popen[bytes]]] = []

    def mounted(name: str, size: int = 24 << 20) -> Path:
        at = below / name
        at.mkdir()
        command = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(at)]
        permitted = os.geteuid() == 0 and shutil.which("mount") is not None
        if not permitted or subprocess.run(command, capture_output=True, check=False).returncode:
            pytest.skip("mounting is not permitted here")
        after = f'tail --pid={os.getpid()} -f /dev/null; umount -l "$0"'
        made.append((at, subprocess.Popen(["sh", "-c", after, str(at)], start_new_session=True)))
        return at

    try:
        yield mounted
    finally:
        for at, watcher in made:
            os.killpg(watcher.pid, signal.SIGKILL)
            watcher.wait()
            subprocess.run(["umount", "-l", str(at)], check=True)
