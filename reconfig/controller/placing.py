"""Moves partitions to where policies want them: once by command, or continuously by an autopilot.

Carries out what :mod:`reconfig.placement` and :mod:`reconfig.autopilot` decide.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from reconfig.autopilot import Autopilot, Orders
from reconfig.budget import FixedCost
from reconfig.capacity import Choice, lacking
from reconfig.controller.cluster_state import ClusterState
from reconfig.controller.context import ControllerContext
from reconfig.controller.measuring import Measuring
from reconfig.controller.reconfigurations import Reconfigurations
from reconfig.placement import PolicyName, decide, uneven
from reconfig.view import Left, View, Wish
from reconfig.work import Cause
from stateflow.errors import StateflowError
from stateflow.moves import MoveOptions
from stateflow.reports import LackOfRoom, LeftPartition, Placement, ProposedMove, Reconfiguration
from stateflow.types import PartitionId

log = logging.getLogger(__name__)


class Placing:
    def __init__(self, context: ControllerContext, reconfigurations: Reconfigurations, measuring: Measuring) -> None:
        self._context, self._reconfigurations, self._measuring = context, reconfigurations, measuring
        self._autopilot = Autopilot(context.cluster.autopilot)
        self._told = asyncio.Event()

    # -- by command ---------------------------------------------------------------------------------------

    async def proposed(self, operator: str, names: Sequence[PolicyName], cost: FixedCost) -> Placement:
        """Returns the moves that policies propose now. ``operator``: empty: all. Raises OperatorNotDeployed."""
        left = Left()
        view, wishes = await self._wishes(operator, names, left)
        return self._placement(view, wishes, cost, left, operator)

    async def costs(self, choice: Choice, reasons: Mapping[PartitionId, str], cost: FixedCost) -> Placement:
        """Returns what the moves of a choice would cost, and what the placement would be afterwards."""
        await self._measuring.rates()
        view = self._measuring.view()
        moves = choice.fitted(view.takes, view.room)
        wishes = [Wish(each, view.owners[each], target, reasons[each]) for each, target in moves.items()]
        return self._placement(view, wishes, cost, Left())

    async def place(
        self,
        operator: str,
        names: Sequence[PolicyName],
        options: MoveOptions,
        reason: str = "",
        only: Collection[str] | None = None,
    ) -> list[Reconfiguration]:
        """Begins the moves that policies propose now.

        Args:
            operator: empty: all.
            reason: the caller's reason, put before the policies'; empty: none.
            only: nodes that may receive partitions; None: all.

        Raises OperatorNotDeployed, and what :meth:`Reconfigurations.place` raises.
        """
        _, wishes = await self._wishes(operator, names, Left())
        if reason:
            wishes = [replace(wish, reason=f"{reason}: {wish.reason}") for wish in wishes]
        return await self._reconfigurations.place(wishes, options, Cause.REBALANCE, only)

    async def _wishes(self, operator: str, names: Sequence[PolicyName], left: Left) -> tuple[View, list[Wish]]:
        if operator:
            self._context.cluster.operator(operator)
        await self._measuring.rates()
        view = self._measuring.view()
        wishes = await self._context.aside(decide, names, view, left)
        return view, [wish for wish in wishes if operator in ("", wish.partition.operator)]

    # -- for as long as it is told to ----------------------------------------------------------------------

    async def order(self, orders: Orders) -> None:
        """Gives the autopilot new orders, which outlast a restart of the controller."""
        await self._context.record(ClusterState.order_autopilot, orders)
        self._autopilot = Autopilot(orders)
        self._told.set()

    async def watch(self) -> None:
        while True:
            if not self._autopilot.orders.policies:
                self._told.clear()
                await self._told.wait()
                continue
            await asyncio.sleep(self._autopilot.orders.look_s)
            try:
                await self._step()
            except StateflowError as error:
                log.warning("autopilot moved nothing: %s", error)
            except Exception:
                log.exception("autopilot moved nothing")

    async def _step(self) -> None:
        pilot, orders = self._autopilot, self._autopilot.orders
        await self._measuring.rates()
        clock, view, busy = self._context.clock, self._measuring.view(), self._reconfigurations.busy()
        wishes = await self._context.aside(pilot.step, clock.monotonic(), view, busy)
        if pilot is not self._autopilot or not wishes:  # the former: its orders changed meanwhile
            return
        options = MoveOptions(max_pause_ms=orders.max_pause_ms)
        begun = await self._reconfigurations.place(wishes, options, Cause.AUTOPILOT)
        pilot.began(clock.monotonic(), [wish.partition for wish in wishes])
        for wish in wishes:
            log.info("autopilot: %s from %s to %s: %s", wish.partition, wish.source, wish.target, wish.reason)
        log.info("autopilot: %s", ", ".join(each.id for each in begun) or "none of these moves still applies")

    # -- told ---------------------------------------------------------------------------------------------

    def _placement(
        self, view: View, wishes: Sequence[Wish], cost: FixedCost, left: Left, operator: str = ""
    ) -> Placement:
        after = view.after(wishes)
        moves = (
            ProposedMove(
                *(wish.partition.operator, wish.partition.partition, wish.source, wish.target, wish.reason),
                view.of(wish.partition).size,
            )
            for wish in wishes
        )
        stay = (
            LeftPartition(partition.operator, partition.partition, reason)
            for partition, reason in left.reasons.items()
            if operator in ("", partition.operator)
        )
        lacks = lacking(((wish.target, view.takes(wish.partition, wish.target)) for wish in wishes), view.room)
        return Placement(
            tuple(moves),
            *(uneven(view), uneven(after), uneven(view, "bytes"), uneven(after, "bytes")),
            cost.expected_ms,
            cost.expected_ms + cost.margin_ms,
            tuple(sorted(self._measuring.silent)),
            tuple(stay),
            tuple(LackOfRoom(each.replicas, each.free_bytes, each.coming_bytes) for each in lacks),
        )
