"""Registers agents, records the replicas that each agent should run, and restarts nodes one after another.

The ledger holds the wanted replicas. In each heartbeat an agent reports the replicas that it runs, and the reply names
every replica that it should run. A command therefore needs no answer of its own, and cannot be lost. An agent's name,
like a replica's, belongs to the data directory from which it was registered.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace

import grpc.aio

from reconfig.controller import steps
from reconfig.controller.context import ControllerContext
from reconfig.controller.folds import Home, Outcome
from reconfig.controller.members import Members
from reconfig.controller.standbys import check_copies
from reconfig.controller.takeovers import Takeovers
from reconfig.decisions.placement import MIB
from reconfig.decisions.sweeps import Begin, Chore, Plan
from stateflow.errors import (
    ForeignLedger,
    InvalidArgument,
    MoveConflict,
    NameTaken,
    NoRoom,
    PartitionsLive,
    Unavailable,
    UnknownSite,
)
from stateflow.fleet import AgentInfo, Beat, Child, DesiredState, Request, Spawned
from stateflow.partition.control import Command
from stateflow.rpc.clients import AgentCaller
from stateflow.types import check_name, node_of, one_of

log = logging.getLogger(__name__)
#: seconds between looks at a node that restarts
LOOK_S = 0.1
#: failed starts in a row after which a restart counts as failed
DEATHS_MAX = 3


@dataclass(frozen=True, slots=True)
class AgentState:
    """An agent's state, as last reported.

    Attributes:
        last_heartbeat_s: seconds since its last heartbeat; -1: none since the controller started.
        wanted: replicas that it should run.
        children: replicas that it reports.
    """

    agent: AgentInfo
    alive: bool
    last_heartbeat_s: float
    disk_free_bytes: int
    wanted: list[Spawned]
    children: list[Child]


# -- Where replicas are started --------------------------------------------------------------------------------------


@dataclass(slots=True)
class Offer:
    """An agent that answers, as a candidate for new replicas. ``has`` are the replicas that the agent should run
    already.

    A replica takes one core for each of its workers. It takes memory up to its limit; without a limit, a minimum for
    each worker. A stopped replica takes neither. The agent's report of free disk already excludes what its replicas
    have written.
    """

    agent: AgentInfo
    disk_free_bytes: int
    has: list[Spawned] = field(default_factory=list)

    def cores_left(self) -> int:
        return self.agent.cores - sum(each.workers for each in self.has if each.running)

    def memory_left(self, worker_bytes: int) -> int:
        return self.agent.memory_bytes - sum(taken_bytes(each, worker_bytes) for each in self.has if each.running)


def taken_bytes(spawned: Spawned | Request, worker_bytes: int) -> int:
    """Returns the memory that a replica takes, in bytes.

    Args:
        worker_bytes: memory that each worker of a replica without a memory limit is assumed to take.
    """
    return spawned.memory_bytes or spawned.workers * worker_bytes


def lacks(offer: Offer, asked: Spawned | Request, coming: int, worker_bytes: int, disk_bytes: int) -> str:
    """Returns what an agent lacks for one more replica, in words; empty: the agent has room.

    Args:
        coming: number of replicas that the same command has already placed at this agent.
        worker_bytes: memory that each worker of a replica without a memory limit is assumed to take.
        disk_bytes: free disk that each new replica needs.
    """
    cores, memory = offer.cores_left(), offer.memory_left(worker_bytes)
    if asked.workers > cores:
        return f"{max(cores, 0)} of {offer.agent.cores} cores are left, {asked.workers} are needed"
    needed = taken_bytes(asked, worker_bytes)
    if needed > memory:
        left = f"{max(memory, 0) // MIB} of {offer.agent.memory_bytes // MIB} MiB of memory are left"
        return f"{left}, {needed // MIB} are needed"
    if (coming + 1) * disk_bytes > offer.disk_free_bytes:
        return f"{offer.disk_free_bytes // MIB} MiB of disk are free, {(coming + 1) * disk_bytes // MIB} are needed"
    return ""


def place(offers: Sequence[Offer], request: Request, worker_bytes: int, disk_bytes: int) -> list[str]:
    """Places replicas, each at the agent with most cores left among those with room. Returns the agent's name for each
    replica. Raises NoRoom unless all replicas fit.

    Args:
        offers: agents that may run the replicas; each placed replica is added to its offer.
    """
    placed: list[str] = []
    coming = dict.fromkeys((offer.agent.name for offer in offers), 0)
    for _ in range(request.count):
        why = {o.agent.name: lacks(o, request, coming[o.agent.name], worker_bytes, disk_bytes) for o in offers}
        fitting = [offer for offer in offers if not why[offer.agent.name]]
        if not fitting:
            raise no_room_for(request, len(placed), why.items())
        best = min(fitting, key=lambda offer: (-offer.cores_left(), len(offer.has), offer.agent.name))
        name = best.agent.name
        best.has.append(Spawned("", name, True, 1, request.workers, request.weight, request.memory_bytes))
        coming[name] += 1
        placed.append(name)
    return placed


def no_room_for(request: Request, placed: int, why: Iterable[tuple[str, str]]) -> NoRoom:
    said = "; ".join(f"{name}: {each}" for name, each in why)
    return NoRoom(
        f"there is room for {placed} of {request.count} replicas at {request.at}, nothing was started: {said}",
        remedy="ask for fewer or smaller replicas, stop others, or start another agent there",
        at=request.at,
    )


class Agents:
    def __init__(
        self, context: ControllerContext, connect: Callable[[str], grpc.aio.Channel], grace_s: float = 0.0
    ) -> None:
        self._context, self._cluster, self._connect = context, context.cluster, connect
        self._members = Members(self._cluster.roster.agents, context.settings, context.clock, grace_s)
        self._beats: dict[str, Beat] = {}
        self._registering = asyncio.Lock()

    # -- membership ---------------------------------------------------------------------------------------

    async def heard(self, beat: Beat) -> DesiredState:
        """Processes a heartbeat, registers the agent if it is new or has changed, and returns the replicas that the
        agent should run.

        Raises InvalidArgument, NameTaken, ForeignLedger, HoldLost.
        """
        name, context = check_name("agent", beat.agent.name), self._context
        own, belongs_to = context.ledger_id, beat.directory.ledger
        adopted = belongs_to if belongs_to in self._cluster.adopted else ""
        if belongs_to and belongs_to != own and not adopted:
            raise ForeignLedger(
                "the agent belongs to a different ledger than this controller",
                remedy="start the controller with that ledger, or the agent with an empty data directory",
                ledger=own,
                belongs_to=belongs_to,
            )
        if not (self._members.beat(name, beat.incarnation) and self._cluster.roster.agents.get(name) == beat.agent):
            async with self._registering:
                await self._register(beat, adopted)
        context.check_leads()
        self._beats[name] = beat
        return DesiredState(
            context.settings.lease_s,
            self._cluster.roster.wanted_at(name),
            own,
            context.term,
            adopted,
            context.settings.heartbeat_interval_s,
        )

    async def _register(self, beat: Beat, adopted: str) -> None:
        name, home = beat.agent.name, Home(beat.directory.id, beat.directory.place)
        self._check_name(name, home)
        await self._context.record(steps.register_agent, beat.agent, home)
        self._context.check_leads()
        if adopted:  # replicas that the lost ledger wanted there continue
            known = self._cluster.roster.spawned
            mine = [child.spawned for child in beat.children if child.spawned.replica not in known]
            if mine:
                await self._context.record(steps.spawn, [replace(each, agent=name) for each in mine])
        session = beat.incarnation
        if self._members.session(name) != session:
            log.info("agent %s at %s (%s) registered", name, beat.agent.site, beat.agent.address)
        self._members.issue(name, session, {})
        self._members.registered(name, session, session)

    def _check_name(self, name: str, home: Home) -> None:
        known = self._cluster.roster.agent_homes.get(name)
        if not home.directory:
            raise InvalidArgument(
                "the agent does not name its data directory", remedy="run it with the controller's stateflow version"
            )
        if known is None or known == home:
            return
        there = self._cluster.roster.agents[name]
        where = {"agent": name, "directory": home.directory, "belongs_to": known.directory, "address": there.address}
        if self._members.may_serve(name):
            copy = "a copy of this data directory" if known.directory == home.directory else "another data directory"
            raise NameTaken(
                f"an agent of this name may still be running with {copy}",
                remedy="start this agent with another --name; if the other one has ended, this agent is admitted when "
                f"the other's lease lapses, within {self._members.lease_left_s(name):.0f} s",
                **where,
            )
        if known.directory != home.directory and self._cluster.roster.wanted_at(name):
            raise NameTaken(
                "the name belongs to another data directory, which holds its replicas",
                remedy="start the agent with that directory; if it is lost for good, `stateflow agent forget "
                f"{name}` gives up the name and its replicas",
                **where,
            )

    def child(self, replica: str) -> Child | None:
        """Returns a replica's state, as its agent last reported it; None: no agent has reported it."""
        spawned = self._cluster.roster.spawned.get(replica)
        beat = None if spawned is None else self._beats.get(spawned.agent)
        return None if beat is None else next((c for c in beat.children if c.spawned.replica == replica), None)

    def states(self) -> list[AgentState]:
        """Returns all agents, by name."""
        return [self._state(info) for _, info in sorted(self._cluster.roster.agents.items())]

    def _state(self, info: AgentInfo) -> AgentState:
        beat = self._beats.get(info.name)
        return AgentState(
            info,
            self._members.alive(info.name),
            self._members.heard_s(info.name),
            0 if beat is None else beat.disk_free_bytes,
            self._cluster.roster.wanted_at(info.name),
            [] if beat is None else list(beat.children),
        )

    async def forget(self, name: str) -> None:
        """Forgets an agent and the replicas that it should run.

        Raises InvalidArgument if there is no such agent, NameTaken while the agent may run, and PartitionsLive while
        one of those replicas owns partitions; then nothing changes.
        """
        async with self._context.planning:
            if name not in self._cluster.roster.agents:
                raise InvalidArgument(
                    f"there is no agent {name!r}", remedy=one_of(self._cluster.roster.agents, "agent")
                )
            if self._members.may_serve(name):
                raise NameTaken(
                    "the agent may still be running",
                    remedy="stop it, and run the command again when its lease has lapsed",
                    agent=name,
                    lease_s=f"{self._members.lease_left_s(name):.1f}",
                )
            for spawned in self._cluster.roster.wanted_at(name):
                self._check_owns_nothing(
                    spawned.replica,
                    "start the agent with its data directory and drain the replica, or wait until its partitions are "
                    "taken over",
                )
            await self._context.record(steps.dismiss, name)
            self._members.forget(name)
            self._beats.pop(name, None)
        log.warning("agent %s forgotten", name)

    # -- replicas of agents -------------------------------------------------------------------------------

    async def spawn(self, request: Request) -> list[Spawned]:
        """Places new replicas and records that their agents should run them. Raises UnknownSite, Unavailable if no
        agent there answers, or NoRoom; then nothing is started."""
        settings = self._context.settings
        async with self._context.planning:
            offers = [self._offer(name) for name in self._asked(request)]
            names = place(offers, request, settings.spawn_worker_bytes, settings.spawn_disk_bytes)
            wanted: list[Spawned] = []
            for agent in names:
                replica = self._free_name(agent, {each.replica for each in wanted})
                wanted.append(
                    Spawned(replica, agent, True, 1, request.workers, request.weight, request.memory_bytes),
                )
            await self._context.record(steps.spawn, wanted)
        for each in wanted:
            log.info("replica %s assigned to agent %s", each.replica, each.agent)
        return wanted

    def _asked(self, request: Request) -> list[str]:
        """Returns the agents that answer and match a request."""
        agents = self._cluster.roster.agents
        if request.at in agents:
            named = [request.at]
        else:
            named = sorted(name for name, info in agents.items() if info.site == request.at)
        if not named:
            known = [*agents, *(info.site for info in agents.values())]
            raise UnknownSite(
                f"there is no agent {request.at!r}, and no agent at a site of that name",
                remedy=one_of(set(known), "agent"),
            )
        fitting = [name for name in named if request.labels.items() <= agents[name].labels.items()]
        if not fitting:
            asked = " ".join(f"{key}={value}" for key, value in sorted(request.labels.items()))
            lacking = f"agent {request.at} does not have" if request.at in agents else f"no agent at {request.at} has"
            raise UnknownSite(f"{lacking} the labels {asked}", remedy="see `stateflow agent list`")
        alive = [name for name in fitting if self._members.alive(name)]
        if not alive:
            silent = (
                f"agent {request.at} does not answer" if request.at in agents else f"no agent at {request.at} answers"
            )
            raise Unavailable(silent, remedy="see `stateflow agent list`", agents=" ".join(fitting))
        return alive

    def _offer(self, name: str) -> Offer:
        beat = self._beats.get(name)
        roster, free_bytes = self._cluster.roster, 0 if beat is None else beat.disk_free_bytes
        return Offer(roster.agents[name], free_bytes, roster.wanted_at(name))

    def _free_name(self, agent: str, taken: Iterable[str]) -> str:
        """Returns a name that no replica ever had, because the data directory of a former replica may still exist."""
        cluster = self._cluster
        used = {*taken, *map(node_of, cluster.names_used())}
        number = 0
        while f"{agent}-{number}" in used:
            number += 1
        return f"{agent}-{number}"

    async def stop(self, replica: str, force: bool) -> Spawned:
        """Stops a replica; its data directory stays. Its standby copies end, and are made at other replicas that may
        hold them.

        Args:
            force: stop the replica even while it owns partitions, which no replica serves until they are taken over,
                and even if an operator then has no standby.

        Raises InvalidArgument if no agent started the replica. Without ``force``, raises PartitionsLive while the
        replica owns partitions, MoveConflict while partitions move to or from it, and Unavailable if an operator that
        wants standbys could have no standby any more. Then nothing changes.
        """
        async with self._context.planning:
            spawned = self._spawned(replica)
            if not force:
                self._check_owns_nothing(
                    replica, "pass --drain (drain=True) to move them away first, or --force", moving=True
                )
                check_copies(self._context, replica, ", or pass --force")
            return spawned if not spawned.running else await self._command(replace(spawned, running=False))

    async def restart(self, replica: str) -> Spawned:
        """Ends a replica's process, if it runs, and starts it again. Raises InvalidArgument if no agent started the
        replica, and NoRoom if the replica was stopped and its agent has no room for it.
        """
        settings = self._context.settings
        async with self._context.planning:
            spawned = self._spawned(replica)
            if not spawned.running:
                offer = self._offer(spawned.agent)
                why = lacks(offer, spawned, 0, settings.spawn_worker_bytes, 0)
                if why:
                    request = Request(spawned.agent, 1, spawned.workers, spawned.weight, spawned.memory_bytes)
                    raise no_room_for(request, 0, [(spawned.agent, why)])
            return await self._command(replace(spawned, running=True))

    async def _command(self, wanted: Spawned) -> Spawned:
        wanted = replace(wanted, generation=wanted.generation + 1)
        await self._context.record(steps.spawn, [wanted])
        return wanted

    def _spawned(self, replica: str) -> Spawned:
        """Returns the wanted state of a replica that an agent runs. Raises InvalidArgument if no agent started it."""
        spawned = self._cluster.roster.spawned.get(replica)
        if spawned is not None:
            return spawned
        known = replica in self._cluster.roster.replicas
        raise InvalidArgument(
            f"{replica} was not started by an agent" if known else f"there is no replica {replica!r}",
            remedy="do this on the machine where its process runs"
            if known
            else one_of(self._cluster.roster.spawned, "replica of an agent"),
        )

    def _check_owns_nothing(self, replica: str, remedy: str, moving: bool = False) -> None:
        """Checks that no worker of a node owns partitions. Raises PartitionsLive, MoveConflict.

        Args:
            moving: check also that no partition is on its way to or from the node; standbys do not count.
        """
        names = [name for name in sorted(self._cluster.roster.replicas) if node_of(name) == replica]
        owned = sum(len(self._cluster.assigned(name)) for name in names)
        if owned:
            raise PartitionsLive(f"the replica owns {owned} partitions", remedy=remedy, replica=replica)
        if moving and not all(self._cluster.is_free(name, standbys=False) for name in names):
            raise MoveConflict(
                "partitions are moving to or from the replica", remedy="wait until their moves end", replica=replica
            )

    # -- logs ---------------------------------------------------------------------------------------------

    async def logs(self, replica: str, lines: int, follow: bool) -> AsyncIterator[bytes]:
        """Yields a replica's log from its agent. Raises InvalidArgument, Unavailable."""
        name = self._spawned(replica).agent
        self._context.check_leads()
        session = self._members.session(name)
        if not session or not self._members.alive(name):
            raise Unavailable(f"agent {name} does not answer", remedy="see `stateflow agent list`")
        command = Command(self._context.ledger_id, self._context.term, session)
        address = self._cluster.roster.agents[name].address
        async with self._connect(address) as channel:
            caller = AgentCaller(channel, f"agent {name} ({address})")
            async with contextlib.aclosing(caller.logs(command, replica, lines, follow)) as pieces:
                async for data in pieces:
                    yield data


