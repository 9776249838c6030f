"""Reports what the ledger alone tells of a cluster, for a controller that does not lead. Pure.

The ledger tells what was decided: which operators there are, which replica owns a partition at which epoch, what was
begun and how it ended. Only the leader knows which replicas are alive, how far a move has come, and which processes are
refused; the reports leave that unknown.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace

from reconfig.controller.batch_book import Recorded, is_waiting
from reconfig.controller.cluster_state import ClusterState, Deployed
from reconfig.controller.history import ENDED, maintained, past
from reconfig.controller.job_book import told
from reconfig.controller.run_registry import no_such
from reconfig.work import PlannedStandby, ReconfigurationState
from stateflow.ledger import Record
from stateflow.reports import (
    UNKNOWN,
    ClusterReport,
    DeployingOperator,
    Deployment,
    FollowerReport,
    JobReport,
    JobRun,
    MoveReport,
    Reconfiguration,
    ReplicaStatus,
    StandbyReport,
)


@dataclass(frozen=True, slots=True)
class Overview:
    """The reports of a controller that does not lead. ``term``: 0, as it leads in none."""

    cluster: ClusterState
    follower: FollowerReport
    term: int = 0

    def deployment(self, operator: str) -> Deployment:
        """Returns an operator's deployment. Raises OperatorNotDeployed."""
        return self._deployment(self.cluster.operator(operator))

    def _deployment(self, deployed: Deployed) -> Deployment:
        assignment, replicas = deployed.assignment, self.cluster.roster.replicas
        return Deployment(
            replace(deployed.spec, source=""),  # routers have no use for it
            assignment.version,
            tuple(replicas[name] for name in assignment.owners),
            assignment.epochs,
            sites=deployed.sites,
            follower=self.follower,
        )

    def status(self) -> ClusterReport:
        cluster = self.cluster
        owned = cluster.owned_counts()
        running = (self._told(recorded) for recorded in cluster.history.values() if not recorded.state.over)
        copies = (each.planned for each in cluster.open_moves.values() if isinstance(each.planned, PlannedStandby))
        return ClusterReport(
            maintenance=maintained(cluster),
            replicas=tuple(
                ReplicaStatus(info.name, info.site, info.address, info.weight, None, -1.0, owned.get(info.name, 0))
                for info in sorted(cluster.roster.replicas.values(), key=lambda info: info.name)
            ),
            deployments=tuple(self._deployment(each) for _, each in sorted(cluster.deployed.items())),
            reconfigurations=tuple(running),
            standbys=tuple(
                StandbyReport(copy.partition.operator, copy.partition.partition, copy.target, UNKNOWN, 0)
                for copy in copies
            ),
            deploying=tuple(
                DeployingOperator(name, planned.spec.partitions, 0)
                for name, (planned, _) in sorted(cluster.planned.items())
            ),
            follower=self.follower,
            damaged=tuple(cluster.sweeps.damaged()),
        )

    def job_reports(self, name: str) -> list[JobReport]:
        """Returns the report of a job, or of all where ``name`` is empty. Raises InvalidArgument for an unknown one."""
        jobs, now = self.cluster.jobs, self.cluster.now_us()
        return [jobs.report(each, now, follower=self.follower) for each in ([name] if name else jobs.names())]

    def job_run(self, run_id: str) -> JobRun:
        """Returns the report of a job's run. Raises InvalidArgument where there is none."""
        return told(self.cluster.jobs.run(run_id), follower=self.follower)

    def reconfiguration(self, reconfiguration: str) -> Reconfiguration:
        """Returns the report of a reconfiguration. Raises MoveUnknown."""
        recorded = self.cluster.history.get(reconfiguration)
        if recorded is None:
            raise no_such(reconfiguration)
        return self._told(recorded)

    def history(self, limit: int = 0) -> Iterator[Reconfiguration]:
        """Yields reports of reconfigurations, newest first. ``limit``: 0: all."""
        newest = list(itertools.islice(reversed(self.cluster.history.values()), limit or None))
        return map(self._told, newest)

    def _told(self, recorded: Recorded) -> Reconfiguration:
        report = past(recorded)
        moves = [
            move if record.state in ENDED else self._under_way(move, record)
            for move, (_, record) in zip(report.moves, recorded.moves.values(), strict=True)
        ]
        paused = not recorded.state.over and report.id in self.cluster.paused
        state = ReconfigurationState.PAUSED if paused else report.state
        return replace(report, state=state, moves=tuple(moves), follower=self.follower)

    def _under_way(self, move: MoveReport, record: Record) -> MoveReport:
        granted = self.cluster.open_moves[record.item_id].granted
        if is_waiting(record) and not granted:
            return move
        return replace(move, state=UNKNOWN, note="its target was granted the partition" if granted else "")
