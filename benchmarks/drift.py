"""Does anything grow while a cluster runs? What its processes and its disk hold, looked at again and again."""

from __future__ import annotations

import contextlib
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

#: pairs of samples grow with the square of them
SAMPLES_MAX = 240
#: at its beginning a run fills caches
WARM_SHARE = 0.2


def slope(points: Sequence[tuple[float, float]]) -> float:
    """Per second: the median of the slopes between any two, which a few outliers do not move (Sen, 1968)."""
    step = max(1, len(points) // SAMPLES_MAX)
    slopes = [(b[1] - a[1]) / (b[0] - a[0]) for a, b in combinations(points[::step], 2) if b[0] > a[0]]
    return statistics.median(slopes) if slopes else 0.0


class Drift:
    """A context manager. ``series``: name → (seconds, value); ``failed``: what kept it from looking on."""

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
        except Exception as error:  # noqa: BLE001 - whoever reports the run says it
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
            for place in sorted(self._local.data_dir.iterdir()):
                if place.suffix != ".log":
                    self._note(f"{place.name} disk MB", at, _bytes(place) / 1e6)

    def _note(self, name: str, at: float, value: float) -> None:
        self.series[name].append((at, value))

    def figures(self) -> dict[str, dict[str, Any]]:
        """Of each: its median, and how much it grew by the hour and over the run, in parts of that median."""
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
            }
        return found


def _bytes(place: Path) -> int:
    """What goes meanwhile, a file or a directory, counts for nothing."""
    files = (Path(folder, name) for folder, _, names in os.walk(place) for name in names)
    size = 0
    for path in [place] if place.is_file() else files:
        with contextlib.suppress(FileNotFoundError):
            size += path.stat().st_size
    return size
