"""Verifies every partition at intervals, so that damage is found before a move or a restart needs the partition."""

from __future__ import annotations

import asyncio
import logging

from reconfig.controller.context import ControllerContext
from reconfig.controller.sweeping import Sweeps
from reconfig.sweeps import Chore
from stateflow.errors import StateflowError

log = logging.getLogger(__name__)
#: seconds between two checks whether a verification is due; fewer where the interval is short
LOOK_S = 60.0


class Scrubbing:
    """Begins a sweep that verifies every partition, whenever one is due.

    The sweep is like one by command: one node at a time, replicas read at most ``verify_bytes_per_s`` and make way for
    batches, and the next leader resumes it.
    """

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
                log.info("sweep/%s: verifying every partition, as every %g s", sweep_id, interval_s)
            except StateflowError as error:  # no replica answers: it is tried again
                log.warning("verification not started, will be retried: %s", error)

    def is_due(self, interval_s: float) -> bool:
        """Tells whether a verification of everything is due, and none is under way.

        It is when the last one began longer ago than the interval, or when there was none and the oldest deployed
        version is older than the interval.
        """
        cluster = self._context.cluster
        book = cluster.sweeps
        if not cluster.deployed or book.under_way(Chore.VERIFY):
            return False
        last_us = book.whole_us.get(Chore.VERIFY)
        if last_us is None:
            last_us = min(cluster.versions_us.get(name, 0) for name in cluster.deployed)
        return cluster.now_us() - last_us > interval_s * 1e6
