"""Sans-io part of the router: positions that a source has reached, routing tables, and the delivery of one batch.

A :class:`BatchSession` delivers one batch to the owners of its partitions. The caller carries out the steps that
``poll`` returns, and reports events to the session: answers, signs of life, tables. It reports an output or a refusal
only if ``awaits`` returns True for it. In the table, a route with an older epoch never replaces one with a newer epoch.

Each partition is *outstanding* (sent, no answer yet), *waiting* (to be sent at some time) or *done*. Answers:

* output: the partition is done.
* silence, without even a sign of life, for as long as the batch may be without an owner: the batch fails.
* no answer for a while: the router asks the controller for the table, and sends the partition to its new owner, if
  there is one by then; an answer of the former owner is ignored.
* moved: the table is corrected, and the partition is sent at once to its new owner. If the answer names no newer owner,
  the router asks for the table.
* refused, retryable (not owner, unavailable): the router asks for the table, and sends the partition after a back-off.
* any other fault: the batch fails once every outstanding answer has arrived. Partitions that applied the batch keep it,
  and skip the batch when it is sent again.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from random import Random  # noqa: TID251 - the type; which one is handed in

from stateflow.errors import BatchIncomplete, Moved, PositionGap, StateflowError, Unavailable
from stateflow.schedule import jittered
from stateflow.types import PartitionId, ReplicaInfo

#: least silence, in seconds, after which a replica counts as having lost a batch; a working replica gives signs of life
#: more often
SILENCE_S_MIN = 15.0

# -- Positions of a source in the partitions of an operator ----------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Reached:
    """Position of a source in one partition.

    Attributes:
        batch: the last batch that the partition contains.
        event_us: newest event time, µs, that the source had reported up to that batch; None: none.
        event_before_us: newest event time, µs, up to the batch before; None: none.
    """

    batch: int
    event_us: int | None = None
    event_before_us: int | None = None


def newest_event_us(reached: Mapping[int, Reached], batch: int) -> int | None:
    """Returns the newest event time, µs, among all rows of a source before ``batch``; None without rows.

    The result is the same for every attempt of a batch, even if some partitions contain the batch already.
    """
    times = [each.event_us if each.batch < batch else each.event_before_us for each in reached.values()]
    return max((time for time in times if time is not None), default=None)


def check_whole(operator: str, source: str, batch: int, partitions: int, reached: Mapping[int, Reached]) -> None:
    """Checks that every partition contains the batch before ``batch``.

    Use it for a source that visits all partitions with each batch. Call it before any part of ``batch`` is sent,
    because a partition that receives neither of the two batches could not report a loss. Partitions without a batch of
    the source are not in ``reached``.

    Raises BatchIncomplete if only the batch before is missing, in some partitions, so that it can be sent again;
    PositionGap if more is missing, because a part of the state was lost.
    """
    last = [reached[partition].batch if partition in reached else -1 for partition in range(partitions)]
    oldest = min(last)
    if oldest >= batch - 1:
        return
    where = {"operator": operator, "source": source, "partition": last.index(oldest), "expected": oldest + 1}
    have = last.count(batch - 1)
    if oldest == batch - 2 and max(last) == batch - 1:
        raise BatchIncomplete(
            f"batch {batch} was sent, but batch {batch - 1} is in only {have} of {partitions} partitions",
            remedy="make the query's sink evaluate each batch completely (take, first, show and isEmpty do not); "
            f"then rewind: stateflow spark rewind CHECKPOINT --to-batch {batch - 1} --apply",
            **where,
        )
    raise PositionGap(
        f"batch {batch} was sent, the state expects batch {oldest + 1}",
        remedy=f"rewind the source to batch {oldest + 1}",
        **where,
    )


# -- Routes ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Route:
    owner: str
    address: str
    epoch: int


@dataclass(slots=True)
class RoutingTable:
    """Partition → route, as last reported.

    Attributes:
        version: version of the assignment.
        unserved: partition → why no replica serves it.
        addresses: owners' advertised addresses → addresses as seen from here, if they differ.
    """

    operator: str
    version: int
    routes: list[Route]
    unserved: dict[int, StateflowError] = field(default_factory=dict)
    addresses: Mapping[str, str] = field(default_factory=dict)

    def route(self, owner: str, address: str, epoch: int) -> Route:
        """Returns the route to an owner by its advertised address, translated to the address as seen from here."""
        return Route(owner, self.addresses.get(address, address), epoch)

    def update(self, partition: int, route: Route) -> None:
        """Stores a route if its epoch is newer; an older epoch never replaces a newer one."""
        if route.epoch > self.routes[partition].epoch:
            self.routes[partition] = route

    def merge(self, other: RoutingTable) -> None:
        """Merges the controller's table, except routes for which a redirect named a newer epoch."""
        for partition, route in enumerate(other.routes):
            known = self.routes[partition]
            if route.epoch >= known.epoch:
                self.routes[partition] = route
        self.version = max(self.version, other.version)
        self.unserved = other.unserved

    def no_owner(self, partition: int, waited_s: float, last: StateflowError) -> StateflowError:
        """Returns the error for a partition that had no answering owner for too long.

        If the controller gave a reason, that is the error.
        """
        known = self.unserved.get(partition)
        if known is not None:
            known.located(waited_s=f"{waited_s:.0f}")
            return known
        return Unavailable(
            f"no owner answered for {waited_s:.0f} s; last error: {last.what}",
            remedy="start the replica that owns the partition, then send the batch again",
            partition=PartitionId(self.operator, partition),
            owner=self.routes[partition].owner,
        )


