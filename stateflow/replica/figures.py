"""A replica's metrics, computed from what it keeps in memory and, at intervals, from its disk."""

from __future__ import annotations

import asyncio
import math
from collections import Counter

from stateflow.clock import Clock
from stateflow.metrics.figures import Values
from stateflow.release import VERSION
from stateflow.replica.service import ReplicaService
from stateflow.rpc.limits import CallLimits
from stateflow.runtime.lifecycle import SERVED
from stateflow.types import ReplicaInfo

#: shortest interval between two measurements of the sizes on disk, in seconds
SIZES_S = 30.0


class Figures:
    def __init__(self, service: ReplicaService, info: ReplicaInfo, limits: CallLimits, clock: Clock) -> None:
        self._service, self._info, self._limits, self._clock = service, info, limits, clock
        self._sizes: Values = {}
        self._sized_at = -math.inf
        self._looking: asyncio.Task[None] | None = None

    async def __call__(self) -> Values:
        service, node = self._service, self._service.node
        by_operator = service.applier.samples.by_operator
        states = Counter[tuple[str, str]]()
        rates: dict[str, float] = {}
        for view in node.views():
            states[view.partition.operator, str(view.state)] += 1
            rates[view.partition.operator] = rates.get(view.partition.operator, 0.0) + view.batch_rate
        left = node.lease.until - self._clock.monotonic()
        return {
            "stateflow_info": {("replica", self._info.name, self._info.site, VERSION): 1},
            "stateflow_rows_total": {(name,): of.rows for name, of in by_operator.items()},
            "stateflow_batch_seconds": {(name,): of.took for name, of in by_operator.items()},
            "stateflow_batch_held_seconds_total": {(name,): of.held_s for name, of in by_operator.items()},
            "stateflow_partitions": states,
            "stateflow_batches_per_second": {(name,): rate for name, rate in rates.items()},
            "stateflow_lease_seconds": {(): left} if math.isfinite(left) else {},
            "stateflow_checkpoint_rounds_total": {(): service.checkpointing.taken},
            **await self._of_disk(),
            **self._limits.figures(),
        }

    async def _of_disk(self) -> Values:
        """Returns sizes on disk, at most ``SIZES_S`` old.

        Callers that ask during a measurement wait for the same one, and get the same error.
        """
        if self._looking is None and self._clock.monotonic() - self._sized_at >= SIZES_S:
            self._looking = asyncio.create_task(self._look())
        if self._looking is not None:
            await asyncio.shield(self._looking)  # shielded: other callers wait for it, too
        return self._sizes

    async def _look(self) -> None:
        node, sizes, entries = self._service.node, Counter[str](), Counter[str]()
        unknown: set[str] = set()
        try:
            views, disk = await self._service.threads.in_sizes(node.sized, node.views())
        finally:
            self._looking = None
        for view in views:
            name = view.partition.operator
            sizes[name] += view.bytes
            if view.state in SERVED:
                entries[name] += view.entries or 0
                unknown |= {name} if view.entries is None else set()
        self._sizes = {
            "stateflow_state_bytes": {(name,): size for name, size in sizes.items()},
            "stateflow_state_entries": {(name,): n for name, n in entries.items() if name not in unknown},
            "stateflow_disk_free_bytes": {(): disk.disk_free_bytes},
        }
        self._sized_at = self._clock.monotonic()
