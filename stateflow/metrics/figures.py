"""Declares all metrics of stateflow, with their kinds, meanings and labels.

Names contain their units, as Prometheus recommends (prometheus.io/docs/practices/naming). Existing names do not change;
new names may be added. The values of labels are limited to deployed operators, states, and replicas that the cluster
knows.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Literal

Kind = Literal["counter", "gauge", "histogram"]
Labels = tuple[str, ...]
#: bounds for durations of batches, in seconds, from a tenth of the quickest batch to the time limit of a batch
BATCH_BUCKETS: Final = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 60.0)
#: bounds for pauses of moves, in seconds
PAUSE_BUCKETS: Final = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 5.0, 30.0)


@dataclass(slots=True)
class Histogram:
    """Counts observed values in buckets.

    Attributes:
        bounds: upper bounds of the buckets, ascending. A value belongs to the first bucket whose bound is not less.
        counts: number of values in each bucket; the last bucket has the values above all bounds.
        total: sum of the values.
    """

    bounds: tuple[float, ...]
    counts: list[int] = field(init=False)
    total: float = 0.0

    def __post_init__(self) -> None:
        self.counts = [0] * (len(self.bounds) + 1)

    def observe(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value

    @property
    def count(self) -> int:
        """The number of observed values."""
        return sum(self.counts)

    def merge(self, other: Histogram) -> None:
        """Adds the counts of another histogram with the same bounds."""
        self.counts = [mine + theirs for mine, theirs in zip(self.counts, other.counts, strict=True)]
        self.total += other.total

    def copy(self) -> Histogram:
        made = Histogram(self.bounds)
        made.merge(self)
        return made


@dataclass(frozen=True, slots=True)
class Figure:
    name: str
    kind: Kind
    what: str
    labels: Labels = ()


#: metric → its values by labels; a metric that is missing has no known value
Values = dict[str, Mapping[Any, float | Histogram]]

COMMON = (
    Figure("stateflow_info", "gauge", "1; the labels describe the process", ("process", "name", "site", "version")),
)
REPLICA = (
    Figure("stateflow_rows_total", "counter", "rows applied", ("operator",)),
    Figure(
        "stateflow_batch_seconds", "histogram", "time from a request's first message to its last output", ("operator",)
    ),
    Figure(
        "stateflow_batch_held_seconds_total", "counter", "time requests waited for moving partitions", ("operator",)
    ),
    Figure("stateflow_partitions", "gauge", "partitions on this replica, by state", ("operator", "state")),
    Figure("stateflow_state_bytes", "gauge", "size of partition files, including copies", ("operator",)),
    Figure("stateflow_state_entries", "gauge", "estimated number of entries in owned partitions", ("operator",)),
    Figure("stateflow_batches_per_second", "gauge", "recent batch rate over all partitions", ("operator",)),
    Figure("stateflow_lease_seconds", "gauge", "time until the replica's lease expires; below 0 after it has expired"),
    Figure("stateflow_checkpoint_rounds_total", "counter", "checkpoint rounds without an error"),
    Figure("stateflow_disk_free_bytes", "gauge", "free space for state, beyond the reserve"),
    Figure("stateflow_followers", "gauge", "copies of moves and standbys that follow partitions here", ("operator",)),
    Figure("stateflow_streams", "gauge", "open streams of batches"),
)
CONTROLLER = (
    Figure("stateflow_leads", "gauge", "1 if this controller leads, otherwise 0; the other metrics are the leader's"),
    Figure("stateflow_replicas", "gauge", "replicas that are alive, opening, stopped or silent", ("state",)),
    Figure("stateflow_replica_partitions", "gauge", "partitions assigned to the replica", ("replica",)),
    Figure("stateflow_replica_heartbeat_seconds", "gauge", "time since the replica's last heartbeat", ("replica",)),
    Figure("stateflow_partitions_unserved", "gauge", "partitions that no replica is known to serve", ("operator",)),
    Figure("stateflow_partitions_damaged", "gauge", "partitions found damaged by the last verification"),
    Figure("stateflow_moves_running", "gauge", "moves in progress"),
    Figure("stateflow_moves_total", "counter", "moves that ended since this controller leads", ("kind", "state")),
    Figure("stateflow_move_pause_seconds", "histogram", "time for which no replica served the partition", ("kind",)),
    Figure("stateflow_standbys", "gauge", "standby copies that follow their owner", ("operator", "phase")),
)
AGENT = (
    Figure("stateflow_agent_replicas", "gauge", "replicas assigned to the agent, by state", ("state",)),
    Figure("stateflow_agent_replica_ends_total", "counter", "replica processes that ended by themselves"),
    Figure("stateflow_agent_controller_seconds", "gauge", "time since the agent last obeyed a controller, or began"),
    Figure("stateflow_agent_disk_free_bytes", "gauge", "free space where its replicas keep state"),
    Figure("stateflow_agent_memory_bytes", "gauge", "all memory for replicas, and memory promised to them", ("of",)),
    Figure("stateflow_agent_cores", "gauge", "all cores for replicas, and the number of running workers", ("of",)),
)
CLIENT = (
    Figure("stateflow_client_rows_total", "counter", "rows acknowledged", ("operator",)),
    Figure(
        "stateflow_client_batch_seconds", "histogram", "time from sending a batch to its last answer", ("operator",)
    ),
    Figure("stateflow_client_batches_failed_total", "counter", "batches refused or given up", ("operator",)),
    Figure("stateflow_client_replayed_total", "counter", "parts of batches that were applied before", ("operator",)),
    Figure("stateflow_client_batches_running", "gauge", "batches waiting for answers", ("operator",)),
)
CALLS = (
    Figure("stateflow_calls_running", "gauge", "calls in progress"),
    Figure("stateflow_calls_refused_total", "counter", "calls refused because too many are in progress"),
    Figure(
        "stateflow_calls_not_allowed_total",
        "counter",
        "calls refused because of the caller's identity",
        ("call", "role"),
    ),
)
LIMITS = (
    Figure("stateflow_limit_used_ratio", "gauge", "part of a limit that is in use; 1: all of it", ("limit",)),
    Figure(
        "stateflow_limit_reached_total",
        "counter",
        "times that work was refused, put off or dropped at a limit",
        ("limit",),
    ),
)
FIGURES = {each.name: each for each in (*COMMON, *REPLICA, *CONTROLLER, *AGENT, *CLIENT, *CALLS, *LIMITS)}


@dataclass(frozen=True, slots=True)
class Target:
    """One ``/metrics`` page that Prometheus reads.

    Attributes:
        address: host:port of the page.
        labels: labels that Prometheus adds to the page's metrics.
    """

    address: str
    labels: Mapping[str, str]


def monitoring() -> dict[str, str]:
    """Returns the files for monitoring, file name → text: rules for Prometheus and a dashboard for Grafana."""
    folder = Path(__file__).parent / "files"
    return {path.name: path.read_text(encoding="utf-8") for path in sorted(folder.iterdir())}