# -- Delivery of a batch ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Send:
    """Instruction to send the rows of ``parts``: (partition, epoch at which its owner is believed to own it)."""

    address: str
    parts: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class Refresh:
    """Instruction to ask the controller for the table, then to call ``refreshed`` or ``not_refreshed``."""


@dataclass(frozen=True, slots=True)
class Wait:
    """Instruction to wait for an answer; until then, or until ``seconds`` have passed, there is nothing else to do."""

    seconds: float


Instruction = Send | Refresh | Wait


@dataclass(frozen=True, slots=True)
class Waiting:
    """Partitions of a batch that have no answering owner.

    Attributes:
        partitions: number of these partitions.
        partition: the one that has waited for longest.
        owner: last known owner of ``partition``.
        seconds: how long ``partition`` has waited.
        error: the last error.
    """

    partitions: int
    partition: int
    owner: str
    seconds: float
    error: str


@dataclass(frozen=True, slots=True)
class Delivery:
    """Result of a batch that all its partitions have applied.

    Replicas work in parallel, and each works on one partition after another. The times of the replica that spent most
    on the batch are therefore the part of the sending time that replicas account for.

    Attributes:
        outputs: partition → Arrow record batch message, ``b""`` for none.
        replayed: number of partitions that already contained the batch.
        operator_us: time in the operator at the replica that spent most, µs.
        commit_us: time in commits at that replica, µs.
    """

    outputs: dict[int, bytes]
    replayed: int
    operator_us: int
    commit_us: int


