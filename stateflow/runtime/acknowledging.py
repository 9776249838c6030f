"""Answers to the sender of a batch, apart from the result of applying it. Sans-io."""

from __future__ import annotations

from stateflow.errors import Moved, NotOwner, StandbyMissing, Unavailable
from stateflow.runtime.lifecycle import SERVED, Lifecycle, State
from stateflow.types import PartitionId, ReplicaInfo


def acknowledgement(sequence: int, confirmed: bool, lifecycle: Lifecycle) -> int | ReplicaInfo | NotOwner | None:
    """Returns the answer to a commit that a standby must confirm: its ``sequence`` once confirmed, the new owner, or
    NotOwner. None: not known yet, to be asked again after a change.

    A later attempt finds the batch applied, whichever replica it is sent to.

    Args:
        confirmed: whether a standby durably has everything up to ``sequence``.
        lifecycle: current lifecycle of the partition.
    """
    if confirmed:
        return sequence
    if lifecycle.state is State.SEALED and lifecycle.successor is not None:
        return lifecycle.successor  # it has the batch, and standbys of its own: the sender asks it again
    if lifecycle.state not in SERVED:
        return left(lifecycle.partition)
    return None


def left(partition: PartitionId) -> NotOwner:
    return NotOwner("the partition has left this replica", remedy="refresh", partition=partition)


def unconfirmed(partition: PartitionId, sequence: int, waited_s: float) -> StandbyMissing:
    return StandbyMissing(
        f"no standby confirmed it within {waited_s:g} s",
        remedy="see that the operator has standbys and that they run; it is asked for again",
        partition=partition,
        sequence=sequence,
    )


def moved(owner: ReplicaInfo, epoch: int) -> Moved:
    return Moved(
        "the partition went to another replica",
        remedy="send it there",
        owner=owner.name,
        site=owner.site,
        address=owner.address,
        epoch=epoch,
    )


def late(partition: PartitionId) -> NotOwner:
    """Makes the answer for rows that arrived ahead of their partition, where the partition did not follow in time."""
    return NotOwner("the partition did not arrive in time", remedy="refresh", partition=partition)


def held_up(partition: PartitionId) -> Unavailable:
    return Unavailable(
        "the partition is held up here",
        remedy="see the replica's log and its disk; whether the batch was applied shows when it is sent again",
        partition=partition,
    )
