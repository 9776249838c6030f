"""Every partition is read whole now and then, unasked: what is rotten is found before a move or a restart needs it."""

from __future__ import annotations

import asyncio
import logging

from reconfig.controller.context import ControllerContext
from reconfig.controller.sweeping import Sweeps
from reconfig.sweeps import Chore
from stateflow.errors import StateflowError

log = logging.getLogger(__name__)
#: it is looked so often whether it is time, or sooner where that is short
LOOK_S = 60.0


class Scrubbing:
    """It is a sweep as one by command: replicas read as slowly as ``verify_bytes_per_s`` says and make way for batches,
    one node at a time, and whoever leads goes on with it."""

    def __init__(self, context: ControllerContext, sweeps: Sweeps) -> None:
        self._context, self._sweeps = context, sweeps

    async def watch(self) -> None:
        interval_s = self._context.settings.verify_interval_s
        while interval_s:
            await asyncio.sleep(min(LOOK_S, interval_s / 4))
            if not self.is_due(interval_s):
                continue
            try:
                sweep_id = await self._sweeps.begin(Chore.VERIFY, "", 1)
                log.info("sweep/%s: every partition is read, as every %g s", sweep_id, interval_s)
            except StateflowError as error:  # nobody answers: it is tried again
                log.warning("partitions are not verified now: %s", error)

    def is_due(self, interval_s: float) -> bool:
        """Nothing is verified now, and the last time that everything was is longer ago; or it never was, and what is
        there longest is older."""
        cluster = self._context.cluster
        book = cluster.sweeps
        if not cluster.deployed or book.under_way(Chore.VERIFY):
            return False
        last_us = book.whole_us.get(Chore.VERIFY)
        if last_us is None:
            last_us = min(cluster.versions_us.get(name, 0) for name in cluster.deployed)
        return cluster.now_us() - last_us > interval_s * 1e6