@dataclass(slots=True)
class BatchSession:
    """State of one batch.

    Args:
        timeout_s: seconds for which a partition may stay without a reachable owner before the batch fails. The time in
            which an owner works on the batch does not count.
        random: source of random numbers for the pauses, so that the clients of a failed replica do not all retry at
            once.
        backoff_max_s: longest pause, before it is varied.
    """

    table: RoutingTable
    partitions: Iterable[int]
    timeout_s: float
    random: Random
    backoff_initial_s: float = 0.02
    backoff_max_s: float = 0.25
    silence_s_min: float = SILENCE_S_MIN
    outputs: dict[int, bytes] = field(default_factory=dict)
    replayed: int = 0
    _spent_us: dict[str, tuple[int, int]] = field(default_factory=dict)  # address → µs in operator, in commit
    _waiting: dict[int, float] = field(default_factory=dict)  # partition → earliest time to send
    _outstanding: dict[int, Route] = field(default_factory=dict)  # partition → route by which it was sent
    _failing_since: dict[int, float] = field(default_factory=dict)
    _sent_at: dict[int, float] = field(default_factory=dict)
    _heard: dict[str, float] = field(default_factory=dict)  # address → when it last answered, or was sent something
    _tries: dict[int, int] = field(default_factory=dict)
    _pauses: dict[int, float] = field(default_factory=dict)  # number of tries → pause after them
    _refresh_wanted: bool = False
    _error: StateflowError | None = None
    _last_error: str = ""

    def __post_init__(self) -> None:
        self._waiting = dict.fromkeys(self.partitions, -math.inf)

    @property
    def done(self) -> bool:
        """Tells whether all outputs have arrived, or the batch has failed and no answer is outstanding."""
        return not self._outstanding and (self._error is not None or not self._waiting)

    def result(self) -> dict[int, bytes]:
        """Returns partition → output. Raises the error of a failed batch."""
        if self._error is not None:
            raise self._error
        return self.outputs

    def delivery(self) -> Delivery:
        """Returns the result with the time that replicas spent. Raises the error of a failed batch."""
        operator_us, commit_us = max(self._spent_us.values(), key=sum, default=(0, 0))
        return Delivery(self.result(), self.replayed, operator_us, commit_us)

    def poll(self, now: float) -> list[Instruction]:
        """Returns the steps to take at ``now``. Poll again after a Refresh."""
        if self._error is not None or not self._waiting:
            return []
        if self._refresh_wanted:
            return [Refresh()]
        due = [partition for partition, at in self._waiting.items() if at <= now]
        if not due:
            return [Wait(min(self._waiting.values()) - now)]
        by_address: dict[str, list[tuple[int, int]]] = {}
        for partition in due:
            route = self.table.routes[partition]
            del self._waiting[partition]
            self._outstanding[partition], self._sent_at[partition] = route, now
            by_address.setdefault(route.address, []).append((partition, route.epoch))
        for address in by_address:
            self._heard[address] = now
        sends: list[Instruction] = [Send(address, tuple(parts)) for address, parts in by_address.items()]
        return [*sends, Wait(min(self._waiting.values()) - now)] if self._waiting else sends

    def waits(self, now: float) -> Waiting | None:
        """Describes the partitions that have no answering owner; None: there are none."""
        silent = {p for p, sent in self._outstanding.items() if self._heard[sent.address] <= self._sent_at[p]}
        since = {p: at for p, at in self._failing_since.items() if p in self._waiting or p in silent}
        if not since or self._error is not None:
            return None
        partition = min(since, key=lambda each: since[each])
        owner = self.table.routes[partition].owner
        return Waiting(len(since), partition, owner, now - since[partition], self._last_error)

    # -- answers ------------------------------------------------------------------------------------------

    def answered(self, partition: int, output: bytes, replayed: bool, operator_us: int = 0, commit_us: int = 0) -> None:
        sent = self._outstanding.pop(partition, None)
        if sent is not None:
            self.outputs[partition] = output
            self.replayed += replayed
            in_operator, in_commit = self._spent_us.get(sent.address, (0, 0))
            self._spent_us[sent.address] = in_operator + operator_us, in_commit + commit_us

    def passed(self, partitions: Iterable[int], address: str) -> None:
        """Completes partitions that skipped the batch: they contain it now, and have no output."""
        for partition in partitions:
            sent = self._outstanding.get(partition)
            if sent is not None and sent.address == address:
                del self._outstanding[partition]
                self.outputs[partition] = b""

    def refused(self, partition: int, error: StateflowError, now: float) -> None:
        sent = self._outstanding.pop(partition, None)
        if sent is None:
            return
        if "partition" not in error.where:  # otherwise the replica may have waited all the time for the partition
            self._leave_out_work(partition, sent)
        if isinstance(error, Moved):
            where = error.where
            self.table.update(partition, self.table.route(where["owner"], where["address"], int(where["epoch"])))
            leads_on = self.table.routes[partition] != sent
            self._refresh_wanted |= not leads_on  # the answer named nothing newer: ask the controller
            self._again(partition, error, now, at_once=leads_on and self._tries.get(partition, 0) == 0)
        elif error.retryable:
            self._refresh_wanted = True
            self._again(partition, error, now)
        else:
            self._fail(error)

    def refreshed(self, table: RoutingTable) -> None:
        """Merges the controller's table. Partitions with another owner stop waiting, because their pause was for the
        former owner."""
        self._refresh_wanted = False
        before = {partition: self.table.routes[partition] for partition in self._waiting}
        self.table.merge(table)
        for partition, route in before.items():
            if self.table.routes[partition] != route:
                self._waiting[partition] = -math.inf

    def awaits(self, partition: int, address: str) -> bool:
        """Tells whether an answer from ``address`` is outstanding.

        An answer from another address is too late, because the partition was sent elsewhere since.
        """
        sent = self._outstanding.get(partition)
        return sent is not None and sent.address == address

    @property
    def asked(self) -> set[str]:
        """Addresses from which answers are outstanding."""
        return {sent.address for sent in self._outstanding.values()}

    def heard(self, address: str, at: float) -> None:
        """Notes a replica's sign of life: it works on the batch."""
        self._heard[address] = max(at, self._heard.get(address, at))

    def check_silence(self, now: float) -> dict[str, float]:
        """Treats silent replicas as having lost the batch. Returns address → time since which it is silent.

        A replica that is still working gives a sign of life every few seconds.
        """
        silence_s = max(self.timeout_s, self.silence_s_min)
        silent: dict[str, float] = {}
        for partition, sent in list(self._outstanding.items()):
            since = self._heard[sent.address]
            if now - since > silence_s:
                self._failing_since[partition] = self._sent_at[partition] = since
                what = f"{sent.address} received the batch and has been silent for {now - since:.0f} s"
                silent[sent.address] = since
                self.refused(partition, Unavailable(what, remedy="check the replica's log"), now)
        return silent

    def reroute(self, now: float) -> None:
        """Sends parts that are outstanding at a former owner, which may hang, to the new owner.

        Call it after a refresh of the table while answers take long. If both owners receive the batch, the source's
        position shows that it is the same batch.
        """
        for partition, sent in list(self._outstanding.items()):
            if self.table.routes[partition].address != sent.address:
                del self._outstanding[partition]
                self._leave_out_work(partition, sent)
                self._waiting[partition] = now

    def not_refreshed(self, error: StateflowError) -> None:
        """Keeps the known table, because the controller did not answer. Back-off and time-out limit the attempts."""
        self._refresh_wanted = False
        if not error.retryable:
            self._fail(error)

    def _leave_out_work(self, partition: int, sent: Route) -> None:
        """Leaves out of a partition's time without an owner the time in which a replica worked on the batch."""
        if partition in self._failing_since:
            self._failing_since[partition] += max(0.0, self._heard[sent.address] - self._sent_at[partition])

    def _again(self, partition: int, error: StateflowError, now: float, at_once: bool = False) -> None:
        since = self._failing_since.setdefault(partition, now)
        self._last_error = error.what
        if now - since > self.timeout_s:
            self._fail(self.table.no_owner(partition, now - since, error))
            return
        tries = self._tries[partition] = self._tries.get(partition, 0) + 1
        self._waiting[partition] = now if at_once else now + self._pause_s(tries)

    def _pause_s(self, tries: int) -> float:
        """Returns the pause after ``tries`` tries.

        All partitions have the same pause, so that one message can carry all partitions of an owner.
        """
        if tries not in self._pauses:
            pause_s = min(self.backoff_max_s, self.backoff_initial_s * 2 ** min(tries - 1, 20))
            self._pauses[tries] = jittered(pause_s, self.random)
        return self._pauses[tries]

    def _fail(self, error: StateflowError) -> None:
        if self._error is None:
            self._error = error


def table_of(
    operator: str,
    version: int,
    owners: Iterable[ReplicaInfo],
    epochs: Iterable[int],
    unserved: Mapping[int, StateflowError] | None = None,
    addresses: Mapping[str, str] | None = None,
) -> RoutingTable:
    table = RoutingTable(operator, version, [], dict(unserved or {}), addresses or {})
    table.routes = [table.route(info.name, info.address, epoch) for info, epoch in zip(owners, epochs, strict=True)]
    return table
