"""Measuring: asks replicas for the figures that placement needs, and keeps their answers while they are current.

Before moves are planned, :func:`heard` asks the replicas that decide whether there is room for them, and
:func:`with_room` checks it. :class:`Measuring` keeps the sizes and rates of partitions, the room of replicas and the
round trips between sites, for policies and for reports.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace

from reconfig.controller.cluster_state import Deployed
from reconfig.controller.context import ControllerContext
from reconfig.decisions.budget import Links, pairs_that_matter
from reconfig.decisions.placement import Choice, Room, Seen, Space, View, no_room
from reconfig.decisions.plan import Load
from reconfig.decisions.policies import APART_S
from stateflow.errors import StateflowError
from stateflow.partition.control import DiskView, PartitionView
from stateflow.status import LinkReport
from stateflow.types import PartitionId, node_of

log = logging.getLogger(__name__)
#: seconds after which a look, in which all replicas are asked once, is out of date
FRESH_S = 10.0
#: seconds for which the controller waits for a replica's answer
ANSWER_S = 2.0
#: seconds for which the controller waits for an answer if the replica has to ask other replicas first
ROUND_TRIPS_S = 4.0
#: seconds after which measured room is no longer shown
SHOWN_S = 60.0
#: maximum duration of a look for display, in seconds; after a longer wait, a client would ask a follower instead
SHOWN_WITHIN_S = 2.0
Said = tuple[list[PartitionView], DiskView]
#: replicas' reports of what they have, by name; None: the replica did not answer
Heard = Mapping[str, Said | None]


# -- Room for moves --------------------------------------------------------------------------------------------------


async def said_by(context: ControllerContext, names: Collection[str], within_s: float) -> dict[str, Said]:
    """Asks replicas what they have, and returns the answers that arrive within ``within_s`` seconds."""
    ordered = sorted(names)
    asked = (context.replicas.views(name, within_s) for name in ordered)
    found: dict[str, Said] = {}
    for name, reply in zip(ordered, await asyncio.gather(*asked, return_exceptions=True), strict=True):
        if isinstance(reply, StateflowError):
            log.warning("replica %s did not report its partitions and disk: %s", name, reply)
        elif isinstance(reply, BaseException):
            raise reply
        else:
            found[name] = reply
    return found


def room_of(views: Iterable[PartitionView], disk: DiskView) -> Room:
    """Returns a replica's room, from its own report. All data on its disk counts, including files of partitions that it
    no longer owns."""
    own = disk.room_bytes - sum(view.bytes for view in views) if disk.room_bytes else math.inf
    return Room(own, disk.disk, disk.disk_free_bytes) if disk.disk else Room(own)


async def heard(context: ControllerContext, choice: Choice, before: Heard, within_s: float) -> Heard:
    """Asks the replicas whose answers decide whether there is room for a choice. Returns all answers.

    Alternative targets are asked only if the chosen targets lack room.

    Args:
        before: recent answers; these replicas are not asked again.
    """
    said = before
    while names := unheard(context, choice, said):
        there = await said_by(context, names, within_s)
        said = {**said, **{name: there.get(name) for name in names}}
    return said


def unheard(context: ControllerContext, choice: Choice, said: Heard) -> set[str]:
    """Returns the replicas still to be asked before it is known whether there is room for a choice."""
    names = _concerned(context, Choice(choice.moves)) - said.keys()
    if not names and choice.instead and _view(context, choice, said).lacks(choice.moves):
        names = _concerned(context, choice) - said.keys()
    return names


def _concerned(context: ControllerContext, choice: Choice) -> set[str]:
    targets, _, owners = _coming(context, choice)
    return (targets | set(owners.values())) & context.alive().keys()


def with_room(
    context: ControllerContext, choice: Choice, said: Heard, *, in_part: bool = False
) -> dict[PartitionId, str]:
    """Returns a target with room for each partition. Raises NoRoom if a target would receive more than it has room for.

    A target that does not answer counts as having room; it refuses by itself a partition that does not fit.

    Args:
        in_part: leave out the moves that a target has no room for, instead of raising.
    """
    view, moves = _view(context, choice, said), choice.moves
    if view.lacks(moves):
        moves = view.fitted(choice)
        if in_part:
            return view.fitting(moves)
    if lacks := view.lacks(moves):
        raise no_room(lacks)
    return moves


def loads_of(context: ControllerContext, partitions: Iterable[PartitionId], said: Heard) -> dict[PartitionId, Load]:
    """Returns the loads of those partitions whose owners answered."""
    owners = {each: context.cluster.operator(each.operator).assignment.owner(each.partition)[0] for each in partitions}
    return {
        view.partition: Load(view.bytes, view.batch_rate)
        for name, each in said.items()
        if each is not None
        for view in each[0]
        if owners.get(view.partition) == name
    }


def _coming(
    context: ControllerContext, choice: Choice
) -> tuple[set[str], set[tuple[PartitionId, str]], dict[PartitionId, str]]:
    """Returns three things: the targets of a choice; the other open moves to these targets, as (partition, target);
    and the owner of each partition that will move to one of these targets."""
    targets = choice.others() | set(choice.moves.values())
    open_moves = (each.planned for each in context.cluster.open_moves.values() if each.planned.target in targets)
    on_their_way = {(planned.partition, planned.target) for planned in open_moves} - choice.moves.items()
    owners = {
        partition: context.cluster.operator(partition.operator).assignment.owner(partition.partition)[0]
        for partition in {*choice.moves, *(partition for partition, _ in on_their_way)}
    }
    return targets, on_their_way, owners


def _view(context: ControllerContext, choice: Choice, said: Heard) -> View:
    """Returns the sizes of partitions, and the room that moves under way will leave at a choice's targets."""
    targets, on_their_way, owners = _coming(context, choice)
    there = {name: each for name, each in said.items() if each is not None}
    sizes = {(view.partition, name): view.bytes for name, (views, _) in there.items() for view in views}
    seen = {partition: Seen(sizes.get((partition, owner), 0)) for partition, owner in owners.items()}
    room = {name: room_of(*there[name]) for name in targets & there.keys()}
    return View(owners, (), seen, room=room, copies=sizes).reserved(on_their_way)


