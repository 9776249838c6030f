"""Makes the snapshot that the page draws from a cluster's reports.

:class:`Rates` computes rows a second and durations of requests. It compares the counts in each report of a replica with
those in earlier reports. :func:`snapshot` returns plain data, a few bytes for each replica and partition. Long lists
are truncated; for most of them, the snapshot has the number of all items.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict, deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from stateflow.errors import StateflowError
from stateflow.partition.lifecycle import SERVED
from stateflow.reports import (
    AutopilotReport,
    JobReport,
    MoveReport,
    Placement,
    Reconfiguration,
    ReplicaStatistics,
    RequestReport,
)
from stateflow.status import ClusterStatus, OperatorStatus, ReplicaStatus, StandbyReport
from stateflow.types import node_of

# -- Rates -----------------------------------------------------------------------------------------------------------

#: number of past seconds that rates and latencies cover: micro-batches arrive in bursts, and a single second has too
#: few requests for a 99th percentile
WINDOW_S = 5.0
#: seconds without a report after which a replica has no rate
STALE_S = 30.0
#: seconds for which slow requests are shown, and maximum number of them for an operator
SLOW_S, SLOW_KEPT = 300.0, 5
#: points of the time lines: half an hour of seconds
POINTS = 1800
#: requests kept for latencies, of all replicas together
REQUESTS_KEPT = 50_000
Partition = tuple[str, int]


def percentile(values: Sequence[float], share: float) -> float | None:
    """Returns a percentile by nearest rank, which is one of the values; None without values.

    Args:
        values: values in ascending order.
        share: rank as a fraction, such as 0.99.
    """
    return values[max(0, math.ceil(share * len(values)) - 1)] if values else None


@dataclass(frozen=True, slots=True)
class Latency:
    """The latency of ``count`` requests, from the first message to the last output of each.

    The percentiles are None if there were no requests.
    """

    p50_ms: float | None
    p99_ms: float | None
    count: int


NONE = Latency(None, None, 0)


def _latency(took: list[float]) -> Latency:
    took.sort()
    return Latency(percentile(took, 0.5), percentile(took, 0.99), len(took))


@dataclass(frozen=True, slots=True)
class Point:
    """A point of the time lines. ``rows_per_s`` is None until a replica has reported twice."""

    at_us: int
    rows_per_s: float | None
    p50_ms: float | None
    p99_ms: float | None


@dataclass(frozen=True, slots=True)
class Slow:
    """A slow request, and the replica that served it."""

    replica: str
    rows: int
    total_ms: float


@dataclass(frozen=True, slots=True)
class _Count:
    """Rows that a replica has received since its first report, in total and by partition.

    The counts continue when the replica restarts.
    """

    at_s: float
    rows: int
    partitions: dict[Partition, int]


@dataclass(slots=True)
class _Counted:
    """A replica's last report, and the counts of its reports of about the last ``WINDOW_S`` seconds, oldest first."""

    rows: int
    partitions: dict[Partition, int]
    last_request: int
    counts: deque[_Count]

    @property
    def at_s(self) -> float:
        return self.counts[-1].at_s

    @property
    def rows_per_s(self) -> float | None:
        """Rows a second; None: the replica has reported only once."""
        first, last = self.counts[0], self.counts[-1]
        return None if last.at_s <= first.at_s else (last.rows - first.rows) / (last.at_s - first.at_s)

    def partition_per_s(self, partition: Partition) -> float:
        first, last = self.counts[0], self.counts[-1]
        if last.at_s <= first.at_s or partition not in first.partitions:
            return 0.0
        return (last.partitions[partition] - first.partitions[partition]) / (last.at_s - first.at_s)


def _grown(before: int, now: int) -> int:
    """Returns by how much a count has grown. A count that fell belongs to a restarted process, which counts from 0."""
    return now - before if now >= before else now


