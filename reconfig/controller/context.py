"""The context that the parts of a controller share: leadership, the cluster's state and its one writer, members, calls
to replicas, tasks."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
from collections.abc import Awaitable, Callable, Collection, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from random import Random  # noqa: TID251 - the type; which one is handed in
from typing import Any, Concatenate, ParamSpec, TypeVar

import grpc.aio

from reconfig.controller.cluster_state import ClusterState
from reconfig.controller.members import Members, Names
from reconfig.controller.replicas import Replicas
from reconfig.controller.steps import Ending, Step
from stateflow.clock import Clock
from stateflow.errors import (
    HoldLost,
    LeaseLost,
    LedgerReadOnly,
    LedgerReplaced,
    Locked,
    MoveConflict,
    StaleTerm,
    StateflowError,
    Unavailable,
    UnknownSite,
    WriteUncertain,
)
from stateflow.ledger import Entry, Ledger, Record
from stateflow.partition.control import Command
from stateflow.rpc.serving import asker
from stateflow.schedule import jittered
from stateflow.security.roles import AUTHOR_MAX
from stateflow.settings import ControllerSettings
from stateflow.types import PartitionId, ReplicaInfo, node_of

log = logging.getLogger(__name__)
T = TypeVar("T")
P = ParamSpec("P")
#: number of times that a leader lease is renewed within its duration
RENEWALS = 3
#: seconds between two checks of a condition that a loop waits for
LOOK_S = 0.05
#: seconds that an answer waits for records being written; a ledger that takes longer is unavailable
WRITTEN_WITHIN_S = 2.0
#: records folded at a time, so that leases are renewed while a large plan is folded
FOLDED_AT_ONCE = 100


@dataclass(slots=True)
class Leadership:
    """The right of this controller to decide, by its leader lease; see :mod:`reconfig.controller.leading`.

    ``until`` is the end of the lease, in monotonic seconds. By default the lease never expires, for a single controller
    and for tests. ``cold_until`` is the time until which owners that have not registered yet are waited for, because
    the term began with a cold start; minus infinity: it did not.
    """

    term: int = 1
    lease_s: float = math.inf
    until: float = math.inf
    cold_until: float = -math.inf

    def renewed(self, sent_at: float) -> None:
        self.until = max(self.until, sent_at + self.lease_s)

    def left_s(self, now: float) -> float:
        return self.until - now

    @property
    def renew_s(self) -> float:
        return self.lease_s / RENEWALS

    def check(self, now: float) -> None:
        """Checks that the leader lease has not lapsed. Raises HoldLost. Callers check before they grant a lease, send a
        command or write a record."""
        if now >= self.until:
            raise HoldLost(
                "this controller could not renew its leader lease: another one may lead by now",
                remedy="check the ledger's database; this controller leads again unless another takes the lease",
                term=self.term,
            )


def author() -> str:
    """Returns the author to record: the caller whose request the current task carries out, with the user for whom it
    calls. Empty: the controller decided by itself, or a member of the cluster reported its state. A node that asks for
    a move is an author."""
    who = asker()
    return "" if who is None else str(who)[:AUTHOR_MAX]


class Writer:
    """The one writer of a cluster's state. Not thread-safe: a step is written and folded before the next is decided.

    ``check`` is called before each write. It raises if this controller no longer leads, because no controller would
    carry out the decision.

    Args:
        term: the term in which the writer writes; None: the ledger has no leader.
    """

    def __init__(self, ledger: Ledger, cluster: ClusterState, term: int | None = None) -> None:
        self.ledger, self.cluster, self._term = ledger, cluster, term
        self.check: Callable[[], None] = lambda: None
        self._unsure: WriteUncertain | None = None  # set: the state may differ from the ledger

    @classmethod
    def read(cls, ledger: Ledger, term: int | None = None, validated: bool = False) -> Writer:
        """Reads the ledger, and returns a writer for ``term``. Once another term has begun, the ledger refuses the
        records of this writer."""
        cluster = ClusterState(ledger.clock.now_us, validated=validated)
        for record in ledger.records(archived=True):
            cluster.fold(record)
        return cls(ledger, cluster, term)

    def append(self, step: Step, author: str = "") -> list[Record]:
        """Appends the records of a step, which the caller folds next. Raises WriteUncertain if the outcome is not
        known, and on every later call.

        Args:
            author: the caller that asked for the step; empty: this controller decided it.
        """
        if isinstance(step, Ending):
            try:
                return self._append(step.entries, author)
            except (LeaseLost, Locked):
                again = step.again(self.ledger.items(each.item_id for each in step.entries))
                if not again:
                    raise
                return self._append(again, author)
        return self._append(step, author)

    def _append(self, entries: Sequence[Entry], author: str) -> list[Record]:
        if self._unsure is not None:
            raise self._unsure
        if not entries:
            return []
        try:
            return self.ledger.append(entries, lambda _: self.check(), self._term, author)
        except WriteUncertain as error:
            self._unsure = error
            raise


class ControllerContext:
    """The context that the parts of a controller share during one term.

    Only the event loop changes ``cluster``, by folding records. A step is decided and appended to the ledger in a
    thread, because a large plan takes seconds. Its records are folded before the next step is decided, and before the
    caller that asked for the step continues.

    If the term ends early, the future ``over`` is done, with the reason; from then on nothing can be recorded.
    """

    def __init__(
        self,
        writer: Writer,
        settings: ControllerSettings,
        clock: Clock,
        connect: Callable[[str], grpc.aio.Channel],
        new_id: Callable[[], str],
        leadership: Leadership,
        grace_s: float,
        random: Random,
    ) -> None:
        self.settings, self.clock, self.new_id, self.random = settings, clock, new_id, random
        self.ledger, self.cluster, self._writer, self._leadership = writer.ledger, writer.cluster, writer, leadership
        self.ledger_id = self.ledger.id
        self._writer.check = self.check_leads  # checked again, as a locked database makes the writer wait
        self._planner = ThreadPoolExecutor(1, thread_name_prefix="planner")
        self._records = ThreadPoolExecutor(1, thread_name_prefix="ledger")
        self.members = Members(self.cluster.roster.replicas, settings, clock, grace_s, leadership.cold_until)
        self.names = Names(self.cluster, self.members, settings, clock)
        asked = self.cluster, self.members, settings, clock, connect
        self.replicas = Replicas(*asked, self._command, self._refused, random)
        self._tasks: set[asyncio.Task[Any]] = set()
        self._writing = asyncio.Lock()  # held from when a step is decided until its records are folded
        self._loop = asyncio.get_running_loop()
        self.over: asyncio.Future[StateflowError] = self._loop.create_future()
        self._waited_for = ""  # why a record waits, as last logged
        #: held while a change is planned and recorded, so that its checks still hold
        self.planning = asyncio.Lock()
        #: held while operators are deployed, undeployed or adopted; taken before ``planning``
        self.deploying = asyncio.Lock()

    async def record(
        self, decide: Callable[Concatenate[ClusterState, P], Step], *arguments: P.args, **_: P.kwargs
    ) -> list[Record]:
        """Decides, writes and folds one step, e.g. ``record(steps.grant, move)``. Returns its records; an empty list:
        there was nothing to change. Steps are taken one after another, and each is completed even if the caller is
        cancelled.

        A step waits while the ledger is unavailable or read-only, e.g. during a failover of its database, for as long
        as this controller leads. The wait is bounded, because renewing the leader lease needs the ledger, too. Raises
        the error that ends the term.
        """
        return await asyncio.shield(self.spawn(self._record(decide, *arguments)))

    async def _record(self, decide: Callable[..., Step], *arguments: Any) -> list[Record]:
        while True:
            try:
                self.check_leads()
                async with self._writing:
                    take = self._loop.run_in_executor(self._records, self._take, author(), decide, *arguments)
                    records = await take
                    for number, record in enumerate(records, 1):
                        self.cluster.fold(record)
                        if number % FOLDED_AT_ONCE == 0:
                            await asyncio.sleep(0)
                return records
            except (HoldLost, LedgerReplaced, WriteUncertain) as error:  # an uncertain write: the ledger is read anew
                self._end_term(error)
                raise
            except (Unavailable, LedgerReadOnly) as error:
                if self._waited_for != error.what:
                    self._waited_for = error.what
                    log.warning("ledger not writable, decisions paused: %s", error)
            await self.pause()

    def _take(self, author: str, decide: Callable[..., Step], *arguments: Any) -> list[Record]:
        """Decides a step and appends its records, in the thread. Callers hold ``_writing``, so the state is fixed."""
        return self._writer.append(decide(self.cluster, *arguments), author)

    async def pause(self) -> None:
        """Waits before a failed step is tried again. The wait varies, because one fault may have failed many steps."""
        await asyncio.sleep(jittered(self.settings.retry_interval_s, self.random))

    async def knows_what_it_wrote(self) -> None:
        """Waits until all records written so far are folded, but at most ``WRITTEN_WITHIN_S``. A record reaches the
        ledger a moment before it is folded here, and a follower may already have reported it. The leader's next answer
        should not be older than that report.
        """
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(WRITTEN_WITHIN_S), self._writing:
                pass

    # -- the term -----------------------------------------------------------------------------------------

    @property
    def term(self) -> int:
        return self._leadership.term

    def check_leads(self) -> None:
        """Checks that this controller leads. Raises HoldLost, also if the term has ended early: then this controller
        may lack some of the decisions.
        """
        self._leadership.check(self.clock.monotonic())
        if self.over.done():
            raise HoldLost(
                f"this controller's term is over: {self.over.result()}",
                remedy="ask the controller that leads now",
                term=self.term,
            )

    def _end_term(self, error: StateflowError) -> None:
        if not self.over.done():
            self.over.set_result(error)

    async def aside(self, work: Callable[P, T], *arguments: P.args, **_: P.kwargs) -> T:
        """Runs long work in a thread, so that the event loop can renew leases. The work must not use the context."""
        return await self._loop.run_in_executor(self._planner, work, *arguments)

    # -- replicas -----------------------------------------------------------------------------------------

    def _command(self, name: str) -> Command:
        """Returns the fencing token for a call to a replica. Raises HoldLost, and Unavailable for a replica that has
        not registered."""
        self.check_leads()
        session = self.members.session(name)
        if not session:
            raise Unavailable(f"{name} has not registered yet", remedy="check that it runs; it registers by itself")
        return Command(self.ledger_id, self.term, session)

    def _refused(self, error: StateflowError) -> None:
        if isinstance(error, StaleTerm):  # the replica knows a controller of a later term
            self._end_term(error)

    def alive(self) -> dict[str, ReplicaInfo]:
        """Returns the replicas to plan with: those that send heartbeats and that no agent was told to stop."""
        return {
            name: info
            for name, info in self.cluster.roster.replicas.items()
            if self.members.alive(name) and not self.cluster.roster.is_stopping(name)
        }

    async def again_and_again(self, look: Callable[[], Awaitable[None]], instead: str) -> None:
        """Calls ``look`` once in each heartbeat interval. Errors do not end the loop; they are logged with ``instead``,
        which says what was not done.

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
        """Waits until every replica known before this term has sent a heartbeat, or has been silent for
        ``members.silence_s``. Without this wait, a new leader would find that no replica answers."""
        while self.members.expects():  # noqa: ASYNC110 - the wait ends with time, too
            await asyncio.sleep(LOOK_S)

    def may_be_alone(self, name: str, operator: str) -> bool:
        """Tells whether a replica may serve partitions of an operator though its lease has lapsed."""
        return self.cluster.failovers.may_be_alone(operator, self.members.said_alone(name))

    def fit(self) -> dict[str, ReplicaInfo]:
        """Returns the replicas of :meth:`alive` that may receive partitions: their nodes are not in maintenance."""
        maintained = self.cluster.maintained()
        return {name: info for name, info in self.alive().items() if node_of(name) not in maintained}

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
        """Tells replicas to load operators; a replica that lacks the code fetches it. Returns the (replica, operator)
        pairs for which this succeeded. Callers must not hold ``planning``, because fetching may take minutes."""
        able = set()
        for name, operator in sorted(pairs):
            try:
                await self.replicas.learn(name, self.cluster.operator(operator).spec)
                able.add((name, operator))
            except StateflowError as error:
                log.warning("replica %s did not load operator %s: %s", name, operator, error)
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
