"""What the parts of a controller share: the book and its one writer, members, channels, tasks."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Concatenate, ParamSpec, TypeVar

import grpc.aio

from reconfig.controller.book import Book
from reconfig.controller.members import Members
from stateflow.clock import Clock
from stateflow.errors import MoveConflict, UnknownSite
from stateflow.ledger import Ledger, Record
from stateflow.rpc import replica_pb2_grpc
from stateflow.rpc.wire import connected, remote_error
from stateflow.settings import ControllerSettings
from stateflow.types import PartitionId, ReplicaInfo

T = TypeVar("T")
P = ParamSpec("P")


class Desk:
    """``book`` is read by the event loop and changed by it alone: a second book appends to the ledger in a thread, and
    each of its records is folded here before whoever asked for it goes on."""

    def __init__(
        self,
        ledger: Ledger,
        settings: ControllerSettings,
        clock: Clock,
        connect: Callable[[str], grpc.aio.Channel],
        new_id: Callable[[], str],
    ) -> None:
        self.settings, self.clock, self.new_id = settings, clock, new_id
        self.book = Book(ledger)
        self._writer = Book.read(ledger, mirror=self.book)
        self._writer.on_record = self._fold_in_loop
        self._records = ThreadPoolExecutor(1, thread_name_prefix="ledger")  # one: the writer is not thread-safe
        self.members = Members(self.book.replicas, settings, clock)
        self._connect = connect
        self._channels: dict[str, grpc.aio.Channel] = {}
        self._tasks: set[asyncio.Task[Any]] = set()
        self._loop = asyncio.get_running_loop()
        #: held while a change is planned and recorded, so that what was checked still holds
        self.planning = asyncio.Lock()

    def _fold_in_loop(self, record: Record) -> None:
        self._loop.call_soon_threadsafe(self.book.fold, record)

    async def record(self, work: Callable[Concatenate[Book, P], T], *arguments: P.args, **_: P.kwargs) -> T:
        """One durable step of the book, e.g. ``record(Book.grant, move)``. They happen one after another, off the event
        loop, to the end even where the caller is cancelled."""
        return await asyncio.shield(self._loop.run_in_executor(self._records, work, self._writer, *arguments))

    # -- replicas -----------------------------------------------------------------------------------------

    async def call(self, name: str, method: Callable[[Any], Any], request: Any, timeout_s: float | None = None) -> Any:
        """One RPC to a replica. Raises what it refuses with, or Unavailable."""
        info = self.book.replicas[name]
        channel = self.channel(info.address)
        await connected(channel, f"{name} ({info.address})")
        stub = replica_pb2_grpc.ReplicaServiceStub(channel)
        try:
            return await method(stub)(request, timeout=timeout_s or self.settings.rpc_timeout_s)
        except grpc.aio.AioRpcError as error:
            raise remote_error(error, f"{name} ({info.address})") from error

    def channel(self, address: str) -> grpc.aio.Channel:
        if address not in self._channels:
            self._channels[address] = self._connect(address)
        return self._channels[address]

    def alive(self) -> dict[str, ReplicaInfo]:
        return {name: info for name, info in self.book.replicas.items() if self.members.alive(name)}

    def owned_counts(self) -> dict[str, int]:
        """Partitions by replica, of all operators."""
        counts: dict[str, int] = {}
        for deployed in self.book.deployed.values():
            for owner in deployed.assignment.owners:
                counts[owner] = counts.get(owner, 0) + 1
        return counts

    def least_loaded(self, replicas: Iterable[ReplicaInfo], coming: Mapping[str, int]) -> ReplicaInfo:
        """The one with the fewest partitions for its weight, those ``coming`` counted."""
        owned = self.owned_counts()

        def load(info: ReplicaInfo) -> tuple[float, str]:
            return (owned.get(info.name, 0) + coming.get(info.name, 0)) / max(info.weight, 1), info.name

        return min(replicas, key=load)

    def check_site(self, name: str) -> None:
        """Raises UnknownSite."""
        sites = sorted({info.site for info in self.book.replicas.values()})
        if name not in sites:
            replicas = sorted(self.book.replicas)
            raise UnknownSite(
                f"there is no site or replica {name!r}",
                remedy=f"use a site ({', '.join(sites) or 'none'}) or a replica ({', '.join(replicas) or 'none'})",
            )

    def check_not_restored(self, partition: PartitionId) -> None:
        """Raises MoveConflict while a restore of the partition is under way."""
        for planned, _ in self.book.open_restores.values():
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
        for channel in self._channels.values():
            await channel.close()
        self._records.shutdown()
        self.book.ledger.close()