class Rates:
    """Computes rates from the reports of replicas. Times in seconds are those of a monotonic clock."""

    def __init__(self) -> None:
        self._counted: dict[str, _Counted] = {}
        self._bytes: dict[Partition, int] = {}
        self._entries: dict[Partition, int | None] = {}
        self._requests: deque[tuple[float, RequestReport]] = deque(maxlen=REQUESTS_KEPT)
        self._slow: dict[str, list[tuple[float, Slow]]] = {}
        self.points: deque[Point] = deque(maxlen=POINTS)

    def after(self, replica: str) -> int:
        """Returns the number of the newest request that the replica has reported; 0: it has reported none."""
        counted = self._counted.get(replica)
        return 0 if counted is None else counted.last_request

    def add(self, replica: str, at_s: float, said: ReplicaStatistics, *, sizes: bool = False) -> None:
        """Adds a replica's report.

        Args:
            sizes: the report contains sizes and numbers of entries.
        """
        before = self._counted.get(replica)
        numbers = [request.number for request in said.requests]
        last = max(numbers, default=0 if before is None or said.rows < before.rows else before.last_request)
        here = {(each.operator, each.partition): each.rows for each in said.partitions}
        if before is None:
            counts = deque([_Count(at_s, 0, dict.fromkeys(here, 0))])
        else:
            counts, newest = before.counts, before.counts[-1]
            grown = {
                each: newest.partitions.get(each, 0) + _grown(before.partitions.get(each, rows), rows)
                for each, rows in here.items()
            }
            counts.append(_Count(at_s, newest.rows + _grown(before.rows, said.rows), grown))
            while len(counts) > 2 and counts[1].at_s <= at_s - WINDOW_S:
                counts.popleft()
        self._counted[replica] = _Counted(said.rows, here, last, counts)
        if sizes:
            self._bytes |= {(each.operator, each.partition): each.bytes for each in said.partitions}
            self._entries |= {
                (each.operator, each.partition): each.entries for each in said.partitions if each.state in SERVED
            }
        if before is not None:  # work from before the first look does not count as a current rate
            for request in said.requests:
                self._requests.append((at_s, request))
                self._note(replica, at_s, request)

    def _note(self, replica: str, at_s: float, request: RequestReport) -> None:
        slow = self._slow.setdefault(request.operator, [])
        if len(slow) >= SLOW_KEPT and request.total_ms <= slow[-1][1].total_ms:
            return
        found = Slow(replica, request.rows, request.total_ms)
        slow.append((at_s, found))
        slow.sort(key=lambda each: -each[1].total_ms)
        del slow[SLOW_KEPT:]

    def keep(self, replicas: Collection[str], operators: Collection[str], now_s: float) -> None:
        """Forgets all replicas and operators except these, and values that are too old."""
        self._counted = {name: each for name, each in self._counted.items() if name in replicas}
        self._bytes = {each: size for each, size in self._bytes.items() if each[0] in operators}
        self._entries = {each: count for each, count in self._entries.items() if each[0] in operators}
        while self._requests and now_s - self._requests[0][0] > WINDOW_S:
            self._requests.popleft()
        self._slow = {
            name: [each for each in slow if now_s - each[0] <= SLOW_S]
            for name, slow in self._slow.items()
            if name in operators
        }

    def rows_per_s(self, replica: str, now_s: float) -> float | None:
        counted = self._counted.get(replica)
        return None if counted is None or now_s - counted.at_s > STALE_S else counted.rows_per_s

    def partition_rates(self, operator: str, owners: Sequence[str]) -> dict[int, float]:
        """Returns rows a second by partition, as counted by its owner.

        Args:
            owners: owner of each partition, in the order of their numbers.
        """
        found: dict[int, float] = {}
        for number, owner in enumerate(owners):
            counted = self._counted.get(owner)
            if counted is not None and (operator, number) in counted.partitions:
                found[number] = counted.partition_per_s((operator, number))
        return found

    def bytes_of(self, partition: Partition) -> int | None:
        return self._bytes.get(partition)

    def entries_of(self, partition: Partition) -> int | None:
        """Returns the owner's last estimate of the number of entries; None: there is no estimate yet."""
        return self._entries.get(partition)

    def latencies(self, now_s: float) -> defaultdict[str, Latency]:
        """Returns operator → latency in the last ``WINDOW_S`` seconds. The empty name stands for all operators."""
        took: defaultdict[str, list[float]] = defaultdict(list)
        for at_s, request in self._requests:
            if now_s - at_s <= WINDOW_S:
                took[request.operator].append(request.total_ms)
        took[""] = [ms for each in took.values() for ms in each]
        return defaultdict(lambda: NONE, {name: _latency(each) for name, each in took.items()})

    def slow(self, operator: str) -> list[Slow]:
        """Returns the slow requests of an operator, slowest first."""
        return [each for _, each in self._slow.get(operator, [])]

    def tick(self, at_us: int, now_s: float) -> Point:
        """Adds the current values as a point to the time lines, and returns it.

        Points that are not earlier are dropped: they were added before the clock was set back.
        """
        rates = [rate for name in self._counted if (rate := self.rows_per_s(name, now_s)) is not None]
        latency = self.latencies(now_s)[""]
        point = Point(at_us, sum(rates) if rates else None, latency.p50_ms, latency.p99_ms)
        while self.points and self.points[-1].at_us >= at_us:
            self.points.pop()
        self.points.append(point)
        return point


