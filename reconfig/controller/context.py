"""The context that the parts of a controller share: the cluster's state and its one writer, members, calls to replicas,
tasks."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection, Coroutine, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Concatenate, ParamSpec, TypeVar

import grpc.aio

from reconfig.controller.cluster_state import ClusterState
from reconfig.controller.members import Members, Names
from reconfig.controller.replicas import Replicas
from reconfig.decisions.leadership import Leadership
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
from stateflow.partition.control import Command
from stateflow.rpc.serving import caller
from stateflow.settings import ControllerSettings
from stateflow.types import PartitionId, ReplicaInfo, node_of

log = logging.getLogger(__name__)
T = TypeVar("T")
P = ParamSpec("P")
#: the most characters of an author
AUTHOR_MAX = 128
#: seconds between looks, while replicas are waited for
LOOK_S = 0.05
#: seconds that an answer waits for records being written; a ledger that takes longer is unavailable
WRITTEN_WITHIN_S = 2.0


def author() -> str:
    """Returns the author for records: the caller that asked for what the current task does. Empty: the controller
    decided by itself, or a node, agent or controller called, as these only report their state."""
    who = caller()
    return "" if who is None or who.role.listens else str(who)[:AUTHOR_MAX]


def _nothing() -> None: ...


@dataclass(frozen=True, slots=True)
class ClusterStates:
    """Two folds of the same records: one that the event loop reads, and one that appends in a thread."""

    read_by_loop: ClusterState
    writer: ClusterState

    @classmethod
    def read(cls, ledger: Ledger, term: int | None = None, validated: bool = False) -> ClusterStates:
        """Reads the ledger. ``term``: the term in which it is read and written. A write of an earlier term may still be
        on its way."""
        mirror = ClusterState(ledger, validated=validated)
        return cls(mirror, ClusterState.read(ledger, mirror, term, validated))


class ControllerContext:
    """The shared context of one term.

    Only the event loop reads and changes ``cluster``. A second cluster state, the writer, appends to the ledger in a
    thread; each of its records is folded into ``cluster`` before the caller that asked for it goes on.

    ``over`` is done when the term has ended early, with the reason: nothing more can be recorded.
    """

    def __init__(
        self,
        ledger: Ledger,
        settings: ControllerSettings,
        clock: Clock,
        connect: Callable[[str], grpc.aio.Channel],
        new_id: Callable[[], str],
        leadership: Leadership,
        states: ClusterStates,
        grace_s: float,
    ) -> None:
        self.settings, self.clock, self.new_id = settings, clock, new_id
        self.ledger_id, self._leadership = ledger.id, leadership
        self.cluster, self._writer = states.read_by_loop, states.writer
        self._writer.on_record = self._fold_in_loop
        self._writer.check = self.check_leads  # checked again, as a locked database makes the writer wait
        self._planner = ThreadPoolExecutor(1, thread_name_prefix="planner")
        self._records = ThreadPoolExecutor(1, thread_name_prefix="ledger")  # one: the writer is not thread-safe
        self.members = Members(self.cluster.roster.replicas, settings, clock, grace_s)
        self.names = Names(self.cluster, self.members, settings, clock)
        self.replicas = Replicas(self.cluster, self.members, settings, clock, connect, self._command, self._refused)
        self._tasks: set[asyncio.Task[Any]] = set()
        self._recording = 0  # steps being written, or waiting for the writer
        self._loop = asyncio.get_running_loop()
        self.over: asyncio.Future[StateflowError] = self._loop.create_future()
        self._waited_for = ""  # why a record waits, as last logged
        #: held while a change is planned and recorded, so that what was checked still holds
        self.planning = asyncio.Lock()
        #: held while operators are deployed, undeployed or adopted; taken before ``planning``
        self.deploying = asyncio.Lock()

    def _fold_in_loop(self, record: Record) -> None:
        self._loop.call_soon_threadsafe(self.cluster.fold, record)

    async def record(self, work: Callable[Concatenate[ClusterState, P], T], *arguments: P.args, **_: P.kwargs) -> T:
        """Takes one durable step, e.g. ``record(ClusterState.grant, move)``, and returns its result. Steps run one
        after another, off the event loop, and to their end even if the caller is cancelled.

        A step waits while the ledger is unavailable or read-only, e.g. during a failover of its database, for as long
        as this controller leads; the lead ends with time, as renewing the hold is a write, too. Raises the error that
        ends the term.
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
            except (HoldLost, LedgerReplaced, WriteUncertain) as error:  # an uncertain write: the ledger is read anew
                self._end_term(error)
                raise
            except (Unavailable, LedgerReadOnly) as error:
                if self._waited_for != error.what:
                    self._waited_for = error.what
                    log.warning("ledger not writable, decisions paused: %s", error)
            await asyncio.sleep(self.settings.retry_interval_s)

    async def knows_what_it_wrote(self) -> None:
        """Waits until all records written so far are folded. A record is in the ledger a moment before it is known
        here, and a follower may have reported it by then: the leader's next answer must not know less."""
        if self._recording:
            before_this = self._loop.run_in_executor(self._records, _nothing)
            await asyncio.wait([before_this], timeout=WRITTEN_WITHIN_S)

    def _write(self, author: str, work: Callable[..., T], *arguments: Any) -> T:
        """Takes a step in the writer's thread."""
        self._writer.author = author
        return work(self._writer, *arguments)

    # -- the term -----------------------------------------------------------------------------------------

    @property
    def term(self) -> int:
        return self._leadership.term

    def check_leads(self) -> None:
        """Checks that this controller leads. Raises HoldLost, also if the term has ended early: then this controller
        may not know all that was decided."""
        self._leadership.check(self.clock.monotonic())
        if self.over.done():
            raise HoldLost(
                f"the term is over: {self.over.result()}", remedy="ask the controller that leads now", term=self.term
            )

    def _end_term(self, error: StateflowError) -> None:
        if not self.over.done():
            self.over.set_result(error)

    async def aside(self, work: Callable[P, T], *arguments: P.args, **_: P.kwargs) -> T:
        """Runs long work, which must not use the context, in a thread, so that leases are renewed meanwhile."""
        return await self._loop.run_in_executor(self._planner, work, *arguments)

    # -- replicas -----------------------------------------------------------------------------------------

    def _command(self, name: str) -> Command:
        """Returns the authority for a call to a replica. Raises HoldLost, and Unavailable for a replica that has not
        registered."""
        self.check_leads()
        session = self.members.session(name)
        if not session:
            raise Unavailable(f"{name} has not registered yet", remedy="check that it runs; it registers on its own")
        return Command(self.ledger_id, self.term, session)

    def _refused(self, error: StateflowError) -> None:
        if isinstance(error, StaleTerm):  # the replica has heard a controller of a later term
            self._end_term(error)

    def alive(self) -> dict[str, ReplicaInfo]:
        """Returns the replicas to plan with: those that were heard lately and that no agent was told to stop."""
        return {
            name: info
            for name, info in self.cluster.roster.replicas.items()
            if self.members.alive(name) and not self.cluster.roster.is_stopping(name)
        }

    async def again_and_again(self, look: Callable[[], Awaitable[None]], instead: str) -> None:
        """Calls ``look`` once in each heartbeat interval. Errors do not end the loop; they are logged with ``instead``.

        Never returns.
        """
        while True:
            await asyncio.sleep(self.settings.heartbeat_interval_s)
            try:
                await look()
            except StateflowError as error:
                log.warning("%s: %s", instead, error)
            except Exception:
                log.exception("%s", instead)

    async def acquainted(self) -> None:
        """Waits until every replica that was there before this term was heard, or has been silent for as long as a
        silent replica is waited for at other times. Without that, a new leader would find that no replica answers."""
        while self.members.expects():  # noqa: ASYNC110 - the wait ends with time, too
            await asyncio.sleep(LOOK_S)

    def may_be_alone(self, name: str, operator: str) -> bool:
        """Tells whether a replica may serve partitions of an operator though its lease has lapsed."""
        return self.cluster.failovers.may_be_alone(operator, self.members.said_alone(name))

    def fit(self) -> dict[str, ReplicaInfo]:
        """Returns the replicas of :meth:`alive` that may be given something: their nodes are not in maintenance."""
        maintained = self.cluster.maintained()
        return {name: info for name, info in self.alive().items() if node_of(name) not in maintained}

    def least_loaded(self, replicas: Iterable[ReplicaInfo], coming: Mapping[str, int]) -> ReplicaInfo:
        """Returns the replica with the fewest partitions for its weight. ``coming``: number of further partitions to
        count, by replica."""
        owned = self.cluster.owned_counts()

        def load(info: ReplicaInfo) -> tuple[float, str]:
            return (owned.get(info.name, 0) + coming.get(info.name, 0)) / max(info.weight, 1), info.name

        return min(replicas, key=load)

    def check_site(self, name: str) -> None:
        """Checks that a replica, alive or not, is registered at the site. Raises UnknownSite."""
        sites = sorted({info.site for info in self.cluster.roster.replicas.values()})
        if name not in sites:
            replicas = sorted(self.cluster.roster.replicas)
            raise UnknownSite(
                f"there is no site or replica {name!r}",
                remedy=f"use a site ({', '.join(sites) or 'none'}) or a replica ({', '.join(replicas) or 'none'})",
            )

    def check_not_restored(self, partition: PartitionId) -> None:
        """Checks that no restore of the partition is under way. Raises MoveConflict."""
        for planned in self.cluster.restores.under_way:
            if planned.partition == partition:
                raise MoveConflict(
                    "the partition is being restored",
                    remedy="wait until the restore ends",
                    partition=partition,
                    restore=planned.restore_id,
                )

    async def learnt(self, pairs: Collection[tuple[str, str]]) -> set[tuple[str, str]]:
        """Makes replicas learn operators, fetching their code where they lack it. Returns the pairs of (replica,
        operator) for which that worked. Callers must not hold ``planning``, as fetching may take minutes."""
        able = set()
        for name, operator in sorted(pairs):
            try:
                await self.replicas.learn(name, self.cluster.operator(operator).spec)
                able.add((name, operator))
            except StateflowError as error:
                log.warning("replica %s did not learn operator %s: %s", name, operator, error)
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
