"""Making the first, empty copies of an operator's partitions."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterable

from stateflow.changes import Mutations
from stateflow.errors import AlreadyDeployed, DecodeError, EncodeError, OperatorFailed, SchemaMismatch, StateMissing
from stateflow.runtime import layout
from stateflow.runtime.evolving import is_to_be_tried, try_out
from stateflow.runtime.lifecycle import State
from stateflow.runtime.operator import Operator
from stateflow.runtime.registry import UNFINISHED, PartitionRegistry
from stateflow.runtime.slot import Slot
from stateflow.state import DeployedStates
from stateflow.types import OperatorSpec, PartitionId

#: of a replica, whose states are tried before another version serves
TRIED_PARTITIONS = 4


def check(registry: PartitionRegistry, spec: OperatorSpec, total: int) -> None:
    """Could this version of an operator, and so many of its partitions, be here? Nothing is changed. Raises
    OperatorNotImportable, OperatorOutdated, TooFewFiles, SchemaMismatch, and what :func:`~stateflow.runtime.evolving
    .try_out` raises of state that is here."""
    cls = registry.check(spec)
    registry.expect(max(0, total - len(_here(registry, spec.name))))
    _try_out(registry, spec, cls)


def _try_out(registry: PartitionRegistry, spec: OperatorSpec, cls: type[Operator]) -> None:
    """On a copy of some partitions as they are now, those first that are at work: what fails there would fail every
    batch and every read later."""
    deployed = DeployedStates.of(spec.state_schema, spec.dropped)
    concerned = []
    for slot in registry.slots():
        stored = registry.stored_schema(slot) if slot.id.operator == spec.name else None
        if stored is not None and is_to_be_tried(spec.name, cls, stored, deployed):
            concerned.append(slot)
    concerned.sort(key=lambda slot: (slot.store is None, slot.id.partition))
    for slot in concerned[:TRIED_PARTITIONS]:
        directory = registry.snapshots / f"tried-{uuid.uuid4().hex}"
        try:
            registry.store(slot)  # it is opened where it was not
            with slot.mutex:
                if slot.lifecycle.state is not State.OWNED or slot.store is None:
                    continue
                slot.store.snapshot(directory)
            copy = registry.environment.open_read_only(directory)
            try:
                try_out(cls, slot.id, copy, deployed, registry.clock.now_us())
            finally:
                copy.close()
        except (OperatorFailed, SchemaMismatch, DecodeError, EncodeError) as error:
            error.located(operator=spec.name, partition=slot.id.partition, replica=registry.info.name)
            raise
        finally:
            registry.environment.remove_tree(directory)


def _here(registry: PartitionRegistry, operator: str) -> set[int]:
    """Partitions that have a database here."""
    return {slot.id.partition for slot in registry.slots() if slot.id.operator == operator and slot.directory}


def create(
    registry: PartitionRegistry,
    spec: OperatorSpec,
    partitions: Iterable[int],
    epoch: int,
    total: int = 0,
    check_asked: Callable[[], None] = lambda: None,
) -> None:
    """Empty partitions owned from ``epoch`` on. Those that are there already at this epoch stay as they are.

    Args:
        total: so many partitions of the operator are to be here in the end.
        check_asked: raises where what asked for it is void by now.

    Raises TooFewFiles, before anything is created; StaleEpoch, and what ``check_asked`` raises, where the deployment
    may have been taken back meanwhile.
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
    """Called with ``work`` and ``mutex`` held."""
    registry.check_deployed(slot.id, epoch)
    if slot.lifecycle.state is State.ABSENT and registry.evidence.has(slot.id.operator, slot.home.name):
        raise StateMissing(
            "the partition was here, and what is left of it was put aside",
            remedy="restore it from a checkpoint; to begin empty, remove the evidence first",
            partition=slot.id,
            replica=registry.info.name,
        )
    if slot.lifecycle.state is not State.ABSENT or slot.lifecycle.epoch >= epoch:
        raise AlreadyDeployed(
            "the partition is here already",
            remedy="use another operator name or data directory",
            partition=slot.id,
            epoch=slot.lifecycle.epoch,
        )
    slot.directory = slot.home / f"created-{epoch}"
    slot.directory.mkdir(parents=True, exist_ok=True)
    (slot.directory / UNFINISHED).write_bytes(b"")  # cut short, it is created again …
    registry.environment.sync([slot.directory])  # … which a loss of power may not make it forget
    slot.store = registry.environment.open(slot.directory, create=True)
    registry.environment.sync([slot.home, slot.home.parent])
    ownership = layout.Ownership(registry.info.name, State.OWNED, epoch)
    slot.store.apply(Mutations(puts=[(layout.OWNERSHIP, ownership.encode())]), sync=True)
    (slot.directory / UNFINISHED).unlink()
    registry.environment.sync([slot.directory])
    slot.lost = None  # what was, and is put aside, is no part of it
    slot.lifecycle.create(epoch)
