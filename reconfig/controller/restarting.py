"""Restarts one node of a rolling restart.

The node's agent restarts it. The next node follows when this one serves again what it owns.
"""

from __future__ import annotations

import asyncio

from reconfig.controller.agents import Agents
from reconfig.controller.context import ControllerContext
from reconfig.controller.sweep_book import Outcome
from reconfig.controller.takeovers import Takeovers
from reconfig.sweeps import Begin, Chore, Plan
from stateflow.errors import InvalidArgument, MoveConflict, Unavailable
from stateflow.fleet import Spawned
from stateflow.types import node_of

LOOK_S = 0.1
#: failed starts in a row after which a restart counts as failed
DEATHS_MAX = 3


class Restarting:
    #: pause before the next node, in seconds, in which this one serves what waited for it
    settle_s = 1.0

    def __init__(self, context: ControllerContext, agents: Agents, takeovers: Takeovers) -> None:
        self._context, self._agents, self._takeovers = context, agents, takeovers

    def plan(self, site: str, limit: int, operator: str) -> Plan:
        """Plans the restart of every replica that an agent runs, at a site or everywhere. Raises InvalidArgument."""
        roster = self._context.cluster.roster
        agents = {name for name, info in roster.agents.items() if site in ("", info.site, name)}
        nodes = [each.replica for _, each in sorted(roster.spawned.items()) if each.running and each.agent in agents]
        if not nodes:
            where = f"at {site}" if site else "anywhere"
            raise InvalidArgument(f"no agent runs a replica {where}", remedy="see `stateflow agent list`")
        return Plan(Chore.RESTART, tuple(nodes), site, limit)

    async def carry(self, sweep_id: str, node: str, begin: Begin | None) -> Outcome | None:
        """Restarts a node, and waits until it serves again. See :meth:`reconfig.controller.sweeping.Does.carry`."""
        members, cluster = self._context.members, self._context.cluster
        before: dict[str, str] = {}
        if begin is not None:
            # a node that does not serve now is not restarted: it might get worse, and would be waited for in vain
            await self._serves(node, {}, None)
            before = {name: members.session(name) for name in self._workers(node)}
            if not await begin():
                return None
        await self._serves(node, before, cluster.roster.spawned.get(node))
        return Outcome()

    async def _serves(self, node: str, before: dict[str, str], wanted: Spawned | None) -> None:
        """Waits until a node serves as it is wanted. Raises Unavailable, and what :meth:`_lacks` raises."""
        settings, clock = self._context.settings, self._context.clock
        until = clock.monotonic() + settings.opening_timeout_s
        while (lacks := self._lacks(node, before, wanted)) is not None:
            if clock.monotonic() > until:
                raise Unavailable(
                    f"{node} does not serve after {settings.opening_timeout_s:g} s: {lacks}",
                    remedy=f"see `stateflow logs {node}`",
                )
            await asyncio.sleep(LOOK_S)

    def _lacks(self, node: str, before: dict[str, str], wanted: Spawned | None) -> str | None:
        """Returns what a node lacks to serve; None: nothing.

        Raises MoveConflict where another command came, and the error by which the node fails to start.
        """
        cluster, members = self._context.cluster, self._context.members
        now = cluster.roster.spawned.get(node)
        if now is None or not now.running or (wanted is not None and now.generation != wanted.generation):
            raise MoveConflict("another command superseded this one", remedy="see `stateflow agent list`", replica=node)
        child = self._agents.child(node)
        if child is None:
            return f"agent {now.agent} has not reported its state"
        if wanted is not None and child.spawned.generation != wanted.generation:
            return "its agent has not restarted it"
        if child.deaths >= DEATHS_MAX and child.fault is not None:
            raise child.fault
        if child.state != "RUNNING":
            return f"it is {child.state}"
        for name in self._workers(node):
            if not members.alive(name) or members.session(name) == before.get(name):
                return f"{name} has not registered"
            for partition in cluster.assigned(name):
                if self._takeovers.concerns(partition):
                    return f"{partition} has no serving owner"
        return None

    def _workers(self, node: str) -> list[str]:
        return [name for name in sorted(self._context.cluster.roster.replicas) if node_of(name) == node]
