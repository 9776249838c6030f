"""Deleting an undeployed operator's partitions from this replica."""

from __future__ import annotations

import contextlib
import logging

from stateflow.runtime.lifecycle import State
from stateflow.runtime.registry import PartitionRegistry
from stateflow.runtime.slot import Slot
from stateflow.types import PartitionId

log = logging.getLogger(__name__)


def drop(registry: PartitionRegistry, operator: str, epoch: int) -> int:
    """Deletes the operator's partitions here at ``epoch`` and older epochs, in any state, and the operator's
    description when no partition is left. Returns the number of deleted partitions.

    Repeated after a crash: the replica names the remaining partitions at its next registration, and deletes them then.
    Quarantined copies stay, under another name.
    """
    registry.undeployed(operator, epoch)
    slots = [slot for slot in registry.slots() if slot.id.operator == operator]
    _leave_evidence(registry, operator, epoch)
    dropped = [slot.id for slot in slots if _drop_slot(registry, slot, epoch)]
    # no partition is created at these epochs before the next start, which begins a new log
    registry.commits.forget(dropped)
    registry.unlearn(operator)
    if dropped:
        log.warning("%s undeployed: %d partitions deleted", operator, len(dropped))
    return len(dropped)


def _leave_evidence(registry: PartitionRegistry, operator: str, epoch: int) -> None:
    """Renames the quarantined copies of the dropped deployment. Copies of a later deployment keep their name, and
    keep preventing that its partition is created empty."""
    for number in registry.evidence.partitions(operator):
        slot = registry.slot(PartitionId(operator, number))
        with slot.mutex:
            if slot.lifecycle.epoch <= epoch:
                registry.evidence.undeployed(epoch, operator, slot.home.name)


def _drop_slot(registry: PartitionRegistry, slot: Slot, epoch: int) -> bool:
    """Deletes one partition, after its running batch, whose result is reported to no one. Returns whether there was
    anything to delete."""
    with slot.work, slot.mutex:
        if slot.lifecycle.epoch <= epoch:
            slot.lost = None  # a later deployment has nothing to do with the lost copy
        if slot.lifecycle.state is State.ABSENT or not slot.lifecycle.drop(epoch):
            return False
        host, slot.host = slot.host, None
        store, slot.store = slot.store, None
        incoming, slot.incoming = slot.incoming, None
        slot.directory = slot.kept = slot.since = slot.schema = None
        if host is not None:
            host.let_go(registry.environment.aside)
        if store is not None:
            with contextlib.suppress(Exception):  # the database is deleted next, so a failed write does not matter
                store.close()
        if incoming is not None:
            registry.discard(incoming)
        for move_id in list(slot.logs):
            registry.drop_log(slot, move_id)
        for copy in [path for path in slot.home.glob("*") if path.is_dir()]:
            registry.remove(copy)
        registry.environment.remove_tree(slot.home)
    registry.on_change(slot.id)
    return True
