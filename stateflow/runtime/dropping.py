"""Deleting what is here of an operator that was undeployed."""

from __future__ import annotations

import contextlib
import logging

from stateflow.runtime.lifecycle import State
from stateflow.runtime.registry import PartitionRegistry
from stateflow.runtime.slot import Slot
from stateflow.types import PartitionId

log = logging.getLogger(__name__)


def drop(registry: PartitionRegistry, operator: str, epoch: int) -> int:
    """Delete the operator's partitions here at ``epoch`` and at older ones, in whatever form they are, and its
    description when nothing of it is left. Returns how many there were.

    Cut short, it is done again: what is still here is named at the next registration, and deleted then. What was put
    aside as evidence stays, under another name.
    """
    registry.undeployed(operator, epoch)
    slots = [slot for slot in registry.slots() if slot.id.operator == operator]
    _leave_evidence(registry, operator, epoch)
    dropped = [slot.id for slot in slots if _drop_slot(registry, slot, epoch)]
    registry.commits.forget(dropped)  # nothing is created at these epochs before the next start, which logs anew
    registry.unlearn(operator)
    if dropped:
        log.warning("%s was undeployed: %d partitions are deleted", operator, len(dropped))
    return len(dropped)


def _leave_evidence(registry: PartitionRegistry, operator: str, epoch: int) -> None:
    """What was put aside of a later deployment is in the way of its being created empty, and stays so."""
    for number in registry.evidence.partitions(operator):
        slot = registry.slot(PartitionId(operator, number))
        with slot.mutex:
            if slot.lifecycle.epoch <= epoch:
                registry.evidence.undeployed(epoch, operator, slot.home.name)


def _drop_slot(registry: PartitionRegistry, slot: Slot, epoch: int) -> bool:
    """A batch in hand is finished first; nobody is told of it any more."""
    with slot.work, slot.mutex:
        if slot.lifecycle.epoch <= epoch:
            slot.lost = None  # what is deployed later is another one
        if slot.lifecycle.state is State.ABSENT or not slot.lifecycle.drop(epoch):
            return False
        host, slot.host = slot.host, None
        store, slot.store = slot.store, None
        incoming, slot.incoming = slot.incoming, None
        slot.directory = slot.kept = slot.since = slot.schema = None
        if host is not None:
            host.let_go(registry.environment.aside)
        if store is not None:
            with contextlib.suppress(Exception):  # what could be written is of no use
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
