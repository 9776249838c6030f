"""One batch on its way to the owners of its partitions: a sans-io state machine.

Each partition is *outstanding* (sent, no answer yet), *waiting* (to be sent at some time) or *done*. Answers:

* output: done.
* nothing, not even that it is being worked on, for as long as the batch may be without an owner: it fails.
* none for a while: the table is asked for, and what has a new owner by now is sent there; the old answer is ignored.
* moved: the table is corrected and the partition sent again at once, to its new owner; where that is no news, the
  table is asked for.
* refused, retryable (not owner, unavailable): the table is asked for again, and the partition sent after a back-off.
* any other fault: the batch fails, after every outstanding answer is in; what was applied stays applied, and a
  retry of the batch finds it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from stateflow.errors import Moved, StateflowError, Unavailable
from stateflow.types import PartitionId, ReplicaInfo

#: a replica at work says so more often than this
SILENCE_S_MIN = 15.0


@dataclass(frozen=True, slots=True)
class Route:
    owner: str
    address: str
    epoch: int


@dataclass(slots=True)
class RoutingTable:
    """Partition → route, as last heard. ``version`` is the assignment's; ``unserved``: why nobody serves it, of
    those. ``addresses``: of owners, as they say → as seen from here, where that is another."""

    operator: str
    version: int
    routes: list[Route]
    unserved: dict[int, StateflowError] = field(default_factory=dict)
    addresses: Mapping[str, str] = field(default_factory=dict)

    def route(self, owner: str, address: str, epoch: int) -> Route:
        """To an owner at the address that it says of itself, and is reached at from here."""
        return Route(owner, self.addresses.get(address, address), epoch)

    def update(self, partition: int, route: Route) -> None:
        """A newer epoch replaces an older one, never the reverse."""
        if route.epoch > self.routes[partition].epoch:
            self.routes[partition] = route

    def merge(self, other: RoutingTable) -> None:
        """What the controller says, except where a redirect told of a newer epoch."""
        for partition, route in enumerate(other.routes):
            known = self.routes[partition]
            if route.epoch >= known.epoch:
                self.routes[partition] = route
        self.version = max(self.version, other.version)
        self.unserved = other.unserved

    def no_owner(self, partition: int, waited_s: float, last: StateflowError) -> StateflowError:
        """What to say when a partition had no owner that answers for too long: why, where the controller knows."""
        known = self.unserved.get(partition)
        if known is not None:
            known.located(waited_s=f"{waited_s:.0f}")
            return known
        return Unavailable(
            f"no owner answered for {waited_s:.0f} s; last: {last.what}",
            remedy="start the replica that owns it; the batch can then be sent again",
            partition=PartitionId(self.operator, partition),
            owner=self.routes[partition].owner,
        )


# -- instructions ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Send:
    """Send these partitions, each with the epoch its owner is believed to have it at."""

    address: str
    parts: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class Refresh:
    """Ask the controller for the table, then call ``refreshed`` or ``not_refreshed``."""


@dataclass(frozen=True, slots=True)
class Wait:
    """Nothing to do before this many seconds have passed, or an answer comes."""

    seconds: float


Instruction = Send | Refresh | Wait


@dataclass(frozen=True, slots=True)
class Waiting:
    """``partitions`` of a batch have no owner that answers; ``partition`` has had none for ``seconds``."""

    partitions: int
    partition: int
    owner: str
    seconds: float
    error: str


@dataclass(frozen=True, slots=True)
class Delivery:
    """A batch that is applied everywhere.

    ``outputs``: partition → Arrow record batch message, ``b""`` for none. ``replayed``: partitions that contained it
    already. ``operator_us`` and ``commit_us``: of the replica that spent most on the batch, as replicas work side by
    side and each on one partition after another: that much of the time it took to send is accounted for.
    """

    outputs: dict[int, bytes]
    replayed: int
    operator_us: int
    commit_us: int


@dataclass(slots=True)
class BatchSession:
    """Args: timeout_s: how long a partition may stay without a reachable owner before the batch fails."""

    table: RoutingTable
    partitions: Iterable[int]
    timeout_s: float
    backoff_initial_s: float = 0.02
    backoff_max_s: float = 0.25
    silence_s_min: float = SILENCE_S_MIN
    outputs: dict[int, bytes] = field(default_factory=dict)
    replayed: int = 0
    _spent_us: dict[str, tuple[int, int]] = field(default_factory=dict)  # address → in operator, in commit
    _waiting: dict[int, float] = field(default_factory=dict)  # partition → not before
    _outstanding: dict[int, Route] = field(default_factory=dict)  # partition → by which it was sent
    _failing_since: dict[int, float] = field(default_factory=dict)
    _heard: dict[str, float] = field(default_factory=dict)  # address → when last, or when it was sent something
    _tries: dict[int, int] = field(default_factory=dict)
    _refresh_wanted: bool = False
    _error: StateflowError | None = None
    _last_error: str = ""

    def __post_init__(self) -> None:
        self._waiting = dict.fromkeys(self.partitions, -math.inf)

    @property
    def done(self) -> bool:
        """All outputs are there, or it failed and nothing is outstanding."""
        return not self._outstanding and (self._error is not None or not self._waiting)

    def result(self) -> dict[int, bytes]:
        """Partition → output. Raises the error the batch failed with."""
        if self._error is not None:
            raise self._error
        return self.outputs

    def delivery(self) -> Delivery:
        """What :meth:`result` returns, and what it took. Raises the error the batch failed with."""
        operator_us, commit_us = max(self._spent_us.values(), key=sum, default=(0, 0))
        return Delivery(self.result(), self.replayed, operator_us, commit_us)

    def poll(self, now: float) -> list[Instruction]:
        """What to do at ``now``. After a Refresh poll again."""
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
            self._outstanding[partition] = route
            by_address.setdefault(route.address, []).append((partition, route.epoch))
        for address in by_address:
            self._heard[address] = now
        sends: list[Instruction] = [Send(address, tuple(parts)) for address, parts in by_address.items()]
        return [*sends, Wait(min(self._waiting.values()) - now)] if self._waiting else sends

    def waits(self, now: float) -> Waiting | None:
        """The partition that has been without an owner's answer for longest; None when all goes well."""
        since = {p: at for p, at in self._failing_since.items() if p in self._waiting or p in self._outstanding}
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
        """These contain the batch, says this replica, which has nothing for them."""
        for partition in partitions:
            sent = self._outstanding.get(partition)
            if sent is not None and sent.address == address:
                del self._outstanding[partition]
                self.outputs[partition] = b""

    def refused(self, partition: int, error: StateflowError, now: float) -> None:
        sent = self._outstanding.pop(partition, None)
        if sent is None:
            return
        if isinstance(error, Moved):
            where = error.where
            self.table.update(partition, self.table.route(where["owner"], where["address"], int(where["epoch"])))
            leads_on = self.table.routes[partition] != sent
            self._refresh_wanted |= not leads_on  # it told of nothing newer: whoever knows is asked
            self._again(partition, error, now, at_once=leads_on and self._tries.get(partition, 0) == 0)
        elif error.retryable:
            self._refresh_wanted = True
            self._again(partition, error, now)
        else:
            self._fail(error)

    def refreshed(self, table: RoutingTable) -> None:
        """Partitions that have another owner now wait no longer: their pause was for the former one."""
        self._refresh_wanted = False
        before = {partition: self.table.routes[partition] for partition in self._waiting}
        self.table.merge(table)
        for partition, route in before.items():
            if self.table.routes[partition] != route:
                self._waiting[partition] = -math.inf

    def awaits(self, partition: int, address: str) -> bool:
        """Is an answer from ``address`` outstanding? One from elsewhere comes too late: the partition went on."""
        sent = self._outstanding.get(partition)
        return sent is not None and sent.address == address

    @property
    def asked(self) -> set[str]:
        """Addresses that answers are outstanding from."""
        return {sent.address for sent in self._outstanding.values()}

    def heard(self, address: str, at: float) -> None:
        """A replica gave a sign of life: it works on the batch."""
        self._heard[address] = max(at, self._heard.get(address, at))

    def check_silence(self, now: float) -> dict[str, float]:
        """Replicas that take longer say so every few seconds. One that says nothing has lost the batch. Returns since
        when, by address."""
        silence_s = max(self.timeout_s, self.silence_s_min)
        silent: dict[str, float] = {}
        for partition, sent in list(self._outstanding.items()):
            since = self._heard[sent.address]
            if now - since > silence_s:
                self._failing_since[partition] = since
                what = f"{sent.address} took the batch and said nothing for {now - since:.0f} s"
                silent[sent.address] = since
                self.refused(partition, Unavailable(what, remedy="see its log"), now)
        return silent

    def reroute(self, now: float) -> None:
        """The table was refreshed while answers are long in coming: what was sent to a former owner, which may hang,
        goes to the new one. A batch that both apply is told apart by its position."""
        for partition, sent in list(self._outstanding.items()):
            if self.table.routes[partition].address != sent.address:
                del self._outstanding[partition]
                self._waiting[partition] = now

    def not_refreshed(self, error: StateflowError) -> None:
        """The controller did not answer: go on with what is known. Back-off and time-out limit the attempts."""
        self._refresh_wanted = False
        if not error.retryable:
            self._fail(error)

    def _again(self, partition: int, error: StateflowError, now: float, at_once: bool = False) -> None:
        since = self._failing_since.setdefault(partition, now)
        self._last_error = error.what
        if now - since > self.timeout_s:
            self._fail(self.table.no_owner(partition, now - since, error))
            return
        tries = self._tries[partition] = self._tries.get(partition, 0) + 1
        pause = 0.0 if at_once else min(self.backoff_max_s, self.backoff_initial_s * 2 ** min(tries - 1, 20))
        self._waiting[partition] = now + pause

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
