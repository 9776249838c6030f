"""Disks that fail in a running process: slow durable writes, and a file system that becomes read-only."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

COMPILER = shutil.which("cc")
needs_compiler = pytest.mark.skipif(COMPILER is None or sys.platform != "linux", reason="needs a C compiler, on Linux")


class DiskFaults:
    """Faults of processes that are started with ``environment``; see disk_faults.c beside this file."""

    def __init__(self, folder: Path) -> None:
        self.environment = {"LD_PRELOAD": str(folder / "disk_faults.so"), "DISK_FAULTS": str(folder)}
        self._folder = folder
        source = Path(__file__).with_suffix(".c")
        subprocess.run([str(COMPILER), "-shared", "-fPIC", "-o", folder / "disk_faults.so", source, "-ldl"], check=True)

    @contextmanager
    def slow(self, pid: int) -> Iterator[None]:
        """Every fsync of the process takes 300 ms longer."""
        with self._flag(f"{pid}.slow"):
            yield

    @contextmanager
    def read_only(self, pid: int, folder: Path) -> Iterator[None]:
        """The process can change nothing below the folder, also through files that it has open."""
        with self._flag(f"{pid}.read-only", str(folder)):
            yield

    @contextmanager
    def _flag(self, name: str, text: str = "") -> Iterator[None]:
        new, flag = self._folder / f"{name}.new", self._folder / name
        new.write_text(text)
        new.rename(flag)
        try:
            yield
        finally:
            flag.unlink()
