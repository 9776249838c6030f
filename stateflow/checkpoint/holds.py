"""Holds: marks that tell collections which digests a process relies on, written before it reads or uploads them.

The protocol needs no locks and no clock that is right:

1. a process that relies on blobs writes a hold, *then* reads which blobs are condemned;
2. a collection condemns blobs, *then* reads the holds. Of the two, the later one sees the other: the process stores a
   condemned blob again under another name, the collection spares a held one;
3. a hold that is a day old, by the clock of the store, belongs to a process that died. A collection *removes* it before
   it reads the manifests for the last time;
4. a process that published something looks *afterwards* whether its hold stands. If it does, a collection can remove
   the hold only later, and then reads what was published. If not, a collection took the process for dead, and the
   process does everything again.
"""

from __future__ import annotations

import json
import logging
import uuid
from collections.abc import Iterable

from stateflow.checkpoint.catalog import INTENTS
from stateflow.checkpoint.objects import Objects
from stateflow.errors import Unavailable

#: a hold older than this, by the clock of the store, belongs to a process that died
MARK_LIFE_S = 24 * 3600.0
log = logging.getLogger(__name__)


class Hold:
    """A hold on digests, from its creation on. Raises Unavailable where the store cannot be written."""

    def __init__(self, objects: Objects, digests: Iterable[str]) -> None:
        self._objects = objects
        self._name = f"{INTENTS}/{uuid.uuid4().hex}.json"
        objects.create(self._name, json.dumps(sorted(set(digests))).encode())

    def stands(self) -> bool:
        """Returns whether the hold still exists. False: a collection took its process for dead."""
        return self._objects.stat(self._name) is not None

    def release(self) -> None:
        try:
            self._objects.delete(self._name)
        except (Unavailable, FileNotFoundError) as error:
            log.warning("hold not released, it expires after a day: %s", error)

    def __enter__(self) -> Hold:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()
