"""Reconfigurations that are over, as the ledger's records tell of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from reconfig.work import Change
from stateflow.errors import from_wire
from stateflow.ledger import Record
from stateflow.rpc import controller_pb2 as cpb
from stateflow.rpc.wire import fault_of


def past(moves: Sequence[tuple[Change, Record]]) -> cpb.Reconfiguration:
    """Args: moves: of one reconfiguration, and how each ended; the newest last."""
    planned, _ = moves[-1]
    return cpb.Reconfiguration(
        id=planned.reconfiguration,
        operator=planned.partition.operator,
        state="FAILED" if any("error" in record.payload for _, record in moves) else "COMPLETED",
        max_pause_ms=planned.max_pause_ms,
        created_us=min(record.timestamp_us for _, record in moves),
        kind=planned.cause,
        strategy=planned.strategy,
        moves=[_move_of(planned, record.payload) for planned, record in reversed(moves)],
    )


def _move_of(planned: Change, payload: Mapping[str, object]) -> cpb.Move:
    """A move as its last record tells of it."""
    move = cpb.Move(
        id=planned.move_id,
        partition=planned.partition.partition,
        source=planned.source,
        target=planned.target,
        phase="ABORTED" if "error" in payload else "COMPLETED",
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
    else:
        move.epoch = planned.granted_epoch
    return move
