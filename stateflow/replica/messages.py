"""What only a replica says, as protobuf has it."""

from __future__ import annotations

from stateflow.replica.progress import Progress
from stateflow.rpc import replica_pb2 as rpb
from stateflow.rpc.wire import fault_of


def progress_to_pb(progress: Progress) -> rpb.MoveProgress:
    return rpb.MoveProgress(
        phase=progress.phase.value,
        bytes_warm=progress.bytes_warm,
        bytes_reused=progress.bytes_reused,
        bytes_delta=progress.bytes_delta,
        bytes_stored=progress.bytes_stored,
        base_bytes=progress.base_bytes,
        rounds=progress.rounds,
        lag_bytes=progress.lag_bytes,
        change_rate=progress.change_rate,
        bandwidth=progress.bandwidth,
        rtt_ms=progress.rtt_ms,
        stall_ms=progress.stall_ms,
        sync_ms=progress.sync_ms,
        waited_s=progress.waited_s,
        sequence=progress.sequence,
        epoch=progress.epoch,
        digest=progress.digest,
        fault=None if progress.fault is None else fault_of(progress.fault),
    )
