"""All metrics of stateflow: their names, kinds, meanings and labels.

Names contain their units, as Prometheus recommends (prometheus.io/docs/practices/naming). Names do not change; new ones
may be added. The values of labels are bounded by deployed operators, states, and replicas that the cluster knows.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Literal

Kind = Literal["counter", "gauge", "histogram"]
Labels = tuple[str, ...]
#: bounds for batches, in seconds: from a tenth of the quickest batch to one that is about to be interrupted
BATCH_BUCKETS: Final = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 60.0)
#: bounds for pauses of moves, in seconds
PAUSE_BUCKETS: Final = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 5.0, 30.0)


@dataclass(slots=True)
class Histogram:
    """Counts observed values, each under the least of ``bounds`` that is not below it. ``total``: their sum."""

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
        """Number of observed values."""
        return sum(self.counts)

    def merge(self, other: Histogram) -> None:
        """Adds the counts of another histogram, which has the same bounds."""
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


#: metric → its values, by labels. A metric of which nothing is known has no values
Values = dict[str, Mapping[Any, float | Histogram]]

COMMON = (Figure("stateflow_info", "gauge", "1: what runs here", ("process", "name", "site", "version")),)
REPLICA = (
    Figure("stateflow_rows_total", "counter", "rows that came", ("operator",)),
    Figure("stateflow_batch_seconds", "histogram", "from a request's first message to its last output", ("operator",)),
    Figure("stateflow_batch_held_seconds_total", "counter", "of that, waiting for a partition to come", ("operator",)),
    Figure("stateflow_partitions", "gauge", "partitions that are here in some form", ("operator", "state")),
    Figure("stateflow_state_bytes", "gauge", "files of partitions, copies included", ("operator",)),
    Figure("stateflow_state_entries", "gauge", "stored in partitions that it owns, estimated", ("operator",)),
    Figure("stateflow_batches_per_second", "gauge", "lately, of all partitions", ("operator",)),
    Figure("stateflow_lease_seconds", "gauge", "left of the lease; below 0: it has lapsed"),
    Figure("stateflow_checkpoint_rounds_total", "counter", "rounds of checkpoints without an error"),
    Figure("stateflow_disk_free_bytes", "gauge", "free for state, beyond the reserve"),
)
CONTROLLER = (
    Figure("stateflow_leads", "gauge", "1: this controller leads; all others of it are of who does"),
    Figure("stateflow_replicas", "gauge", "replicas: alive, opening, stopped or silent", ("state",)),
    Figure("stateflow_replica_partitions", "gauge", "partitions that are assigned to it", ("replica",)),
    Figure("stateflow_replica_heartbeat_seconds", "gauge", "since it was heard", ("replica",)),
    Figure("stateflow_partitions_unserved", "gauge", "partitions that nobody is known to serve", ("operator",)),
    Figure("stateflow_partitions_damaged", "gauge", "partitions that the last verification found damaged"),
    Figure("stateflow_moves_running", "gauge", "moves that have not ended"),
    Figure("stateflow_moves_total", "counter", "moves that ended since it leads", ("kind", "state")),
    Figure("stateflow_move_pause_seconds", "histogram", "nobody served the partition for so long", ("kind",)),
    Figure("stateflow_standbys", "gauge", "copies that follow their owner", ("operator", "phase")),
)
AGENT = (
    Figure("stateflow_agent_replicas", "gauge", "replicas that it is to have, by how they stand", ("state",)),
    Figure("stateflow_agent_replica_ends_total", "counter", "processes that ended by themselves, and begin again"),
    Figure("stateflow_agent_controller_seconds", "gauge", "since a controller was obeyed"),
    Figure("stateflow_agent_disk_free_bytes", "gauge", "free where its replicas keep state"),
    Figure("stateflow_agent_memory_bytes", "gauge", "that replicas may have: in all, and promised to some", ("of",)),
    Figure("stateflow_agent_cores", "gauge", "that replicas may have: in all, and workers that there are", ("of",)),
)
CLIENT = (
    Figure("stateflow_client_rows_total", "counter", "rows that were acknowledged", ("operator",)),
    Figure("stateflow_client_batch_seconds", "histogram", "from sending a batch to its last answer", ("operator",)),
    Figure("stateflow_client_batches_failed_total", "counter", "batches that were refused or given up", ("operator",)),
    Figure("stateflow_client_replayed_total", "counter", "partitions that had their batch already", ("operator",)),
    Figure("stateflow_client_batches_running", "gauge", "batches that wait for answers", ("operator",)),
)
CALLS = (
    Figure("stateflow_calls_running", "gauge", "calls that are under way"),
    Figure("stateflow_calls_refused_total", "counter", "calls of callers that had too many"),
)
FIGURES = {each.name: each for each in (*COMMON, *REPLICA, *CONTROLLER, *AGENT, *CLIENT, *CALLS)}


def monitoring() -> dict[str, str]:
    """Returns the rules for Prometheus and the dashboard for Grafana: file name → text."""
    folder = Path(__file__).parent / "files"
    return {path.name: path.read_text(encoding="utf-8") for path in sorted(folder.iterdir())}
