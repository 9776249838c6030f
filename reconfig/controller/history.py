"""Reconfigurations that are over, as the ledger's records tell of them."""

from __future__ import annotations

from collections.abc import Mapping

from reconfig.controller.cluster_state import Recorded
from reconfig.work import Change
from stateflow.errors import from_wire
from stateflow.ledger import Record, RecordState
from stateflow.rpc import controller_pb2 as cpb
from stateflow.rpc.wire import fault_of

PHASES = {RecordState.PROCESSED: "COMPLETED", RecordState.FAILED: "ABORTED"}
ENDED = PHASES.keys()


def past(recorded: Recorded) -> cpb.Reconfiguration:
    planned, _ = next(iter(recorded.moves.values()))
    return cpb.Reconfiguration(
        id=planned.reconfiguration,
        operator=planned.partition.operator,
        state=recorded.state,
        max_pause_ms=planned.max_pause_ms,
        created_us=recorded.created_us,
        kind=planned.cause,
        strategy=planned.strategy,
        moves=[move_of(planned, record) for planned, record in recorded.moves.values()],
    )


def move_of(planned: Change, record: Record) -> cpb.Move:
    """A move as its last record tells of it."""
    payload: Mapping[str, object] = record.payload if record.state in ENDED else {}
    move = cpb.Move(
        id=planned.move_id,
        partition=planned.partition.partition,
        source=planned.source,
        target=planned.target,
        phase=PHASES.get(record.state, "WAITING"),
        strategy=planned.strategy,
    )
    report = payload.get("report")
    if isinstance(report, dict):
        for name in (
            "bytes_warm",
            "bytes_reused",
            "bytes_delta",
            "rounds",
            "predicted_pause_ms",
            "pause_ms",
            "duration_s",
            "digest",
            "note",
        ):
            if report.get(name) is not None:  # no bound was known
                setattr(move, name, report[name])
    error = payload.get("error")
    if isinstance(error, dict):
        move.fault.CopyFrom(fault_of(from_wire(error)))
    elif record.state is RecordState.PROCESSED:
        move.epoch = planned.granted_epoch
    return move
