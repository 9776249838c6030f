"""Code bundles of operators, fetched from the leading controller before the code is loaded here."""

from __future__ import annotations

import asyncio
import logging

from stateflow.errors import BundleDamaged, Unavailable
from stateflow.replica.peers import Controller, Unanswered
from stateflow.replica.threads import Threads
from stateflow.runtime.bundles import PACKED_MAX, BundleStore
from stateflow.types import OperatorSpec

log = logging.getLogger(__name__)


class Bundles:
    """Fetches code bundles into the store. ``controller``: the leader heard last; None: none yet."""

    def __init__(self, store: BundleStore, threads: Threads) -> None:
        self._store, self._threads = store, threads
        self.controller: Controller | None = None
        self._fetching: dict[str, asyncio.Task[None]] = {}

    async def ensure(self, spec: OperatorSpec) -> None:
        """Returns when the operator's bundle is here.

        A running fetch goes on when a caller stops waiting for it. Raises Unavailable, and BundleDamaged for a bundle
        other than the deployed one.
        """
        digest = spec.bundle
        if not digest or await self._threads.in_files(self._store.has, digest):
            return
        if digest not in self._fetching:
            task = self._fetching[digest] = asyncio.ensure_future(self._fetch(digest))
            task.add_done_callback(lambda _: self._fetching.pop(digest, None))
        await asyncio.shield(self._fetching[digest])

    async def _fetch(self, digest: str) -> None:
        controller = self.controller
        if controller is None:
            raise Unavailable("no leading controller to fetch the bundle from yet", remedy="try again", bundle=digest)
        packed, count = bytearray(), 1
        number = 0
        while number < count:
            try:
                part, count = await controller.bundle_part(digest, number)
            except Unanswered as error:
                raise error.meant from error
            packed += part
            number += 1
            if len(packed) > PACKED_MAX:
                raise BundleDamaged("the bundle exceeds the size limit", remedy="deploy it again", bundle=digest)
        await self._threads.in_files(self._store.keep, digest, bytes(packed))
        log.info("bundle %s fetched: %d KB", digest[:12], len(packed) >> 10)
