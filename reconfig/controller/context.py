"""What the parts of a controller share: the cluster's state and its one writer, members, calls to replicas, tasks."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection, Coroutine, Iterable, Mapping
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
from stateflow.rpc.admission import caller
from stateflow.runtime.authority import Command
from stateflow.settings import ControllerSettings
from stateflow.types import PartitionId, ReplicaInfo, node_of

log = logging.getLogger(__name__)
T = TypeVar("T")
P = ParamSpec("P")
#: characters of an author
AUTHOR_MAX = 128
#: how often what replicas say is waited for
LOOK_S = 0.05
#: a ledger that takes longer is away, and answers do not wait for it
WRITTEN_WITHIN_S = 2.0


def author() -> str:
    """Of records: who asked for what is done here, and for what follows from it; empty: this controller decides. Nodes
    only say how they are."""
    who = caller()
    return "" if who is None or who.role.listens else str(who)[:AUTHOR_MAX]


def _nothing() -> None: ...


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
        self.members = Members(self.cluster.roster.replicas, settings, clock, grace_s)
        self.names = Names(self.cluster, self.members, settings, clock)
        self.replicas = Replicas(self.cluster, self.members, settings, clock, connect, self._command, self._refused)
        self._tasks: set[asyncio.Task[Any]] = set()
        self._recording = 0  # records that are being written, or are to be
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
                self._recording += 1
                try:
                    return await self._loop.run_in_executor(self._records, self._write, author(), work, *arguments)
                finally:
                    self._recording -= 1
            except (HoldLost, LedgerReplaced, WriteUncertain) as error:  # or its outcome is not known: read it anew
                self._end_term(error)
                raise
            except (Unavailable, LedgerReadOnly) as error:
                if self._waited_for != error.what:
                    self._waited_for = error.what
                    log.warning("nothing is decided meanwhile: %s", error)
            await asyncio.sleep(self.settings.retry_interval_s)

    async def knows_what_it_wrote(self) -> None:
        """A record is in the ledger a moment before it is known here, and who does not lead may have told of it by
        then: whoever asks here next is not to be told less."""
        if self._recording:
            before_this = self._loop.run_in_executor(self._records, _nothing)
            await asyncio.wait([before_this], timeout=WRITTEN_WITHIN_S)

    def _write(self, author: str, work: Callable[..., T], *arguments: Any) -> T:
        """In the one thread that writes."""
        self._writer.author = author
        return work(self._writer, *arguments)

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
            for name, info in self.cluster.roster.replicas.items()
            if self.members.alive(name) and not self.cluster.roster.is_stopping(name)
        }

    async def again_and_again(self, look: Callable[[], Awaitable[None]], instead: str) -> None:
        """With each heartbeat, whatever goes wrong: ``instead`` is said then."""
        while True:
            await asyncio.sleep(self.settings.heartbeat_interval_s)
            try:
                await look()
            except StateflowError as error:
                log.warning("%s: %s", instead, error)
            except Exception:
                log.exception("%s", instead)

    async def acquainted(self) -> None:
        """Who leads since a moment ago has heard nobody yet, and would find that nobody answers: whoever was there
        before has as long to be heard as at any other time."""
        while self.members.expects():  # noqa: ASYNC110 - it is over with time, too
            await asyncio.sleep(LOOK_S)

    def may_be_alone(self, name: str, operator: str) -> bool:
        """Whether it may serve partitions of the operator though its lease has lapsed."""
        return self.cluster.failovers.may_be_alone(operator, self.members.said_alone(name))

    def fit(self) -> dict[str, ReplicaInfo]:
        """Those of them that may be given something: whose node is not in maintenance."""
        maintained = self.cluster.maintained()
        return {name: info for name, info in self.alive().items() if node_of(name) not in maintained}

    def least_loaded(self, replicas: Iterable[ReplicaInfo], coming: Mapping[str, int]) -> ReplicaInfo:
        """The one with the fewest partitions for its weight, those ``coming`` counted."""
        owned = self.cluster.owned_counts()

        def load(info: ReplicaInfo) -> tuple[float, str]:
            return (owned.get(info.name, 0) + coming.get(info.name, 0)) / max(info.weight, 1), info.name

        return min(replicas, key=load)

    def check_site(self, name: str) -> None:
        """Raises UnknownSite."""
        sites = sorted({info.site for info in self.cluster.roster.replicas.values()})
        if name not in sites:
            replicas = sorted(self.cluster.roster.replicas)
            raise UnknownSite(
                f"there is no site or replica {name!r}",
                remedy=f"use a site ({', '.join(sites) or 'none'}) or a replica ({', '.join(replicas) or 'none'})",
            )

    def check_not_restored(self, partition: PartitionId) -> None:
        """Raises MoveConflict while a restore of the partition is under way."""
        for planned in self.cluster.restores.under_way:
            if planned.partition == partition:
                raise MoveConflict(
                    "the partition is being restored",
                    remedy="wait until that has ended",
                    partition=partition,
                    restore=planned.restore_id,
                )

    async def learnt(self, pairs: Collection[tuple[str, str]]) -> set[tuple[str, str]]:
        """Those of these (replica, operator) that have the operator, or fetch it: not to be awaited with ``planning``
        held, as that may take minutes."""
        able = set()
        for name, operator in sorted(pairs):
            try:
                await self.replicas.learn(name, self.cluster.operator(operator).spec)
                able.add((name, operator))
            except StateflowError as error:
                log.warning("%s does not have %s: %s", name, operator, error)
        return able

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
