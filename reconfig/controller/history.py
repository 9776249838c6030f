"""Reconfigurations that are over, as the ledger's records tell of them."""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence

from reconfig.controller.book import PlannedMove
from stateflow.errors import from_wire
from stateflow.ledger import Record
from stateflow.rpc import controller_pb2 as cpb
from stateflow.rpc.wire import fault_of


def past(
    finished: Sequence[tuple[PlannedMove, Record]], without: Container[str], limit: int = 0
) -> list[cpb.Reconfiguration]:
    """Newest first, at most ``limit``, 0 for all; those named in ``without`` are told by others."""
    found: dict[str, cpb.Reconfiguration] = {}
    for planned, record in reversed(finished):
        if planned.reconfiguration in without or planned.strategy == "standby":
            continue
        message = found.get(planned.reconfiguration)
        if message is None:
            if limit and len(found) >= limit:
                break
            message = found[planned.reconfiguration] = cpb.Reconfiguration(
                id=planned.reconfiguration,
                operator=planned.partition.operator,
                state="COMPLETED",
                max_pause_ms=planned.max_pause_ms,
                kind=planned.kind,
                strategy=planned.strategy,
            )
        message.moves.append(_move_of(planned, record.payload))
        message.created_us = record.timestamp_us
        if "error" in record.payload:
            message.state = "FAILED"
    return list(found.values())


def _move_of(planned: PlannedMove, payload: Mapping[str, object]) -> cpb.Move:
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
