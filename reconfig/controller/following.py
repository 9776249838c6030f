"""Following: a controller that does not lead reads the ledger, and answers from its records.

The records tell what was decided: which operators there are, which replica owns a partition at which epoch, what was
begun and how it ended. Only the leader knows which replicas are alive, how far a move has come, and which processes are
refused; the reports (:class:`FollowerReports`) mark these facts as unknown.

When a caller asks, the controller at once reads the records that are newer than those it has. It also reads them every
``follow_interval_s``, so that few are left when a caller asks, and answers exist while the ledger is unavailable.
Each reading checks that the newest known record is still in the ledger. If it is not, for example because the database
was restored to an earlier day, the whole ledger is read afresh. While this process leads, it does not follow: its term
has a state of its own.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import math
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from reconfig.controller.cluster_state import ClusterState, Deployed
from reconfig.controller.executor import WATCH_IDLE_S, no_such
from reconfig.controller.folds import told
from reconfig.controller.history import ENDED, Recorded, is_waiting, past
from reconfig.decisions.plan import PlannedStandby, ReconfigurationState
from stateflow.clock import Clock
from stateflow.errors import LedgerCorrupt, StateflowError, Unavailable
from stateflow.ledger import Ledger, Record
from stateflow.reports import UNKNOWN, FollowerReport, JobReport, JobRun, MoveReport, Reconfiguration
from stateflow.settings import ControllerSettings
from stateflow.status import ClusterReport, DeployingOperator, Deployment, ReplicaStatus, StandbyReport

log = logging.getLogger(__name__)
T = TypeVar("T")
#: seconds for which a caller waits for the ledger before it gets the previous answer
ASKED_S = 2.0
#: seconds between attempts to read the whole ledger again, while its records cannot be followed
AFRESH_S = 30.0


# -- Reports ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class FollowerReports:
    """The reports of a controller that does not lead. Does no I/O. ``term`` is always 0."""

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
            maintenance=cluster.maintenance_reports(),
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
        """Returns the report of a job, or of all jobs if ``name`` is empty. Raises InvalidArgument for an unknown
        job."""
        jobs, now = self.cluster.jobs, self.cluster.now_us()
        return [jobs.report(each, now, follower=self.follower) for each in ([name] if name else jobs.names())]

    def job_run(self, run_id: str) -> JobRun:
        """Returns the report of a job's run. Raises InvalidArgument if there is no such run."""
        return told(self.cluster.jobs.run(run_id), follower=self.follower)

    def reconfiguration(self, reconfiguration: str) -> Reconfiguration:
        """Returns the report of a reconfiguration. Raises MoveUnknown."""
        recorded = self.cluster.history.get(reconfiguration)
        if recorded is None:
            raise no_such(reconfiguration)
        return self._told(recorded)

    def history(self, limit: int = 0) -> Iterator[Reconfiguration]:
        """Yields reports of reconfigurations, newest first, at most ``limit`` of them; 0: all."""
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


# -- Reading ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Known:
    """The state read so far, and the position up to which it was read.

    ``newest`` is the record that was folded last, or None if the ledger is empty. ``read_at`` is the time, in monotonic
    seconds, just before the ledger was asked for newer records.
    """

    cluster: ClusterState
    newest: Record | None
    read_at: float

    @property
    def after(self) -> int:
        return 0 if self.newest is None else self.newest.record_id


