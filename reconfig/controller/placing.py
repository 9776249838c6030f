"""Partitions brought to where policies want them: once when somebody asks, or by an autopilot for as long as it is
told to. Measures, and carries out what :mod:`reconfig.placement` and :mod:`reconfig.autopilot` decide."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import replace

from reconfig.autopilot import Autopilot, Orders
from reconfig.budget import FixedCost
from reconfig.controller.cluster_state import ClusterState
from reconfig.controller.context import ControllerContext
from reconfig.controller.reconfigurations import Reconfigurations
from reconfig.placement import PolicyName, Seen, View, Wish, decide, uneven
from reconfig.work import Cause
from stateflow.errors import StateflowError
from stateflow.moves import MoveOptions
from stateflow.reports import Placement, ProposedMove, Reconfiguration
from stateflow.runtime.view import PartitionView
from stateflow.types import PartitionId, node_of

log = logging.getLogger(__name__)
#: two looks so far apart tell rates
APART_S = 2.0
#: an older look tells nothing of now
FRESH_S = 10.0
#: how often the autopilot looks
LOOK_S = 5.0
#: of a replica, for its answer
ANSWER_S = 2.0


class Placing:
    def __init__(self, context: ControllerContext, reconfigurations: Reconfigurations) -> None:
        self._context, self._reconfigurations = context, reconfigurations
        self._looks: dict[PartitionId, tuple[float, PartitionView]] = {}  # when, and what its owner said
        self._seen: dict[PartitionId, Seen] = {}
        self._seen_at = float("-inf")
        self._silent: set[str] = set()  # replicas that did not answer the last look
        self._looking = asyncio.Lock()
        self._autopilot = Autopilot(context.cluster.autopilot)
        self._told = asyncio.Event()

    # -- by command ---------------------------------------------------------------------------------------

    async def proposed(self, operator: str, names: Sequence[PolicyName], cost: FixedCost) -> Placement:
        """What the policies wish now. Args: operator: empty: all. Raises OperatorNotDeployed."""
        view, wishes = await self._wishes(operator, names)
        return _placement(view, wishes, cost, tuple(sorted(self._silent)))

    async def place(
        self, operator: str, names: Sequence[PolicyName], options: MoveOptions, reason: str = ""
    ) -> list[Reconfiguration]:
        """The moves that do it. Args: reason: of the caller, beside the policies'. Raises OperatorNotDeployed, and what
        :meth:`Reconfigurations.place` does."""
        _, wishes = await self._wishes(operator, names)
        if reason:
            wishes = [replace(wish, reason=f"{reason}: {wish.reason}") for wish in wishes]
        return await self._reconfigurations.place(wishes, options, Cause.REBALANCE)

    async def _wishes(self, operator: str, names: Sequence[PolicyName]) -> tuple[View, list[Wish]]:
        if operator:
            self._context.cluster.operator(operator)
        await self._measure()
        view = self._view()
        wishes = await self._context.aside(decide, names, view)
        return view, [wish for wish in wishes if operator in ("", wish.partition.operator)]

    # -- for as long as it is told to ----------------------------------------------------------------------

    async def order(self, orders: Orders) -> None:
        """Also for a controller that is started again."""
        await self._context.record(ClusterState.order_autopilot, orders)
        self._autopilot = Autopilot(orders)
        self._told.set()

    async def watch(self) -> None:
        while True:
            if not self._autopilot.orders.policies:
                self._told.clear()
                await self._told.wait()
                continue
            await asyncio.sleep(LOOK_S)
            try:
                await self._step()
            except StateflowError as error:
                log.warning("the autopilot moves nothing: %s", error)
            except Exception:
                log.exception("the autopilot moves nothing")

    async def _step(self) -> None:
        pilot, orders = self._autopilot, self._autopilot.orders
        await self._measure()
        clock, view, busy = self._context.clock, self._view(), self._reconfigurations.busy()
        wishes = await self._context.aside(pilot.step, clock.monotonic(), view, busy)
        if pilot is not self._autopilot or not wishes:  # it was told otherwise meanwhile
            return
        options = MoveOptions(max_pause_ms=orders.max_pause_ms)
        begun = await self._reconfigurations.place(wishes, options, Cause.AUTOPILOT)
        pilot.began(clock.monotonic(), [wish.partition for wish in wishes])
        for wish in wishes:
            log.info("autopilot: %s from %s to %s: %s", wish.partition, wish.source, wish.target, wish.reason)
        log.info("autopilot: %s", ", ".join(each.id for each in begun) or "nothing that still held")

    # -- what is measured ---------------------------------------------------------------------------------

    async def _measure(self) -> None:
        """Until rates are known, which takes two looks."""
        async with self._looking:
            clock = self._context.clock
            if clock.monotonic() - self._seen_at < APART_S:
                return
            newest = max((at for at, _ in self._looks.values()), default=float("-inf"))
            if clock.monotonic() - newest > FRESH_S:
                self._looks = await self._look()
                await asyncio.sleep(APART_S)
            before, self._looks = self._looks, await self._look()
            # of those that did not answer what was known stays
            self._seen |= {
                partition: seen_of(view, at, before.get(partition), self._seen.get(partition))
                for partition, (at, view) in self._looks.items()
            }
            self._seen = {partition: self._seen[partition] for partition in self._owners() if partition in self._seen}
            self._seen_at = clock.monotonic()

    async def _look(self) -> dict[PartitionId, tuple[float, PartitionView]]:
        """Of partitions whose owner answers."""
        context = self._context
        owners = self._owners()
        names = sorted(context.alive())
        asked = (context.replicas.views(name, ANSWER_S) for name in names)
        replies = await asyncio.gather(*asked, return_exceptions=True)
        now, found = context.clock.monotonic(), dict[PartitionId, tuple[float, PartitionView]]()
        self._silent = {name for name, reply in zip(names, replies, strict=True) if isinstance(reply, BaseException)}
        self._silent |= set(owners.values()) - set(names)
        for name, reply in zip(names, replies, strict=True):
            if isinstance(reply, StateflowError):
                log.warning("what %s has is not known: %s", name, reply)
            elif isinstance(reply, BaseException):
                raise reply
            else:
                found |= {view.partition: (now, view) for view in reply if owners.get(view.partition) == name}
        return found

    def _owners(self) -> dict[PartitionId, str]:
        return {
            PartitionId(name, number): owner
            for name, deployed in self._context.cluster.deployed.items()
            for number, owner in enumerate(deployed.assignment.owners)
        }

    def _view(self) -> View:
        cluster = self._context.cluster
        silent = frozenset(map(node_of, self._silent))
        alive = list(self._context.alive().values())
        return View(self._owners(), alive, dict(self._seen), cluster.confined(), resting=silent)


def seen_of(view: PartitionView, at: float, before: tuple[float, PartitionView] | None, known: Seen | None) -> Seen:
    """Args: before: the look before, and when. known: what was seen last. A partition that has just moved, or whose
    replica was started anew, is counted from nothing there: what was known of its rate is the best there is."""
    if before is None or before[1].epoch != view.epoch or before[1].rows > view.rows or at <= before[0]:
        return replace(known or Seen(), size=view.bytes)
    took, was = at - before[0], before[1]
    origins = {
        site: rate for site, rows in view.origins.items() if (rate := (rows - was.origins.get(site, 0)) / took) > 0
    }
    return Seen(view.bytes, (view.rows - was.rows) / took, max(0, view.row_bytes - was.row_bytes) / took, origins)


def _placement(view: View, wishes: Sequence[Wish], cost: FixedCost, silent: tuple[str, ...]) -> Placement:
    after = view.after(wishes)
    return Placement(
        tuple(
            ProposedMove(
                wish.partition.operator,
                wish.partition.partition,
                wish.source,
                wish.target,
                wish.reason,
                view.of(wish.partition).size,
            )
            for wish in wishes
        ),
        uneven(view),
        uneven(after),
        uneven(view, "bytes"),
        uneven(after, "bytes"),
        cost.expected_ms,
        cost.expected_ms + cost.margin_ms,
        silent,
    )
