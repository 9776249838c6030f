"""What a process relies on, said to collections: a mark with digests, written before they are read or uploaded.

The rule, which needs no locks and no clock that is right:

1. whoever relies on blobs writes a hold, *then* reads which blobs are condemned;
2. a collection condemns blobs, *then* reads the holds. Whichever came second sees the other: what is condemned is
   stored again under a name of its own, what is held is spared;
3. a hold that is a day old, by the clock of the store, is of a process that died. A collection *removes* it before it
   looks at manifests for the last time;
4. whoever published something looks *afterwards* whether its hold stands. If so, every collection that passes the hold
   over has seen what was published. If not, it was taken for dead: everything is done again.
"""

from __future__ import annotations

import json
import logging
import uuid
from collections.abc import Iterable

from stateflow.checkpoint.catalog import INTENTS
from stateflow.checkpoint.objects import Objects
from stateflow.errors import Unavailable

#: a hold older than this, by the clock of the store, is of a process that died
MARK_LIFE_S = 24 * 3600.0
log = logging.getLogger(__name__)


class Hold:
    """Stands from when it is made. Raises Unavailable where the store cannot be written."""

    def __init__(self, objects: Objects, digests: Iterable[str]) -> None:
        self._objects = objects
        self._name = f"{INTENTS}/{uuid.uuid4().hex}.json"
        objects.create(self._name, json.dumps(sorted(set(digests))).encode())

    def stands(self) -> bool:
        """False: a collection took its process for dead."""
        return self._objects.stat(self._name) is not None

    def release(self) -> None:
        try:
            self._objects.delete(self._name)
        except (Unavailable, FileNotFoundError) as error:
            log.warning("a mark of what was relied on stays for a day: %s", error)

    def __enter__(self) -> Hold:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()
