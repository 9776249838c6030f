"""Samples the memory, files, threads and disk space of a running cluster, and computes their growth."""

from __future__ import annotations

import contextlib
import math
import os
import statistics
import threading
import time
from collections import defaultdict
from collections.abc import Sequence
from itertools import combinations
from pathlib import Path
from typing import Any

import psutil

from stateflow.testing import LocalCluster

#: maximum number of samples in the computation of a slope, whose cost grows with the square of this number
SAMPLES_MAX = 240
#: share of a run that is left out at its beginning, because caches fill then
WARM_SHARE = 0.2
#: name of the series for the disks of all replicas together, between which partitions move
REPLICAS_DISK = "replicas' disk MB"


def slope(points: Sequence[tuple[float, float]]) -> float:
    """Returns the growth of a series per second.

    The growth is the median of the slopes between any two points, on which outliers have little effect (Sen, 1968).

    Args:
        points: (seconds, value) in order of time.
    """
    step = max(1, len(points) // SAMPLES_MAX)
    slopes = [(b[1] - a[1]) / (b[0] - a[0]) for a, b in combinations(points[::step], 2) if b[0] > a[0]]
    return statistics.median(slopes) if slopes else 0.0


class Drift:
    """A context manager that samples a cluster in a thread of its own.

    Attributes:
        series: name → list of (seconds, value).
        failed: error that ended the sampling; None: there was none.
    """

    def __init__(self, local: LocalCluster, every_s: float = 2.0) -> None:
        self._local, self._every_s = local, every_s
        self.series: defaultdict[str, list[tuple[float, float]]] = defaultdict(list)
        self.failed: Exception | None = None
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Drift:
        self._began = time.monotonic()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _run(self) -> None:
        try:
            self._look_on()
        except Exception as error:  # noqa: BLE001 - the caller reports it with the run
            self.failed = error

    def _look_on(self) -> None:
        while not self._over.wait(self._every_s):
            at = time.monotonic() - self._began
            for name, process in list(self._local.processes.items()):
                with contextlib.suppress(psutil.Error, ValueError):
                    looked = psutil.Process(process.pid)
                    self._note(f"{name} memory MB", at, looked.memory_info().rss / 1e6)
                    self._note(f"{name} files", at, looked.num_fds())
                    self._note(f"{name} threads", at, looked.num_threads())
            sizes = {
                place.name: _bytes(place) / 1e6
                for place in sorted(self._local.data_dir.iterdir())
                if place.suffix != ".log"
            }
            for name, size in sizes.items():
                self._note(f"{name} disk MB", at, size)
            self._note(REPLICAS_DISK, at, sum(size for name, size in sizes.items() if name in self._local.processes))

    def _note(self, name: str, at: float, value: float) -> None:
        self.series[name].append((at, value))

    def figures(self) -> dict[str, dict[str, Any]]:
        """Returns figures for each series with enough samples.

        The figures are the median, the growth per hour, the growth over the run as a share of the median, and the
        median of each sixth of the run. The sixths show whether a series settles or keeps growing.
        """
        found = {}
        for name, points in sorted(self.series.items()):
            settled = points[int(len(points) * WARM_SHARE) :]
            if len(settled) < 3:
                continue
            middle, per_s = statistics.median(value for _, value in settled), slope(settled)
            lasted = settled[-1][0] - settled[0][0]
            found[name] = {
                "median": round(middle, 3),
                "per_hour": round(per_s * 3600, 3),
                "grew": round(per_s * lasted / middle, 4) if middle else 0.0,
                "by_sixth": [round(statistics.median(value for _, value in part), 3) for part in _sixths(points)],
            }
        return found


def _sixths(points: Sequence[tuple[float, float]]) -> list[Sequence[tuple[float, float]]]:
    size = max(1, math.ceil(len(points) / 6))
    return [points[at : at + size] for at in range(0, len(points), size)]


def _bytes(place: Path) -> int:
    """Returns the size of a file, or of all files in a folder. A file that vanishes meanwhile counts as 0."""
    files = (Path(folder, name) for folder, _, names in os.walk(place) for name in names)
    size = 0
    for path in [place] if place.is_file() else files:
        with contextlib.suppress(FileNotFoundError):
            size += path.stat().st_size
    return size
