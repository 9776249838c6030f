"""The snapshot that the page draws, made from a cluster's reports.

Snapshots are plain data, and grow by a few bytes with each replica and partition. Long lists are cut; most come with
their full length.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from stateflow.dashboard.rates import Latency, Point, Rates
from stateflow.errors import StateflowError
from stateflow.reports import (
    AutopilotReport,
    ClusterStatus,
    JobReport,
    MoveReport,
    OperatorStatus,
    Placement,
    Reconfiguration,
    ReplicaStatus,
    StandbyReport,
)
from stateflow.types import node_of

#: limits of the lists that are sent
MOVES_MAX, ENDED_MAX, RECONFIGURATIONS_MAX, MARKS_MAX, HOT_MAX, PLANNED_MAX = 200, 40, 30, 200, 5, 200
COPIES_MAX = 4096
#: a partition with a lower rate is not shown as hot
HOT_MIN_PER_S = 0.5


@dataclass(frozen=True, slots=True)
class Seen:
    """The answers of a cluster.

    ``history``: reconfigurations, newest first. ``batches``: as the ledger's board has them; None: no ledger is
    configured. ``jobs``, ``orders``: None: this process may not ask for them.
    """

    status: ClusterStatus
    history: Sequence[Reconfiguration] = ()
    jobs: Sequence[JobReport] | None = ()
    batches: Sequence[Mapping[str, Any]] | None = None
    orders: AutopilotReport | None = None


def error_view(error: StateflowError) -> dict[str, Any]:
    """Returns an error's code, what happened, where, what to do next, and all that as one ``line``."""
    wire = error.to_wire()
    wire["where"].pop("traceback", None)
    return {**wire, "line": str(error)}


def snapshot(seen: Seen, rates: Rates, now_s: float) -> dict[str, Any]:
    """Returns all that the page shows, except its time lines.

    Args:
        now_s: time of the clock that ``rates`` uses.
    """
    status = seen.status
    number_of = {replica.name: number for number, replica in enumerate(status.replicas)}
    replicas = _replicas(status, rates, now_s)
    latencies = rates.latencies(now_s)
    standbys: dict[str, list[StandbyReport]] = defaultdict(list)
    for copy in status.standbys:
        standbys[copy.operator].append(copy)
    operators = [
        _operator(each, standbys[each.name], number_of, rates, latencies[each.name]) for each in status.operators
    ]
    reconfigurations = _together(seen)
    under_way = [(each, move) for each in reconfigurations for move in each.moves if move.stands == "in_progress"]
    ended = sorted(
        ((each, move) for each in reconfigurations for move in each.moves if _has_ended(move)),
        key=lambda pair: -(pair[1].started_us + pair[1].duration_s * 1e6),
    )
    alive = [each for each in status.replicas if each.alive is not False]
    speeds = [each["rows_per_s"] for each in replicas if each["rows_per_s"] is not None]
    return {
        "totals": {
            "sites": len({each.site for each in status.replicas}),
            "replicas": len(status.replicas),
            "alive": len(alive),
            "partitions": sum(each.partitions for each in status.operators),
            "unserved": sum(len(each.partitions) for one in status.operators for each in one.unserved),
            "rows_per_s": sum(speeds) if speeds else None,
            "p50_ms": latencies[""].p50_ms,
            "p99_ms": latencies[""].p99_ms,
            "moving": len(under_way),
            "waiting": sum(move.stands == "waiting" for each in reconfigurations for move in each.moves),
        },
        "follower": None if status.follower is None else asdict(status.follower),
        "sites": _sites(replicas),
        "replicas": replicas,
        "operators": operators,
        "moves": [_move(each, move) for each, move in under_way[:MOVES_MAX]],
        "ended": [_move(each, move) for each, move in ended[:ENDED_MAX]],
        "marks": marks(ended, rates.points[0].at_us if rates.points else 0),
        "reconfigurations": [_reconfiguration(each) for each in reconfigurations[:RECONFIGURATIONS_MAX]],
        "links": [asdict(each) for each in status.links],
        "deploying": [asdict(each) for each in status.deploying],
        "refused": [{"name": each.name, "address": each.address, "error": each.error} for each in status.refused],
        "damaged": [asdict(each) for each in status.damaged[:MOVES_MAX]],
        "jobs": None if seen.jobs is None else [_job(each) for each in seen.jobs],
        "batches": None if seen.batches is None else [_batch(each) for each in seen.batches],
        "autopilot": None if seen.orders is None else asdict(seen.orders),
    }