# -- Snapshot --------------------------------------------------------------------------------------------------------

#: limits of the lists in a snapshot
MOVES_MAX, ENDED_MAX, RECONFIGURATIONS_MAX, MARKS_MAX, HOT_MAX, PLANNED_MAX = 200, 40, 30, 200, 5, 200
COPIES_MAX = 4096
#: smallest rate of a partition that is shown as hot
HOT_MIN_PER_S = 0.5


@dataclass(frozen=True, slots=True)
class Seen:
    """The answers of a cluster from which a snapshot is made.

    Attributes:
        history: reconfigurations, newest first.
        jobs: jobs; None: not known.
        orders: the autopilot's settings; None: this process may not ask for them.
        batches: batches on the ledger's board; None: no ledger is configured.
    """

    status: ClusterStatus
    history: Sequence[Reconfiguration] = ()
    jobs: Sequence[JobReport] | None = ()
    batches: Sequence[Mapping[str, Any]] | None = None
    orders: AutopilotReport | None = None


def error_view(error: StateflowError) -> dict[str, Any]:
    """Returns the view of an error: its code, what happened, where, the remedy, and all this as one ``line``."""
    wire = error.to_wire()
    wire["where"].pop("traceback", None)
    return {**wire, "line": str(error)}


def snapshot(seen: Seen, rates: Rates, now_s: float) -> dict[str, Any]:
    """Returns all data that the page shows, except its time lines.

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
    """Returns the reconfigurations of status and history, those under way first, and then the newest first.

    A reconfiguration that is in both is taken from the status, which is newer.
    """
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
    """Returns the state of a replica: alive, opening, stopped, silent, or unknown in a follower's report."""
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
    """Returns the sum of the values; None if any of them is not known."""
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

    ``owners`` in the view has an index into the snapshot's ``replicas`` for each partition; -1: the owner is not among
    them. ``stored`` has the estimated number of entries of each partition; None: not known.
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
    """Returns (partition, index of the replica in the snapshot, whether the copy can take over) for each standby."""
    return [
        (each.partition, number_of.get(each.replica, -1), each.phase == "CATCHING_UP") for each in standbys[:COPIES_MAX]
    ]


def _move(of: Reconfiguration, move: MoveReport) -> dict[str, Any]:
    """Returns the view of a move.

    ``progress`` in the view is the fraction of the base copy that the target has, from 0 to 1; None: the size of the
    copy is not known yet.
    """
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
    """Returns the completed moves for the time lines, oldest first; moves of one operator in the same second share a
    mark."""
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
    """Returns the view of a job. ``runs`` has only the last run, if there is one."""
    return {
        "name": job.name,
        "schedule": job.schedule,
        "do": job.do,
        "operator": job.operator,
        "paused": job.paused,
        "error": job.error,
        "next_us": job.next_us,
        "runs": [{"state": run.state, "note": run.note} for run in job.runs[-1:]],
    }


def _batch(batch: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the view of a batch: its id, name and status, the time of its creation, counts of its entities, its pace
    and its expected end."""
    names = ("bid", "name", "status", "created_us", "total_entities", "succeeded", "failed", "cancelled", "pace", "eta")
    return {name: batch.get(name) for name in names}


def lines(points: Iterable[Point]) -> dict[str, list[Any]]:
    """Returns the columns of the time lines, name → values. ``at`` has the times in seconds since 1970."""
    rows = [(round(p.at_us / 1e6, 3), p.rows_per_s, p.p50_ms, p.p99_ms) for p in points]
    columns: list[list[Any]] = [list(column) for column in zip(*rows, strict=True)] or [[], [], [], []]
    return dict(zip(("at", "rows_per_s", "p50_ms", "p99_ms"), columns, strict=True))


def plan_view(placement: Placement) -> dict[str, Any]:
    """Returns the view of a plan that the user must confirm: its moves and their cost."""
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
    """Returns the value; None for infinity and NaN, which JSON cannot express."""
    return value if math.isfinite(value) else None