class Following:
    """Answers from the ledger while another controller leads.

    Run :meth:`run` as a task; call :meth:`overview` and :meth:`watch`.

    Args:
        leads: tells whether this process leads now.
        who: returns the addresses of this process and of the leader; empty: the leader is not known.
    """

    def __init__(
        self,
        ledger: Ledger,
        settings: ControllerSettings,
        clock: Clock,
        leads: Callable[[], bool],
        who: Callable[[], tuple[str, str]],
    ) -> None:
        self._ledger, self._settings, self._clock = ledger, settings, clock
        self._leads, self._who = leads, who
        self._known: _Known | None = None
        self._trouble: StateflowError | None = None
        self._said = ""
        self._reading: asyncio.Task[None] | None = None
        self._begun = self._done = 0  # numbers of readings
        self._changed = asyncio.Event()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="following")
        self._loop = asyncio.get_running_loop()

    # -- reading on ---------------------------------------------------------------------------------------

    async def run(self) -> None:
        while True:
            if not self._leads():
                await asyncio.shield(self._read())
            lost = self._known is None and isinstance(self._trouble, LedgerCorrupt)
            await asyncio.sleep(AFRESH_S if lost else self._settings.follow_interval_s)

    def _read(self) -> asyncio.Task[None]:
        """Reads the records that were written since the last reading. Concurrent callers share one reading."""
        if self._reading is None or self._reading.done():
            self._reading = self._loop.create_task(self._read_on())
        return self._reading

    async def _read_on(self) -> None:
        asked_at, known = self._clock.monotonic(), self._known
        self._begun += 1
        try:
            if known is not None and (records := await self._in_thread(self._behind, known)) is not None:
                for record in records:
                    known.cluster.fold(record)
                self._known = replace(known, newest=records[-1] if records else known.newest, read_at=asked_at)
            else:
                cluster, newest = await self._in_thread(self._afresh)
                self._known = _Known(cluster, newest, asked_at)
            self._trouble, self._said = None, ""
        except StateflowError as error:  # the ledger is asked again later; the previous state stays
            self._trouble = error
        except Exception as error:  # noqa: BLE001 - records of a newer version, or damaged; some may be folded
            what = f"the ledger's records cannot be interpreted: {type(error).__name__}: {error}"
            self._known = None
            self._trouble = LedgerCorrupt(
                what, remedy="check that all controllers run one version, and run `stateflow ledger verify`"
            )
        if self._trouble is not None and self._said != self._trouble.code:
            self._said = self._trouble.code
            log.warning("leader's decisions cannot be followed: %s", self._trouble)
        self._done = self._begun
        self._changed.set()
        self._changed = asyncio.Event()

    def _behind(self, known: _Known) -> list[Record] | None:
        """Returns the records appended since the last reading, by id; None: the ledger no longer has the newest known
        record."""
        if known.newest is None:
            return list(self._ledger.records(archived=True))
        found = self._ledger.records(after=known.after - 1, archived=True)
        first = next(found, None)
        if first is None or (first.record_id, first.item_id, first.seq, first.timestamp_us) != (
            *(known.newest.record_id, known.newest.item_id, known.newest.seq, known.newest.timestamp_us),
        ):
            return None
        return list(found)

    def _afresh(self) -> tuple[ClusterState, Record | None]:
        cluster, newest = ClusterState(self._ledger.clock.now_us, validated=self._settings.debug_validate), None
        for newest in self._ledger.records(archived=True):
            cluster.fold(newest)
        return cluster, newest

    # -- answering ----------------------------------------------------------------------------------------

    async def overview(self, after: int) -> FollowerReports:
        """Returns an overview of the ledger as it is now, or, if the ledger does not answer, as it was last read.

        The overview includes every record of which the caller knows.

        Args:
            after: id of the newest record that the caller knows of.

        Raises Unavailable if the reading does not reach that record.
        """
        wanted = self._begun + 1  # a reading under way may have missed records written since it began
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(ASKED_S):
                while self._done < wanted:
                    await asyncio.shield(self._read())
        return self._overview(after)

    def _overview(self, after: int) -> FollowerReports:
        known, (me, leader) = self._known, self._who()
        if known is None or known.after < after:
            why = "" if self._trouble is None else f": {self._trouble.what}"
            raise Unavailable(
                f"this controller does not lead, and its copy of the ledger lacks records that the caller knows{why}",
                remedy="try again, or ask the leader",
                **({"leader": leader} if leader else {}),
            )
        return FollowerReports(known.cluster, FollowerReport(me, leader, self._clock.monotonic() - known.read_at))

    async def watch(self, reconfiguration: str, after: int) -> AsyncIterator[Reconfiguration]:
        """Yields a reconfiguration whenever it changes, and every ``WATCH_IDLE_S`` seconds while it does not.

        Ends when the reconfiguration is over, or when the leader changes, because the caller can then learn more from
        the new leader.
        """
        told: Reconfiguration | None = None
        said_at, leader = -math.inf, self._who()[1]
        overview = await self.overview(after)
        while True:
            changed = self._changed
            report = overview.reconfiguration(reconfiguration)
            now = self._clock.monotonic()
            if told is None or replace(report, follower=None) != told or now - said_at >= WATCH_IDLE_S:
                said_at, told = now, replace(report, follower=None)
                yield report
            if ReconfigurationState(report.state).over or self._leads() or self._who()[1] not in ("", leader):
                return
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(changed.wait(), self._settings.follow_interval_s)
            overview = self._overview(after)

    # -- plumbing -----------------------------------------------------------------------------------------

    async def _in_thread(self, work: Callable[..., T], *arguments: Any) -> T:
        return await self._loop.run_in_executor(self._thread, work, *arguments)

    def close(self) -> None:
        if self._reading is not None:
            self._reading.cancel()
        self._thread.shutdown(wait=False, cancel_futures=True)