def _together(seen: Seen) -> list[Reconfiguration]:
    """Returns the reconfigurations under way, as the status has them, which is newer, and earlier ones."""
    found = {each.id: each for each in seen.history}
    found |= {each.id: each for each in seen.status.reconfigurations}
    return sorted(found.values(), key=lambda each: (each.over, -each.created_us))


def _has_ended(move: MoveReport) -> bool:
    return move.stands not in ("waiting", "in_progress")


def _replicas(status: ClusterStatus, rates: Rates, now_s: float) -> list[dict[str, Any]]:
    follows = Counter(each.replica for each in status.standbys)
    entries: dict[str, list[int | None]] = defaultdict(list)
    for operator in status.operators:
        for number, owner in enumerate(operator.owners):
            entries[owner].append(rates.entries_of((operator.name, number)))
    resting = {each.node: each.until_us for each in status.maintenance}
    return [
        {
            "name": each.name,
            "site": each.site,
            "address": each.address,
            "weight": each.weight,
            "state": _state_of(each),
            "heard_s": each.last_heartbeat_s,
            "partitions": each.partitions,
            "standbys": follows[each.name],
            "resting": node_of(each.name) in resting,
            "room_bytes": each.room_bytes,
            "version": each.version,
            "rows_per_s": rates.rows_per_s(each.name, now_s),
            "entries": _whole(entries[each.name]),
        }
        for each in status.replicas
    ]


def _state_of(replica: ReplicaStatus) -> str:
    """Returns alive, opening, stopped or silent; or unknown, if a follower reports the replica."""
    if replica.stopped:
        return "stopped"
    if replica.alive is None:
        return "unknown"
    if not replica.alive:
        return "silent"
    return "opening" if replica.opening else "alive"