# -- Measurements ----------------------------------------------------------------------------------------------------


def owners_of(deployed: Mapping[str, Deployed]) -> dict[PartitionId, str]:
    """Returns the owner of each partition of the deployed operators."""
    return {
        PartitionId(name, number): owner
        for name, each in deployed.items()
        for number, owner in enumerate(each.assignment.owners)
    }


class Measuring:
    """The newest measurements of partitions, room and links.

    ``silent`` are the replicas that did not answer the last look.

    Args:
        links: measurements of links between sites; moves add to them, too.
    """

    def __init__(self, context: ControllerContext, links: Links) -> None:
        self._context, self._links = context, links
        self._looks: dict[PartitionId, tuple[float, PartitionView]] = {}  # time, and the owner's report
        self._seen: dict[PartitionId, Seen] = {}
        self._rooms: dict[str, Room] = {}
        self._copies: dict[tuple[PartitionId, str], int] = {}
        self._looked_at = self._seen_at = float("-inf")
        self.silent: set[str] = set()
        self._looking = asyncio.Lock()

    async def rates(self) -> None:
        """Measures the rates of partitions, by two looks ``APART_S`` apart, unless the last rates are current."""
        await self._context.acquainted()
        async with self._looking:
            clock = self._context.clock
            if clock.monotonic() - self._seen_at < APART_S:
                return
            if clock.monotonic() - self._looked_at > FRESH_S:
                self._looks = await self._look()
            await asyncio.sleep(max(0.0, APART_S - (clock.monotonic() - self._looked_at)))
            before, self._looks = self._looks, await self._look()
            # a partition whose owner did not answer keeps its last measurement
            self._seen |= {
                partition: seen_of(view, at, before.get(partition), self._seen.get(partition))
                for partition, (at, view) in self._looks.items()
            }
            self._seen = {partition: self._seen[partition] for partition in self.owners() if partition in self._seen}
            await self._look_at_links()
            self._seen_at = clock.monotonic()

    async def room(self) -> None:
        """Measures the room of replicas for display, by one look, and gives up after ``SHOWN_WITHIN_S`` seconds."""
        await self._context.acquainted()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(SHOWN_WITHIN_S):
                await self._look_at_room()

    async def _look_at_room(self) -> None:
        async with self._looking:
            if self._context.clock.monotonic() - self._looked_at > APART_S:
                self._looks = await self._look()
                known = self._seen
                self._seen = known | {
                    partition: seen_of(view, at, None, known.get(partition))
                    for partition, (at, view) in self._looks.items()
                }
            await self._look_at_links()

    def owners(self) -> dict[PartitionId, str]:
        return owners_of(self._context.cluster.deployed)

    def view(self) -> View:
        context, now = self._context, self._context.clock.monotonic()
        view = View(
            self.owners(),
            list(context.fit().values()),
            dict(self._seen),
            context.cluster.allowed_sites(),
            self._rooms,
            cordoned=frozenset(map(node_of, self.silent)),
            rtt_ms=self._links.rtts_ms(now),
            copies=dict(self._copies),
            bytes_per_s=self._links.bytes_per_s(now),
        )
        under_way = (open_move.planned for open_move in context.cluster.open_moves.values())
        return view.reserved((planned.partition, planned.target) for planned in under_way)

    # -- shown --------------------------------------------------------------------------------------------

    def room_bytes(self) -> dict[str, int]:
        """Returns the bytes for which each replica still has room. Replicas without a known limit are missing."""
        if self._context.clock.monotonic() - self._looked_at > SHOWN_S:
            return {}
        space = Space(self._rooms)
        return {name: max(0, int(space.left(name))) for name, room in self._rooms.items() if room != Room()}

    def links(self) -> tuple[LinkReport, ...]:
        now = self._context.clock.monotonic()
        rtts, rates = self._links.rtts_ms(now), self._links.bytes_per_s(now)
        pairs = sorted(rates.keys() | {pair for pair in rtts if pair[::-1] not in rates})
        return tuple(LinkReport(*pair, rtts.get(pair, rtts.get((pair[1], pair[0]))), rates.get(pair)) for pair in pairs)

    # -- asked --------------------------------------------------------------------------------------------

    async def _look(self) -> dict[PartitionId, tuple[float, PartitionView]]:
        """Asks all replicas. Returns the time and the owner's view of each partition whose owner answers."""
        context, owners = self._context, self.owners()
        names = context.alive().keys()
        said = await said_by(context, names, ANSWER_S)
        now = self._looked_at = context.clock.monotonic()
        self.silent = (set(names) | set(owners.values())) - said.keys()
        self._rooms = {name: room_of(*each) for name, each in said.items()}
        found, self._copies = dict[PartitionId, tuple[float, PartitionView]](), {}
        for name, (views, _) in said.items():
            for view in views:
                if owners.get(view.partition) == name:
                    found[view.partition] = now, view
                elif view.bytes:
                    self._copies[view.partition, name] = view.bytes
        return found

    async def _look_at_links(self) -> None:
        context = self._context
        pairs = await context.aside(pairs_that_matter, self.view())
        at: dict[str, str] = {}  # one replica per site
        for name, info in sorted(context.alive().items()):
            if name not in self.silent:
                at.setdefault(info.site, name)
        there = [pair for pair in pairs if pair[0] in at and pair[1] in at]
        due = self._links.due(context.clock.monotonic(), there)
        await asyncio.gather(*(self._look_at_links_of(site, others, at) for site, others in due.items()))

    async def _look_at_links_of(self, site: str, others: Sequence[str], at: Mapping[str, str]) -> None:
        sites = {at[other]: other for other in others}
        try:
            took = await self._context.replicas.round_trips_ms(at[site], list(sites), ROUND_TRIPS_S)
        except StateflowError as error:
            log.warning("round trips from site %s not measured: %s", site, error)
            return
        now = self._context.clock.monotonic()
        self._links.measured(now, site, {sites[name]: rtt_ms for name, rtt_ms in took.items()})


def seen_of(view: PartitionView, at: float, before: tuple[float, PartitionView] | None, known: Seen | None) -> Seen:
    """Returns the rates of a partition, from two looks at it.

    After a move of the partition or a restart of its replica, the counters begin at zero. The rates that were known
    before are then kept.

    Args:
        view: newest look.
        at: time of that look, in monotonic seconds.
        before: time and view of the look before; None: there was none.
        known: rates from earlier looks; None: there are none.
    """
    if before is None or before[1].epoch != view.epoch or before[1].rows > view.rows or at <= before[0]:
        return replace(known or Seen(), size=view.bytes)
    took, was = at - before[0], before[1]
    origins = {
        site: rate for site, rows in view.origins.items() if (rate := (rows - was.origins.get(site, 0)) / took) > 0
    }
    return Seen(view.bytes, (view.rows - was.rows) / took, max(0, view.row_bytes - was.row_bytes) / took, origins)
