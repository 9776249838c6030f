"""Creating the first, empty copies of an operator's partitions."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from stateflow.changes import Mutations
from stateflow.errors import AlreadyDeployed, StateMissing
from stateflow.runtime import layout
from stateflow.runtime.lifecycle import State
from stateflow.runtime.registry import UNFINISHED, PartitionRegistry
from stateflow.runtime.slot import Slot
from stateflow.types import OperatorSpec, PartitionId


def check(registry: PartitionRegistry, spec: OperatorSpec, total: int) -> None:
    """Checks that this replica could hold ``total`` partitions of this version of an operator, and changes nothing.

    Raises OperatorNotImportable, OperatorOutdated, TooFewFiles, SchemaMismatch.
    """
    registry.check(spec)
    registry.expect(max(0, total - len(_here(registry, spec.name))))


def _here(registry: PartitionRegistry, operator: str) -> set[int]:
    """Returns the operator's partitions that have a database here."""
    return {slot.id.partition for slot in registry.slots() if slot.id.operator == operator and slot.directory}


def create(
    registry: PartitionRegistry,
    spec: OperatorSpec,
    partitions: Iterable[int],
    epoch: int,
    total: int = 0,
    check_asked: Callable[[], None] = lambda: None,
) -> None:
    """Creates empty partitions owned from ``epoch`` on. Partitions that are owned here at this epoch stay as they are.

    Args:
        total: number of partitions of the operator that will be here in the end.
        check_asked: raises where the command to create them is void by now.

    Raises TooFewFiles, before anything is created; StaleEpoch, and what ``check_asked`` raises, where the operator may
    have been undeployed meanwhile.
    """
    with registry.making(spec, check_asked):
        partitions = list(partitions)
        here = _here(registry, spec.name)
        registry.expect(max(len(set(partitions) - here), total - len(here)))
        for number in partitions:
            slot = registry.slot(PartitionId(spec.name, number))
            with slot.work, slot.mutex:
                check_asked()
                if slot.lifecycle.state is State.OWNED and slot.lifecycle.epoch == epoch:
                    continue
                _create(registry, slot, epoch)
            registry.on_change(slot.id)


def _create(registry: PartitionRegistry, slot: Slot, epoch: int) -> None:
    """Creates one partition. Callers hold ``work`` and ``mutex``."""
    registry.check_deployed(slot.id, epoch)
    if slot.lifecycle.state is State.ABSENT and registry.evidence.has(slot.id.operator, slot.home.name):
        raise StateMissing(
            "the partition was here before, and its copy is quarantined",
            remedy="restore it from a checkpoint; to start empty, remove the quarantined copy first",
            partition=slot.id,
            replica=registry.info.name,
        )
    if slot.lifecycle.state is not State.ABSENT or slot.lifecycle.epoch >= epoch:
        raise AlreadyDeployed(
            "the partition already exists on this replica",
            remedy="use another operator name or data directory",
            partition=slot.id,
            epoch=slot.lifecycle.epoch,
        )
    slot.directory = slot.home / f"created-{epoch}"
    slot.directory.mkdir(parents=True, exist_ok=True)
    (slot.directory / UNFINISHED).write_bytes(b"")  # marks a creation that was cut short, to be repeated …
    registry.environment.sync([slot.directory])  # … and must survive a power loss
    slot.store = registry.environment.open(slot.directory, create=True)
    registry.environment.sync([slot.home, slot.home.parent])
    ownership = layout.Ownership(registry.info.name, State.OWNED, epoch)
    slot.store.apply(Mutations(puts=[(layout.OWNERSHIP, ownership.encode())]), sync=True)
    (slot.directory / UNFINISHED).unlink()
    registry.environment.sync([slot.directory])
    slot.lost = None  # the former, quarantined copy has nothing to do with the new one
    slot.lifecycle.create(epoch)
