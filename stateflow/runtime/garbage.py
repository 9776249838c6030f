"""Python's cyclic collector, kept from stopping batches.

A replica holds hundreds of thousands of tracked objects, and none of them in a cycle. The collector looks at all of
them again and again, and everything stands still meanwhile: 60 ms and more with its own thresholds raised, 150 ms for
the oldest generation. Here it looks at what is new in small portions between batches, once, and at everything only
when what was kept, cached state apart, has doubled.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Final

#: new objects that are looked at at once; about 5 ms
YOUNG: Final = 10_000
#: kept objects that are looked at again, at least
OLD: Final = 500_000
#: for a batch that alone makes this many: the collector's own thresholds
WITHIN_A_BATCH: Final = (100_000, 20, 50)


class Garbage:
    """For one thread at a time.

    Args:
        known: how many objects are kept by something that is known to be no cycle.
    """

    def __init__(self, known: Callable[[], int] = lambda: 0) -> None:
        self._known = known
        gc.set_threshold(*WITHIN_A_BATCH)
        gc.collect()
        gc.freeze()
        self._kept = self._unknown()
        self._grown = 0

    def _unknown(self) -> int:
        return gc.get_freeze_count() - self._known()

    def is_due(self) -> bool:
        """Cheap."""
        return gc.get_count()[0] >= YOUNG

    def collect(self) -> None:
        """What is new; what is left of it is not looked at again, but freed as ever when its last reference goes."""
        self._grown += gc.get_count()[0]
        gc.collect(0)
        gc.freeze()
        if self._grown > max(self._kept, OLD):
            self._grown = 0
            if self._unknown() > self._kept + max(self._kept, OLD):
                self._collect_all()

    def _collect_all(self) -> None:
        """Cycles that were in use when they were first looked at."""
        gc.unfreeze()
        gc.collect()
        gc.freeze()
        self._kept = self._unknown()
