"""The client of a controller's commands and queries. It takes values and returns reports."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from stateflow.fleet import Request, Spawned
from stateflow.reports import (
    AgentReport,
    AutopilotReport,
    FollowerReport,
    JobReport,
    JobRun,
    OperatorVersion,
    Placement,
    Reconfiguration,
    RestoredPartition,
    Rolling,
    Sweep,
    Taken,
)
from stateflow.rpc import agent_pb2 as apb
from stateflow.rpc import controller_pb2 as cpb
from stateflow.rpc import replica_pb2 as rpb
from stateflow.rpc.clients import DEPLOY_TIMEOUT_S, ControllerClient, listed, request_of
from stateflow.rpc.wire import value_of
from stateflow.status import AdoptedOperator, ClusterReport, ClusterStatus, Deployment, LeaderReport, StandbyReport
from stateflow.types import BUNDLE_PART, MoveOptions, OperatorSpec

#: time limit of calls that plan, for which the controller asks replicas
PLAN_TIMEOUT_S = 120.0
#: time limit of calls that move gigabytes
LONG_TIMEOUT_S = 3600.0


class ClusterClient:
    """A controller's commands and queries. Methods raise the controller's error, or Unavailable.

    For their effects, and the options of a move, see :class:`~stateflow.client.cluster.Cluster`.
    """

    def __init__(self, address: str, connect_timeout_s: float = 0.0) -> None:
        self._controller = ControllerClient(address, connect_timeout_s=connect_timeout_s)

    def status(self, measured: bool = False) -> ClusterStatus:
        found = value_of(
            ClusterReport, self._controller.call("Status", request_of(cpb.StatusRequest, measured=measured))
        ).status()
        return found if found.follower is not None else replace(found, leader=LeaderReport(*self._controller.leader()))

    # -- operators ----------------------------------------------------------------------------------------

    def deploy(self, spec: OperatorSpec, sites: Iterable[str] | None, failover: str | None = None) -> None:
        self._controller.deploy(spec, sites, failover)

    def take_over(self, operator: str, partitions: Sequence[int], accept_loss: bool) -> list[Reconfiguration]:
        request = request_of(cpb.TakeOverLostRequest, operator=operator, partitions=partitions, accept_loss=accept_loss)
        return self._begun("TakeOver", request)

    def deployment(self, operator: str) -> Deployment:
        return self._controller.deployment(operator)

    def put_bundle(self, digest: str, packed: bytes) -> None:
        count = -(-len(packed) // BUNDLE_PART)
        for number in range(count):
            data = packed[number * BUNDLE_PART : (number + 1) * BUNDLE_PART]
            part = request_of(cpb.BundlePart, bundle=digest, number=number, count=count, data=data)
            self._controller.call("PutBundlePart", part, LONG_TIMEOUT_S)

    def versions(self, operator: str) -> list[OperatorVersion]:
        return self._controller.versions(operator)

    def upgrade(self, operator: str, version: int) -> None:
        request = request_of(cpb.UpgradeRequest, operator=operator, version=version)
        self._controller.call("Upgrade", request, DEPLOY_TIMEOUT_S)

    def undeploy(self, operator: str, delete_state: bool) -> list[str]:
        """Undeploys an operator, and returns the replicas that did not answer."""
        request = request_of(cpb.UndeployRequest, operator=operator, delete_state=delete_state)
        return list(self._controller.call("Undeploy", request, LONG_TIMEOUT_S).waiting)

    def standby(self, operator: str, count: int) -> list[StandbyReport]:
        reply = self._controller.call(
            "Standby", request_of(cpb.StandbyRequest, operator=operator, count=count), PLAN_TIMEOUT_S
        )
        return [value_of(StandbyReport, view) for view in reply.standbys]

    # -- replicas -----------------------------------------------------------------------------------------

    def replace(self, replica: str, directory: str) -> tuple[str, int]:
        """Gives a replica's name to the data directory that asks for it, and returns (directory, number of the
        replica's partitions).
        """
        reply = self._controller.call("Replace", request_of(cpb.ReplaceRequest, replica=replica, directory=directory))
        return reply.directory, reply.partitions

    def forget(self, replica: str) -> None:
        self._controller.call("Forget", request_of(cpb.ForgetRequest, replica=replica), PLAN_TIMEOUT_S)

    def adopt(self, dry_run: bool, partial: bool) -> list[AdoptedOperator]:
        reply = self._controller.call(
            "Adopt", request_of(cpb.AdoptRequest, dry_run=dry_run, partial=partial), PLAN_TIMEOUT_S
        )
        return [value_of(AdoptedOperator, each) for each in reply.operators]

    # -- agents -------------------------------------------------------------------------------------------

    def agents(self) -> list[AgentReport]:
        reply = self._controller.call("ListAgents", request_of(cpb.ListAgentsRequest))
        return [value_of(AgentReport, view) for view in reply.agents]

    def spawn(self, request: Request) -> list[Spawned]:
        return self._commanded("Spawn", request_of(cpb.SpawnRequest, request))

    def stop_replica(self, replica: str, force: bool) -> list[Spawned]:
        return self._commanded("StopReplica", request_of(cpb.StopReplicaRequest, replica=replica, force=force))

    def restart_replica(self, replica: str) -> list[Spawned]:
        return self._commanded("RestartReplica", request_of(cpb.RestartReplicaRequest, replica=replica))

    def restart_all(self, site: str, limit: int) -> Rolling:
        request = request_of(cpb.RestartAllRequest, site=site, limit=limit)
        return value_of(Rolling, self._controller.call("RestartAll", request, PLAN_TIMEOUT_S))

    def rolling(self, roll_id: str) -> Rolling:
        return value_of(Rolling, self._controller.call("GetRolling", request_of(cpb.RollingRequest, id=roll_id)))

    def cancel_rolling(self, roll_id: str) -> Rolling:
        return value_of(Rolling, self._controller.call("CancelRolling", request_of(cpb.RollingRequest, id=roll_id)))

    def begin_sweep(self, chore: str, operator: str, site: str, limit: int) -> Sweep:
        request = request_of(cpb.BeginSweepRequest, chore=chore, operator=operator, site=site, limit=limit)
        return value_of(Sweep, self._controller.call("BeginSweep", request, PLAN_TIMEOUT_S))

    def sweep(self, sweep_id: str) -> Sweep:
        return value_of(Sweep, self._controller.call("GetSweep", request_of(cpb.SweepRequest, id=sweep_id)))

    def cancel_sweep(self, sweep_id: str) -> Sweep:
        return value_of(Sweep, self._controller.call("CancelSweep", request_of(cpb.SweepRequest, id=sweep_id)))

    def _commanded(self, method: str, request: Any) -> list[Spawned]:
        return [value_of(Spawned, each) for each in self._controller.call(method, request, PLAN_TIMEOUT_S).spawned]

    def forget_agent(self, agent: str) -> None:
        self._controller.call("ForgetAgent", request_of(cpb.ForgetAgentRequest, agent=agent), PLAN_TIMEOUT_S)

    def logs(self, replica: str, lines: int, follow: bool) -> Iterator[bytes]:
        """Yields pieces of a replica's log, without the empty ones that are only signs of life."""
        request = request_of(apb.LogsRequest, replica=replica, lines=lines, follow=follow)
        return (page.data for page in self._controller.stream("Logs", request) if page.data)

    # -- reconfigurations ---------------------------------------------------------------------------------

    def migrate(self, operator: str, partitions: Collection[int], to: str, options: MoveOptions) -> Reconfiguration:
        request = request_of(cpb.MigrateRequest, operator=operator, partitions=partitions, to=to, options=options)
        return value_of(Reconfiguration, self._controller.call("Migrate", request, PLAN_TIMEOUT_S))

    def rebalance(self, operator: str, options: MoveOptions) -> list[Reconfiguration]:
        request = request_of(cpb.RebalanceRequest, operator=operator, options=options)
        return self._begun("Rebalance", request)

    def propose(self, operator: str, policies: Sequence[str]) -> Placement:
        request = request_of(cpb.PlaceRequest, operator=operator, policies=policies, dry_run=True)
        return value_of(Placement, self._controller.call("Place", request, PLAN_TIMEOUT_S))

    def place(self, operator: str, policies: Sequence[str], options: MoveOptions) -> list[Reconfiguration]:
        request = request_of(cpb.PlaceRequest, operator=operator, policies=policies, options=options)
        return self._begun("Place", request)

    def create_job(self, report: JobReport, options: MoveOptions) -> JobReport:
        message = request_of(cpb.Job, report, runs=(), options=options)
        return value_of(JobReport, self._controller.call("CreateJob", message, PLAN_TIMEOUT_S))

    def change_job(self, name: str, change: str) -> JobReport:
        """Changes a job.

        Args:
            change: pause, resume, run or delete.
        """
        request = request_of(cpb.ChangeJobRequest, name=name, change=change)
        return value_of(JobReport, self._controller.call("ChangeJob", request, PLAN_TIMEOUT_S))

    def jobs(self, name: str = "") -> list[JobReport]:
        reply = self._controller.call("ListJobs", request_of(cpb.ListJobsRequest, name=name))
        return [replace(value_of(JobReport, message), follower=_follower_of(reply)) for message in reply.jobs]

    def job_run(self, run_id: str) -> JobRun:
        return value_of(JobRun, self._controller.call("GetJobRun", request_of(cpb.JobRunRequest, id=run_id)))

    def autopilot(self, orders: AutopilotReport | None) -> AutopilotReport:
        """Changes the autopilot's settings, and returns those in force.

        Args:
            orders: settings in force from now on; None: change nothing.
        """
        given = None if orders is None else request_of(cpb.AutopilotOrders, orders)
        request = request_of(cpb.AutopilotRequest, orders=given)
        return value_of(AutopilotReport, self._controller.call("Autopilot", request, PLAN_TIMEOUT_S))

    def drain(
        self, replica: str, options: MoveOptions, maintenance: tuple[float, str] | None = None
    ) -> list[Reconfiguration]:
        """Moves all partitions off a replica.

        Args:
            maintenance: (duration in seconds, name of a set of nodes); None: no maintenance. Duration 0: until a
                command ends the maintenance. Only one node of the set may be in maintenance at a time; empty: no such
                limit.
        """
        asked = None
        if maintenance is not None:
            asked = request_of(cpb.Maintenance, for_s=maintenance[0], one_of=maintenance[1])
        request = request_of(cpb.DrainRequest, replica=replica, options=options, maintenance=asked)
        return self._begun("Drain", request)

    def end_maintenance(self, node: str) -> None:
        self._controller.call("EndMaintenance", request_of(cpb.EndMaintenanceRequest, node=node))

    def would_migrate(self, operator: str, partitions: Collection[int], to: str) -> Placement:
        request = request_of(cpb.MigrateRequest, operator=operator, partitions=partitions, to=to)
        return self._proposed(request_of(cpb.ProposeRequest, migrate=request))

    def would_drain(self, replica: str) -> Placement:
        return self._proposed(request_of(cpb.ProposeRequest, drain=request_of(cpb.DrainRequest, replica=replica)))

    def would_rebalance(self, operator: str) -> Placement:
        return self._proposed(
            request_of(cpb.ProposeRequest, rebalance=request_of(cpb.RebalanceRequest, operator=operator))
        )

    def would_take_over(self, operator: str, partitions: Collection[int]) -> Placement:
        request = request_of(cpb.TakeOverLostRequest, operator=operator, partitions=partitions)
        return self._proposed(request_of(cpb.ProposeRequest, take_over=request))

    def _proposed(self, request: cpb.ProposeRequest) -> Placement:
        return value_of(Placement, self._controller.call("Propose", request, PLAN_TIMEOUT_S))

    def _begun(self, method: str, request: Any) -> list[Reconfiguration]:
        reply = self._controller.call(method, request, PLAN_TIMEOUT_S)
        return [value_of(Reconfiguration, message) for message in reply.reconfigurations]

    def reconfigurations(self, limit: int) -> list[Reconfiguration]:
        pages = self._controller.stream("ListReconfigurations", request_of(cpb.ListRequest, limit=limit))
        return [
            replace(value_of(Reconfiguration, message), follower=_follower_of(page))
            for page, message in listed(pages, lambda page: page.reconfigurations, self._controller.address)
        ]

    def watch(self, reconfiguration: str) -> Iterator[Reconfiguration]:
        """Yields the states of a reconfiguration as it proceeds; the last one is not RUNNING."""
        request = request_of(cpb.ReconfigurationRequest, id=reconfiguration)
        return (value_of(Reconfiguration, message) for message in self._controller.watch(request))

    def reconfiguration(self, reconfiguration: str) -> Reconfiguration:
        return self._of("GetReconfiguration", reconfiguration)

    def cancel(self, reconfiguration: str) -> Reconfiguration:
        return self._of("CancelReconfiguration", reconfiguration)

    def pause(self, reconfiguration: str) -> Reconfiguration:
        return self._of("PauseReconfiguration", reconfiguration)

    def resume(self, reconfiguration: str) -> Reconfiguration:
        return self._of("ResumeReconfiguration", reconfiguration)

    def edit(self, reconfiguration: str, limits: Mapping[str, int | None]) -> Reconfiguration:
        request = request_of(cpb.EditRequest, id=reconfiguration, **limits)
        return value_of(Reconfiguration, self._controller.call("EditReconfiguration", request))

    def retry(self, reconfiguration: str, cancelled: bool) -> Reconfiguration:
        request = request_of(cpb.ReconfigurationRequest, id=reconfiguration, cancelled=cancelled)
        return value_of(Reconfiguration, self._controller.call("RetryReconfiguration", request))

    def _of(self, method: str, reconfiguration: str) -> Reconfiguration:
        request = request_of(cpb.ReconfigurationRequest, id=reconfiguration)
        return value_of(Reconfiguration, self._controller.call(method, request, PLAN_TIMEOUT_S))

    def resolve(self, reconfiguration: str, how: str) -> Reconfiguration:
        request = request_of(cpb.ResolveRequest, id=reconfiguration, how=how)
        return value_of(Reconfiguration, self._controller.call("ResolveReconfiguration", request, PLAN_TIMEOUT_S))

    # -- checkpoints --------------------------------------------------------------------------------------

    def checkpoint(self, operator: str, savepoint: str = "", partitions: Collection[int] = ()) -> Taken:
        """Takes checkpoints of all partitions, or of the given ones."""
        request = request_of(rpb.CheckpointRequest, operator=operator, savepoint=savepoint, partitions=partitions)
        return value_of(Taken, self._controller.call("Checkpoint", request, LONG_TIMEOUT_S))

    def restore(
        self,
        operator: str,
        partitions: Collection[int],
        *,
        to: str,
        url: str,
        savepoint: str,
        at: tuple[str, int] | None,
        stop_sources: bool,
    ) -> list[RestoredPartition]:
        source, batch = at or ("", 0)
        request = request_of(
            cpb.RestoreOperatorRequest,
            operator=operator,
            partitions=partitions,
            to=to,
            url=url,
            savepoint=savepoint,
            source=source,
            batch=batch,
            stop_sources=stop_sources,
        )
        report = self._controller.call("Restore", request, LONG_TIMEOUT_S)
        return [value_of(RestoredPartition, each) for each in report.partitions]

    def cancel_restore(self, restore_id: str) -> None:
        self._controller.call("CancelRestore", request_of(cpb.CancelRestoreRequest, id=restore_id))


def _follower_of(message: Any) -> FollowerReport | None:
    """Returns the follower that gave an answer; None: the leader gave it. For answers with a follower field."""
    return value_of(FollowerReport, message.follower) if message.HasField("follower") else None
