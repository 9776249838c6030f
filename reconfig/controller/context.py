"""What the parts of a controller share: the cluster's state and its one writer, members, calls to replicas, tasks."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Concatenate, ParamSpec, TypeVar

import grpc.aio

from reconfig.controller.cluster_state import ClusterState
from reconfig.controller.members import Members
from reconfig.controller.names import Names
from reconfig.controller.replicas import Replicas
from reconfig.tenure import Tenure
from stateflow.clock import Clock
from stateflow.errors import (
    HoldLost,
    LedgerReadOnly,
    LedgerReplaced,
    MoveConflict,
    StaleTerm,
    StateflowError,
    Unavailable,
    UnknownSite,
    WriteUncertain,
)
from stateflow.ledger import Ledger, Record
from stateflow.runtime.authority import Command
from stateflow.settings import ControllerSettings
from stateflow.types import PartitionId, ReplicaInfo

log = logging.getLogger(__name__)
T = TypeVar("T")
P = ParamSpec("P")


@dataclass(frozen=True, slots=True)
class ClusterStates:
    """The same records folded twice: one to be read by the event loop, one that appends in a thread."""

    read_by_loop: ClusterState
    writer: ClusterState

    @classmethod
    def read(cls, ledger: Ledger, term: int | None = None, validated: bool = False) -> ClusterStates:
        """``term``: of the hold that it is read and written in. A write of an earlier one may still be on its way."""
        mirror = ClusterState(ledger, validated=validated)
        return cls(mirror, ClusterState.read(ledger, mirror, term, validated))


class ControllerContext:
    """``cluster`` is read by the event loop and changed by it alone. Another one appends to the ledger in a thread, and
    each of its records is folded here before whoever asked for it goes on.

    ``over`` is done when the term has ended early, with the reason: nothing more can be recorded.
    """

    def __init__(
        self,
        ledger: Ledger,
        settings: ControllerSettings,
        clock: Clock,
        connect: Callable[[str], grpc.aio.Channel],
        new_id: Callable[[], str],
        tenure: Tenure,
        states: ClusterStates,
        grace_s: float,
    ) -> None:
        self.settings, self.clock, self.new_id = settings, clock, new_id
        self.ledger_id, self._tenure = ledger.id, tenure
        self.cluster, self._writer = states.read_by_loop, states.writer
        self._writer.on_record = self._fold_in_loop
        self._writer.check = self.check_leads  # again: a database that is locked lets it wait
        self._planner = ThreadPoolExecutor(1, thread_name_prefix="planner")
        self._records = ThreadPoolExecutor(1, thread_name_prefix="ledger")  # one: the writer is not thread-safe
        self.members = Members(self.cluster.replicas, settings, clock, grace_s)
        self.names = Names(self.cluster, self.members, settings, clock)
        self.replicas = Replicas(self.cluster, self.members, settings, clock, connect, self._command, self._refused)
        self._tasks: set[asyncio.Task[Any]] = set()
        self._loop = asyncio.get_running_loop()
        self.over: asyncio.Future[StateflowError] = self._loop.create_future()
        self._waited_for = ""  # why a record waits, as it was said last
        #: held while a change is planned and recorded, so that what was checked still holds
        self.planning = asyncio.Lock()
        #: held by whatever changes which operators there are, and taken before ``planning``
        self.deploying = asyncio.Lock()

    def _fold_in_loop(self, record: Record) -> None:
        self._loop.call_soon_threadsafe(self.cluster.fold, record)

    async def record(self, work: Callable[Concatenate[ClusterState, P], T], *arguments: P.args, **_: P.kwargs) -> T:
        """One durable step, e.g. ``record(ClusterState.grant, move)``. They happen one after another, off the event
        loop, to the end even where the caller is cancelled.

        A ledger that is away, or can only be read, as one is whose database fails over, delays it for as long as this
        controller leads: to renew its hold it has to write, too. Raises what ends the term.
        """
        return await asyncio.shield(self.spawn(self._record(work, *arguments)))

    async def _record(self, work: Callable[..., T], *arguments: Any) -> T:
        while True:
            try:
                self.check_leads()
                return await self._loop.run_in_executor(self._records, work, self._writer, *arguments)
            except (HoldLost, LedgerReplaced, WriteUncertain) as error:  # or its outcome is not known: read it anew
                self._end_term(error)
                raise
            except (Unavailable, LedgerReadOnly) as error:
                if self._waited_for != error.what:
                    self._waited_for = error.what
                    log.warning("nothing is decided meanwhile: %s", error)
            await asyncio.sleep(self.settings.retry_interval_s)

    # -- the term -----------------------------------------------------------------------------------------

    @property
    def term(self) -> int:
        return self._tenure.term

    def check_leads(self) -> None:
        """Raises HoldLost, also where the term has ended early: what is known here may not be all that was decided."""
        self._tenure.check(self.clock.monotonic())
        if self.over.done():
            raise HoldLost(f"the term is over: {self.over.result()}", remedy="ask who leads now", term=self.term)

    def _end_term(self, error: StateflowError) -> None:
        if not self.over.done():
            self.over.set_result(error)

    async def aside(self, work: Callable[P, T], *arguments: P.args, **_: P.kwargs) -> T:
        """Long work that needs nothing of this: leases are renewed meanwhile."""
        return await self._loop.run_in_executor(self._planner, work, *arguments)

    # -- replicas -----------------------------------------------------------------------------------------

    def _command(self, name: str) -> Command:
        """Raises HoldLost, and Unavailable for a replica that has not registered."""
        self.check_leads()
        session = self.members.session(name)
        if not session:
            raise Unavailable(f"{name} has not registered yet", remedy="see that it runs; it registers by itself")
        return Command(self.ledger_id, self.term, session)

    def _refused(self, error: StateflowError) -> None:
        if isinstance(error, StaleTerm):  # it has heard one that came after this
            self._end_term(error)

    def alive(self) -> dict[str, ReplicaInfo]:
        """Replicas to plan with: those that were heard lately, and that their agent was not told to stop."""
        return {
            name: info
            for name, info in self.cluster.replicas.items()
            if self.members.alive(name) and not self.cluster.is_stopping(name)
        }

    def least_loaded(self, replicas: Iterable[ReplicaInfo], coming: Mapping[str, int]) -> ReplicaInfo:
        """The one with the fewest partitions for its weight, those ``coming`` counted."""
        owned = self.cluster.owned_counts()

        def load(info: ReplicaInfo) -> tuple[float, str]:
            return (owned.get(info.name, 0) + coming.get(info.name, 0)) / max(info.weight, 1), info.name

        return min(replicas, key=load)

    def check_site(self, name: str) -> None:
        """Raises UnknownSite."""
        sites = sorted({info.site for info in self.cluster.replicas.values()})
        if name not in sites:
            replicas = sorted(self.cluster.replicas)
            raise UnknownSite(
                f"there is no site or replica {name!r}",
                remedy=f"use a site ({', '.join(sites) or 'none'}) or a replica ({', '.join(replicas) or 'none'})",
            )

    def check_not_restored(self, partition: PartitionId) -> None:
        """Raises MoveConflict while a restore of the partition is under way."""
        for planned, _ in self.cluster.open_restores.values():
            if planned.partition == partition:
                raise MoveConflict(
                    "the partition is being restored",
                    remedy="wait until that has ended",
                    partition=partition,
                    restore=planned.restore_id,
                )

    # -- tasks --------------------------------------------------------------------------------------------

    def spawn(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def close(self) -> None:
        for task in list(self._tasks):
            task.cancel()
        await self.replicas.close()
        self._planner.shutdown(wait=False, cancel_futures=True)
        self._records.shutdown(wait=False, cancel_futures=True)
