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
    return NotOwner("the partition has left this replica", remedy="refresh the assignment", partition=partition)


def unconfirmed(partition: PartitionId, sequence: int, waited_s: float) -> StandbyMissing:
    return StandbyMissing(
        f"no standby confirmed the batch within {waited_s:g} s",
        remedy="check that the operator's standbys run; the request is retried",
        partition=partition,
        sequence=sequence,
    )


def moved(owner: ReplicaInfo, epoch: int) -> Moved:
    return Moved(
        "the partition moved to another replica",
        remedy="resend to its owner",
        owner=owner.name,
        site=owner.site,
        address=owner.address,
        epoch=epoch,
    )


def late(partition: PartitionId) -> NotOwner:
    """Makes the answer for rows that arrived ahead of their partition, where the partition did not follow in time."""
    return NotOwner("the partition did not arrive in time", remedy="refresh the assignment", partition=partition)


def held_up(partition: PartitionId) -> Unavailable:
    return Unavailable(
        "the batch did not finish on this replica",
        remedy="check the replica's log and disk; a retry shows whether the batch was applied",
        partition=partition,
    )
