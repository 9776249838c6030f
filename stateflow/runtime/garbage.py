"""Garbage collection between batches, so that Python's cyclic collector does not pause them.

A replica holds hundreds of thousands of tracked objects, none of them in a cycle. The collector would examine all of
them again and again while everything stands still: 60 ms and more with raised thresholds, 150 ms for the oldest
generation. Here the collector examines new objects once, in small portions between batches, and all objects only when
their number, cached state apart, has doubled.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from typing import Final

#: number of new objects that are examined at once, which takes about 5 ms
YOUNG: Final = 10_000
#: least number of kept objects before all are examined again
OLD: Final = 500_000
#: the collector's own thresholds, for a batch that alone makes so many objects
WITHIN_A_BATCH: Final = (100_000, 20, 50)


class Garbage:
    """Runs the cyclic collector. To be called from one thread at a time.

    Args:
        known: returns the number of objects held by something that is known to have no cycles.
    """

    def __init__(self, known: Callable[[], int] = lambda: 0) -> None:
        self._known = known
        gc.set_threshold(*WITHIN_A_BATCH)
        gc.collect()
        gc.freeze()
        self._kept = self._blocks = 0
        self._note_kept()

    def _unknown(self) -> int:
        return gc.get_freeze_count() - self._known()

    def is_due(self) -> bool:
        """Tells whether there are enough new objects to examine. Cheap."""
        return gc.get_count()[0] >= YOUNG

    def collect(self) -> None:
        """Examines new objects. Those that survive are not examined again, but freed as usual with their last
        reference."""
        gc.collect(0)
        gc.freeze()
        # the interpreter walks all frozen objects to count them, which takes 40 ms for 600,000; it counts allocated
        # blocks, at least one for nearly every object, by pool
        blocks = sys.getallocatedblocks()
        self._blocks = min(self._blocks, blocks)
        if blocks > self._blocks + max(self._kept, OLD):
            self._blocks = blocks
            if self._unknown() > self._kept + max(self._kept, OLD):
                self._collect_all()

    def _collect_all(self) -> None:
        """Frees cycles that were still in use when they were first examined."""
        gc.unfreeze()
        gc.collect()
        gc.freeze()
        self._note_kept()

    def _note_kept(self) -> None:
        self._kept = self._unknown()
        self._blocks = sys.getallocatedblocks()
