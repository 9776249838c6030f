"""Runs sweeps: long work on many nodes, some at a time, while they serve. The next leader resumes a sweep."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from typing import Protocol

from reconfig.controller.cluster_state import ClusterState
from reconfig.controller.context import ControllerContext
from reconfig.controller.sweep_book import Outcome
from reconfig.sweeps import Begin, Chore, Plan
from stateflow.errors import InvalidArgument, MoveConflict, MoveUnknown, StateflowError
from stateflow.ledger.batches import EntityStatus
from stateflow.reports import Rolling, Sweep
from stateflow.rpc.wire import unexpected

log = logging.getLogger(__name__)
#: what is under way, for the message that refuses a second sweep of its chore
_GOING = {
    Chore.RESTART: "replicas are being restarted",
    Chore.CHECKPOINT: "checkpoints are being taken",
    Chore.VERIFY: "partitions are being verified",
}


class Does(Protocol):
    """The work of one chore. ``settle_s``: pause before the next node begins, in seconds."""

    settle_s: float

    def plan(self, site: str, limit: int, operator: str) -> Plan:
        """Plans a sweep. Raises InvalidArgument where there is nothing to do."""
        ...

    async def carry(self, sweep_id: str, node: str, begin: Begin | None) -> Outcome | None:
        """Carries out the work at one node. Returns the outcome; None: the node did not begin.

        Args:
            begin: records that the node begins, and returns False where it must not any more; None: the node had begun
                under a former leader.

        Raises the error because of which the whole node fails.
        """
        ...


class Sweeps:
    def __init__(self, context: ControllerContext, does: Mapping[Chore, Does]) -> None:
        self._context, self._does = context, does
        self._book = context.cluster.sweeps

    async def begin(self, chore: Chore, site: str, limit: int, operator: str = "") -> str:
        """Begins a sweep. Returns its id.

        Args:
            site: only nodes there; empty: everywhere.
            limit: nodes at a time, 1 to 256.
            operator: only its partitions; empty: all.

        Raises InvalidArgument, OperatorNotDeployed, and MoveConflict while another sweep of this chore is under way.
        """
        await self._context.acquainted()
        async with self._context.planning:
            if not 0 < limit <= 256:
                raise InvalidArgument(f"a sweep cannot take {limit} nodes at a time", remedy="give 1 to 256")
            if under_way := self._book.under_way(chore):
                raise MoveConflict(
                    _GOING[chore], remedy="wait until they end, or cancel it", batch=self._named(under_way[0])
                )
            plan = self._does[chore].plan(site, limit, operator)
            sweep_id = self._context.new_id()
            await self._context.record(ClusterState.plan_sweep, sweep_id, plan)
        self._context.spawn(self._run(sweep_id))
        return sweep_id

    def report(self, sweep_id: str) -> Sweep:
        """Returns the report of a sweep. Raises MoveUnknown."""
        self._check(sweep_id)
        return self._book.report(sweep_id)

    def rolling(self, sweep_id: str) -> Rolling:
        """Returns the report of a rolling restart. Raises MoveUnknown."""
        self._check(sweep_id, Chore.RESTART)
        return self._book.rolling(sweep_id)

    async def cancel(self, sweep_id: str) -> None:
        """Cancels a sweep: nodes that have not begun do not begin. Raises MoveUnknown."""
        self._check(sweep_id)
        await self._context.record(ClusterState.call_off_sweep, sweep_id)

    def resume_all(self) -> None:
        for sweep_id in self._book.under_way():
            self._context.spawn(self._run(sweep_id))

    def _check(self, sweep_id: str, chore: Chore | None = None) -> None:
        known = self._book.there.get(sweep_id)
        if known is None or chore not in (None, known.chore):
            what = "rolling restart" if chore is Chore.RESTART else "sweep"
            raise MoveUnknown(f"there is no {what} {sweep_id!r}", remedy="see `stateflow batch list`")

    def _named(self, sweep_id: str) -> str:
        return self._book.there[sweep_id].batch.record.item_id

    async def _run(self, sweep_id: str) -> None:
        known = self._book.there[sweep_id]
        does = self._does[known.chore]
        going: dict[asyncio.Task[None], str] = {}
        for task in known.of(EntityStatus.IN_PROGRESS):
            going[self._context.spawn(self._carry(sweep_id, task.node, begun=True))] = task.node
        while not self._context.over.done() and not known.over:
            for node in known.next(list(going.values())):
                going[self._context.spawn(self._carry(sweep_id, node))] = node
            done, _ = await asyncio.wait(going, return_when=asyncio.FIRST_COMPLETED)
            for each in done:
                del going[each]
                if (error := each.exception()) is not None:
                    if not self._context.over.done():  # else the next leader resumes the sweep
                        log.error("%s stopped: %s", self._named(sweep_id), error)
                    for other in going:
                        other.cancel()
                    return
            if known.of(EntityStatus.WAITING):
                await asyncio.sleep(does.settle_s)

    async def _carry(self, sweep_id: str, node: str, *, begun: bool = False) -> None:
        known, clock = self._book.there[sweep_id], self._context.clock
        began = clock.monotonic()

        async def begin() -> bool:
            async with self._context.planning:
                return await self._context.record(ClusterState.begin_swept, sweep_id, node)

        try:
            outcome = await self._does[known.chore].carry(sweep_id, node, None if begun else begin)
        except Exception as failed:  # noqa: BLE001 - bugs too: a node that stayed under way could never be cancelled
            self._context.check_leads()
            outcome = Outcome(str(failed if isinstance(failed, StateflowError) else unexpected(failed)))
        if outcome is None:
            return
        if outcome.error:
            log.error("%s of %s failed: %s", known.chore, node, outcome.error)
        ms = round(1e3 * (clock.monotonic() - began))
        await self._context.record(ClusterState.end_swept, sweep_id, node, outcome, ms)