# -- Rolling restarts ------------------------------------------------------------------------------------------------


class Restarting:
    """The work of a rolling restart at one node: the chore ``restart`` of a sweep.

    The node's agent restarts the node. The next node's turn comes when this node serves all its partitions again.
    """

    #: pause between two nodes, in seconds, in which the restarted node serves the batches that waited for it
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
        """Restarts a node, and waits until it serves again, see :class:`~reconfig.controller.sweeping.ChoreWork`."""
        members, cluster = self._context.members, self._context.cluster
        before: dict[str, str] = {}
        if begin is not None:
            # a node that does not serve now is not restarted: a restart might make it worse, and it might never serve
            await self._serves(node, {}, None)
            before = {name: members.session(name) for name in self._workers(node)}
            if not await begin():
                return None
        await self._serves(node, before, cluster.roster.spawned.get(node))
        return Outcome()

    async def _serves(self, node: str, before: dict[str, str], wanted: Spawned | None) -> None:
        """Waits until a node is running as ordered and serves. Raises Unavailable, and the errors of :meth:`_lacks`."""
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
        """Returns what a node still lacks before it serves; None: the node serves.

        Raises MoveConflict if another command has replaced this one, and the error by which the node fails to start.
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
        if child.state != "RUNNING":
            if child.deaths >= DEATHS_MAX and child.fault is not None:
                raise child.fault
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