def _sites(replicas: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    by_site: dict[str, list[Mapping[str, Any]]] = defaultdict(list)
    for each in replicas:
        by_site[each["site"]].append(each)
    return [
        {
            "name": site,
            "replicas": len(here),
            "alive": sum(each["state"] in ("alive", "unknown") for each in here),
            "partitions": sum(each["partitions"] for each in here),
            "standbys": sum(each["standbys"] for each in here),
            "rows_per_s": _sum(each["rows_per_s"] for each in here),
        }
        for site, here in sorted(by_site.items())
    ]


def _sum(values: Iterable[float | None]) -> float | None:
    """Returns the sum of the known values; None if there are none."""
    known = [value for value in values if value is not None]
    return sum(known) if known else None


def _whole(values: Sequence[int | None]) -> int | None:
    """Returns the sum; None if a value is not known."""
    known = [value for value in values if value is not None]
    return sum(known) if len(known) == len(values) else None


def _operator(
    operator: OperatorStatus,
    standbys: Sequence[StandbyReport],
    number_of: Mapping[str, int],
    rates: Rates,
    latency: Latency,
) -> dict[str, Any]:
    """Returns the view of an operator.

    ``owners``: by partition, index of its replica in ``replicas``; -1: the replica is not among them. ``stored``: by
    partition, the estimated number of entries; None: not known.
    """
    name = operator.name
    stored = [rates.entries_of((name, number)) for number in range(operator.partitions)]
    own = rates.partition_rates(name, operator.owners)
    hot = sorted((number for number in own if own[number] >= HOT_MIN_PER_S), key=lambda each: -own[each])[:HOT_MAX]
    return {
        "name": name,
        "target": operator.target,
        "partitions": operator.partitions,
        "owners": [number_of.get(owner, -1) for owner in operator.owners],
        "unserved": [{"partitions": list(each.partitions), "error": each.error} for each in operator.unserved],
        "rows_per_s": sum(own.values()) if own else None,
        "bytes": _sum(rates.bytes_of((name, number)) for number in range(operator.partitions)),
        "entries": _whole(stored),
        "stored": stored,
        "p50_ms": latency.p50_ms,
        "p99_ms": latency.p99_ms,
        "hot": [{"partition": each, "rows_per_s": own[each], "owner": operator.owners[each]} for each in hot],
        "slow": [asdict(each) for each in rates.slow(name)],
        "copies": _copies(standbys, number_of),
        "standbys": len(standbys),
        "standbys_behind": sum(each.phase != "CATCHING_UP" for each in standbys),
        "standby_lag_bytes": max((each.lag_bytes for each in standbys), default=0),
    }


def _copies(standbys: Sequence[StandbyReport], number_of: Mapping[str, int]) -> list[tuple[int, int, bool]]:
    """Returns (partition, index of the replica, whether it may take over)."""
    return [
        (each.partition, number_of.get(each.replica, -1), each.phase == "CATCHING_UP") for each in standbys[:COPIES_MAX]
    ]


def _move(of: Reconfiguration, move: MoveReport) -> dict[str, Any]:
    """Returns the view of a move. ``progress``: of the copy, from 0 to 1; None: its size is not known yet."""
    sent = move.bytes_warm + move.bytes_delta
    done = move.bytes_warm + move.bytes_reused
    return {
        "id": move.id,
        "operator": of.operator,
        "partition": move.partition,
        "source": move.source,
        "target": move.target,
        "state": move.state,
        "stands": move.stands,
        "bytes_sent": sent,
        "bytes_reused": move.bytes_reused,
        "progress": min(1.0, done / move.base_bytes) if move.base_bytes else None,
        "predicted_pause_ms": move.predicted_pause_ms,
        "pause_ms": move.pause_ms,
        "duration_s": move.duration_s,
        "started_us": move.started_us,
        "error": move.error,
    }


def marks(ended: Iterable[tuple[Reconfiguration, MoveReport]], since_us: int) -> list[dict[str, Any]]:
    """Returns the completed moves for the time lines, oldest first; those of one second and operator are one mark."""
    found: dict[tuple[int, str], list[MoveReport]] = defaultdict(list)
    for of, move in ended:
        at_us = move.fenced_us or move.started_us
        if move.state == "COMPLETED" and at_us >= since_us:
            found[at_us // 1_000_000, of.operator].append(move)
    newest = sorted(found.items())[-MARKS_MAX:]
    return [
        {
            "at_us": max(move.fenced_us or move.started_us for move in moves),
            "moves": len(moves),
            "pause_ms": max(move.pause_ms for move in moves),
        }
        for _, moves in newest
    ]


def _reconfiguration(report: Reconfiguration) -> dict[str, Any]:
    done = [move for move in report.moves if move.state == "COMPLETED"]
    left = None if report.over else report.remaining()
    return {
        "id": report.id,
        "kind": report.kind,
        "operator": report.operator,
        "state": report.state,
        "by": report.by,
        "created_us": report.created_us,
        "moves": len(report.moves),
        **report.counts(),
        "bytes_sent": sum(move.bytes_warm + move.bytes_delta for move in report.moves),
        "pause_ms": max((move.pause_ms for move in done), default=None),
        "remaining_s": None if left is None or not math.isfinite(left.s) else left.s,
    }


def _job(job: JobReport) -> dict[str, Any]:
    """Returns the view of a job. ``runs``: only its last run, if there is one."""
    return {
        "name": job.name,
        "schedule": job.schedule,
        "do": job.do,
        "operator": job.operator,
        "paused": job.paused,
        "next_us": job.next_us,
        "runs": [{"state": run.state, "note": run.note} for run in job.runs[-1:]],
    }


def _batch(batch: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a batch as the board has it, without the fields about its runner."""
    names = ("bid", "name", "status", "created_us", "total_entities", "succeeded", "failed", "cancelled", "pace", "eta")
    return {name: batch.get(name) for name in names}


def lines(points: Iterable[Point]) -> dict[str, list[Any]]:
    """Returns the time lines by column, as they are drawn; ``at``: seconds since 1970."""
    rows = [(round(p.at_us / 1e6, 3), p.rows_per_s, p.p50_ms, p.p99_ms) for p in points]
    columns: list[list[Any]] = [list(column) for column in zip(*rows, strict=True)] or [[], [], [], []]
    return dict(zip(("at", "rows_per_s", "p50_ms", "p99_ms"), columns, strict=True))


def plan_view(placement: Placement) -> dict[str, Any]:
    """Returns what would move, and its cost, for confirmation."""
    return {
        "count": len(placement.moves),
        "bytes": sum(move.bytes for move in placement.moves),
        "pause_ms": _finite(placement.pause_ms),
        "pause_ms_at_most": _finite(placement.pause_ms_at_most),
        "moves": [asdict(move) for move in placement.moves[:PLANNED_MAX]],
        "left": [asdict(each) for each in placement.left],
        "lacking": [asdict(each) for each in placement.lacking],
        "silent": list(placement.silent),
    }


def _finite(value: float) -> float | None:
    """Returns the value, or None if it is infinite, which JSON cannot express."""
    return value if math.isfinite(value) else None
