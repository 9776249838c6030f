"""What only a replica says, as protobuf has it."""

from __future__ import annotations

from collections.abc import Iterator

from stateflow.rpc import replica_pb2 as rpb
from stateflow.rpc.wire import pieces, seal_to_pb
from stateflow.runtime.lifecycle import Lifecycle
from stateflow.runtime.replica import ReplicaNode
from stateflow.runtime.transfer import Reading

# -- change sets --------------------------------------------------------------------------------------------


def frames_of(reading: Reading, bytes_max: int) -> Iterator[rpb.ChangeFrame]:
    """As few messages as the limit allows: what gathered while the base crossed is applied at once, and not one change
    set after another while the partition stands still. One that goes on in the next frame ends a frame. The last frame
    says how far it is."""
    frame, size = rpb.ChangeFrame(), 0
    for change_set in reading.change_sets:
        for piece, last in pieces(change_set, bytes_max):
            if size and size + len(piece) > bytes_max:
                yield frame
                frame, size = rpb.ChangeFrame(), 0
            frame.change_sets.append(piece)
            size += len(piece)
            if not last:
                frame.continues = True
                yield frame
                frame, size = rpb.ChangeFrame(), 0
    frame.head_sequence, frame.lag_bytes, frame.chain = reading.head_sequence, reading.lag_bytes, reading.chain
    if reading.seal is not None:
        frame.seal.CopyFrom(seal_to_pb(reading.seal))
    yield frame


# -- partitions -------------------------------------------------------------------------------------------


def view_of(node: ReplicaNode, lifecycle: Lifecycle, sequence: int, *, size: bool = False) -> rpb.PartitionView:
    return rpb.PartitionView(
        operator=lifecycle.partition.operator,
        partition=lifecycle.partition.partition,
        state=lifecycle.state,
        epoch=lifecycle.epoch,
        sequence=sequence,
        move_id=lifecycle.move_id,
        batch_rate=node.batch_rate(lifecycle.partition),
        bytes=node.bytes_on_disk(lifecycle.partition) if size else 0,
    )


def views_of(node: ReplicaNode, *, sizes: bool = False) -> list[rpb.PartitionView]:
    return [view_of(node, lifecycle, sequence, size=sizes) for lifecycle, sequence in node.inventory()]
