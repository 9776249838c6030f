"""Finds out from replicas whether there is room for moves, before anything is planned."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace

from reconfig.capacity import Choice, Lack, Room, Space, lacking, no_room
from reconfig.controller.context import ControllerContext
from reconfig.plan import Load
from stateflow.errors import StateflowError
from stateflow.runtime.view import DiskView, PartitionView
from stateflow.types import PartitionId

log = logging.getLogger(__name__)
Said = tuple[list[PartitionView], DiskView]
#: what replicas say they have, by name; None: no answer
Heard = Mapping[str, Said | None]


async def said_by(context: ControllerContext, names: Collection[str], within_s: float) -> dict[str, Said]:
    """Asks replicas what they have. Returns the answers of those that answer within ``within_s`` seconds."""
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
    """Returns the room that a replica has, by what it says. All that lies there counts, also what it has given away."""
    own = disk.room_bytes - sum(view.bytes for view in views) if disk.room_bytes else math.inf
    return Room(own, disk.disk, disk.disk_free_bytes) if disk.disk else Room(own)


async def heard(context: ControllerContext, choice: Choice, before: Heard, within_s: float) -> Heard:
    """Asks the replicas that decide whether there is room for a choice. Returns all answers.

    Alternative targets are asked only where there is no room at those that were chosen.

    Args:
        before: answers of a moment ago; those replicas are not asked again.
    """
    said = before
    while names := unheard(context, choice, said):
        there = await said_by(context, names, within_s)
        said = {**said, **{name: there.get(name) for name in names}}
    return said


def unheard(context: ControllerContext, choice: Choice, said: Heard) -> set[str]:
    """Returns the replicas still to be asked before it is known whether there is room for a choice."""
    names = _concerned(context, Choice(choice.moves)) - said.keys()
    if not names and choice.instead and _survey(context, choice, said).lacks(choice.moves):
        names = _concerned(context, choice) - said.keys()
    return names


def _concerned(context: ControllerContext, choice: Choice) -> set[str]:
    targets = _targets(choice)
    return (targets | set(_owners(context, choice, targets).values())) & context.alive().keys()


def with_room(context: ControllerContext, choice: Choice, said: Heard) -> dict[PartitionId, str]:
    """Returns a target with room for each partition. Raises NoRoom where more would come to one than it has room for.

    A target that does not answer is taken to have room; it refuses by itself what does not fit.
    """
    survey = _survey(context, choice, said)
    lacks = survey.lacks(choice.moves)
    if lacks and choice.instead:
        choice = Choice(choice.fitted(survey.takes, survey.rooms))
        lacks = survey.lacks(choice.moves)
    if lacks:
        raise no_room(lacks)
    return choice.moves


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


@dataclass(frozen=True, slots=True)
class _Survey:
    """Answers of replicas, prepared for a choice.

    ``sizes``: bytes of each partition at each replica. ``rooms``: room of the targets, less what is on its way there.
    """

    owners: Mapping[PartitionId, str]
    sizes: Mapping[tuple[PartitionId, str], int]
    rooms: Mapping[str, Room]

    def takes(self, partition: PartitionId, target: str) -> float:
        """Returns the bytes that a move would bring to its target, which may have a part of the partition already."""
        there = self.sizes.get((partition, target), 0)
        return max(0, self.sizes.get((partition, self.owners[partition]), 0) - there)

    def lacks(self, moves: Mapping[PartitionId, str]) -> list[Lack]:
        return lacking(((target, self.takes(partition, target)) for partition, target in moves.items()), self.rooms)


def _targets(choice: Choice) -> set[str]:
    return choice.others() | set(choice.moves.values())


def _on_their_way(context: ControllerContext, choice: Choice, targets: set[str]) -> set[tuple[PartitionId, str]]:
    """Returns the open moves to one of the targets, as (partition, target), without those of the choice."""
    return {
        (each.planned.partition, each.planned.target)
        for each in context.cluster.open_moves.values()
        if each.planned.target in targets
    } - choice.moves.items()


def _owners(context: ControllerContext, choice: Choice, targets: set[str]) -> dict[PartitionId, str]:
    """Returns the owners of all partitions that are to come to one of the targets."""
    coming = {partition for partition, _ in _on_their_way(context, choice, targets)}
    return {
        partition: context.cluster.operator(partition.operator).assignment.owner(partition.partition)[0]
        for partition in {*choice.moves, *coming}
    }


def _survey(context: ControllerContext, choice: Choice, said: Heard) -> _Survey:
    targets = _targets(choice)
    there = {name: each for name, each in said.items() if each is not None}
    sizes = {(view.partition, name): view.bytes for name, (views, _) in there.items() for view in views}
    space = Space({name: room_of(*there[name]) for name in targets & there.keys()})
    survey = _Survey(_owners(context, choice, targets), sizes, {})
    for partition, target in _on_their_way(context, choice, targets):
        space.take(target, survey.takes(partition, target))
    return replace(survey, rooms=space.rooms())
