"""The controller's calls to replicas, with stateflow's own types as arguments and results. No other module converts
them to messages."""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Collection, Iterator, Sequence
from contextlib import aclosing, contextmanager
from functools import partial
from random import Random  # noqa: TID251 - the type; which one is handed in
from typing import Any

import grpc.aio

from reconfig.controller.cluster_state import ClusterState
from reconfig.controller.members import Members
from stateflow.clock import Clock
from stateflow.errors import LeaseLost, StateflowError, Unavailable
from stateflow.partition.control import (
    Cancellation,
    Cancelled,
    Command,
    DiskView,
    Fence,
    Fenced,
    PartitionView,
    Preparation,
    Progress,
    Restore,
    Restored,
    TakenOver,
    TakeOver,
    Verification,
)
from stateflow.reports import Taken
from stateflow.rpc import common_pb2 as pb
from stateflow.rpc import replica_pb2 as rpb
from stateflow.rpc import replica_pb2_grpc
from stateflow.rpc.faults import remote_error
from stateflow.rpc.wire import SILENCE_S, answered, connected, message_of, read_stream, value_of
from stateflow.schedule import jittered
from stateflow.settings import ControllerSettings
from stateflow.tracing import carried
from stateflow.types import OperatorSpec, PartitionId, ReplicaInfo

CREATE_TIMEOUT_S = 60.0
FETCH_TIMEOUT_S = 600.0
#: a slow disk takes long to remove thousands of databases
DROP_TIMEOUT_S = 600.0
#: a takeover may read a whole checkpoint
TAKE_OVER_TIMEOUT_S = 600.0
CHECKPOINT_TIMEOUT_S = RESTORE_TIMEOUT_S = 3600.0
ROUND_TRIPS_KEPT = 8
#: a request number above all that replicas assign, so that a reply lists no requests
_NO_REQUESTS = 1 << 62
#: a request for a partition that does not exist; every replica answers it at once
_NOTHING = rpb.InspectRequest(operator="ping", partition=0)


class Replicas:
    """Calls replicas by their names. Every call raises the error by which the replica refuses, or Unavailable.

    A call waits for the connection to the replica and, if its process is a new one, for its registration. Calls on
    which the length of a pause depends do not wait (``at_once``).

    Args:
        command: returns the identity under which this controller commands a replica. Raises HoldLost, and Unavailable
            for a replica that has not registered.
        refused: called with the error of each call that fails.
        random: varies the pauses before calls are repeated.
    """

    def __init__(
        self,
        cluster: ClusterState,
        members: Members,
        settings: ControllerSettings,
        clock: Clock,
        connect: Callable[[str], grpc.aio.Channel],
        command: Callable[[str], Command],
        refused: Callable[[StateflowError], None],
        random: Random,
    ) -> None:
        self._cluster, self._members, self._settings, self._clock = cluster, members, settings, clock
        self._connect, self._command, self._refused = connect, command, refused
        self._random = random
        self._channels: dict[str, grpc.aio.Channel] = {}  # by address
        self._users: Counter[str] = Counter()  # calls under way, by address
        self._round_trips: dict[str, deque[float]] = {}  # in seconds, by address
        self._closing: set[asyncio.Task[None]] = set()

    async def reach(self, name: str) -> None:
        """Waits for a connection to a replica, which a replica that has just died does not give. Raises Unavailable."""
        await self._connected(name)

    # -- operators ----------------------------------------------------------------------------------------

    async def learn(self, name: str, spec: OperatorSpec) -> None:
        """Tells a replica to run this version of the operator from its next batch on."""
        await self._call(name, "Create", message_of(rpb.CreateRequest, spec=spec), _fetching_s(spec))

    async def check(self, name: str, spec: OperatorSpec, total: int) -> None:
        """Checks that a replica could have ``total`` partitions of the operator. Nothing changes."""
        request = message_of(rpb.CreateRequest, spec=spec, total=total, asked=True)
        await self._call(name, "Create", request, _fetching_s(spec))

    async def try_out(self, name: str, spec: OperatorSpec, numbers: Collection[int]) -> AsyncGenerator[int]:
        """Yields each partition once the replica has tried this version on its stored state.

        The trial ends when the caller stops iterating. Raises the error with which the version fails, or
        ReleaseMismatch if the replica's release has no trials.
        """
        request = message_of(rpb.TryRequest, spec=spec, partitions=sorted(numbers))
        async with aclosing(self._stream(name, "Try", request)) as pages:
            async for page in pages:
                yield page.partition

    async def create(self, name: str, spec: OperatorSpec, numbers: Collection[int], epoch: int, total: int) -> None:
        """Creates partitions at a replica.

        Args:
            total: number of the operator's partitions that the replica will have after all such calls.
        """
        request = message_of(rpb.CreateRequest, spec=spec, partitions=numbers, epoch=epoch, total=total)
        await self._call(name, "Create", request, CREATE_TIMEOUT_S)

    async def drop(self, name: str, operator: str, epoch: int) -> None:
        """Deletes a replica's partitions of the operator at this epoch and older ones."""
        await self._call(name, "Drop", rpb.DropRequest(operator=operator, epoch=epoch), DROP_TIMEOUT_S)

    async def hold(self, name: str, operator: str, seconds: float) -> None:
        """Makes a replica hold requests for the operator, for at most ``seconds``; 0 ends the hold."""
        await self._call(name, "Hold", rpb.HoldRequest(operator=operator, seconds=seconds))

    async def views(self, name: str, within_s: float) -> tuple[list[PartitionView], DiskView]:
        """Returns a view of every partition that a replica has in some form, with its bytes, and a view of its disk."""
        request = rpb.StatsRequest(after=_NO_REQUESTS, sizes=True)
        reply = await self._call(name, "Stats", request, within_s)
        return [value_of(PartitionView, view) for view in reply.partitions], value_of(DiskView, reply)

    async def round_trips_ms(self, name: str, to: Sequence[str], within_s: float) -> dict[str, float]:
        """Returns the round trips from a replica to the other replicas that answer, in milliseconds, by name.

        Args:
            to: names of the others.
        """
        addresses = [self._address(other) for other in to]
        reply = await self._ask(name, "RoundTrips", rpb.RoundTripsRequest(addresses=addresses), within_s)
        if len(reply.milliseconds) != len(to):
            raise Unavailable(
                f"{name} answered with a wrong number of round trips", remedy="check which stateflow version it runs"
            )
        return {other: took for other, took in zip(to, reply.milliseconds, strict=True) if took >= 0}

    async def round_trip_s(self, name: str) -> float | None:
        """Measures the round trip to a replica. Returns the shortest of the last ones, in seconds; None: no answer.

        The shortest of ``ROUND_TRIPS_KEPT`` waited least for something else: this is the clock filter of NTP (RFC 5905,
        section 10).
        """
        try:
            await self._connected(name)
            began = self._clock.monotonic()
            with self._stub(name) as stub:
                if not await _answers(stub, self._settings.rpc_timeout_s):
                    return None
            took = self._round_trips.setdefault(self._address(name), deque(maxlen=ROUND_TRIPS_KEPT))
        except Unavailable:
            return None
        took.append(self._clock.monotonic() - began)
        return min(took)

    # -- moves --------------------------------------------------------------------------------------------

    async def prepare(self, name: str, move: Preparation, standby_move: str) -> AsyncIterator[Progress]:
        """Prepares a move at its target, and yields the progress until the target owns the partition or has failed.

        At the beginning of a term, the call first waits for the replica to register, at most until its lease lapses.
        """
        while self._members.may_serve(name):
            if self._members.session(name):
                break
            await self._pause()
        request = message_of(rpb.PrepareRequest, move, standby_move=standby_move)
        async with aclosing(self._stream(name, "Prepare", request)) as reports:
            async for report in reports:
                yield value_of(Progress, report)

    async def fence(self, name: str, fence: Fence) -> Fenced:
        return value_of(Fenced, await self._ask(name, "Fence", message_of(rpb.FenceRequest, fence)))

    async def cancel(self, name: str, cancellation: Cancellation, *, at_once: bool = False) -> Cancelled:
        ask = self._ask if at_once else self._call
        return value_of(Cancelled, await ask(name, "Cancel", message_of(rpb.CancelRequest, cancellation)))

    async def release(self, name: str, partition: PartitionId, move_id: str, epoch: int, owner: ReplicaInfo) -> None:
        where = {"operator": partition.operator, "partition": partition.partition}
        request = message_of(rpb.ReleaseRequest, move_id=move_id, **where, epoch=epoch, owner=owner)
        await self._ask(name, "Release", request)

    async def take_over(self, name: str, takeover: TakeOver) -> TakenOver:
        request = message_of(rpb.TakeOverRequest, takeover)
        return value_of(TakenOver, await self._ask(name, "TakeOver", request, TAKE_OVER_TIMEOUT_S))

    # -- checkpoints --------------------------------------------------------------------------------------

    async def checkpoint(
        self, name: str, operator: str = "", partitions: Collection[int] = (), savepoint: str = ""
    ) -> Taken:
        """Takes checkpoints of partitions that a replica owns.

        Args:
            operator: name of the operator; empty: all operators.
            partitions: numbers of partitions; empty: all that the replica owns.
            savepoint: name of the savepoint; empty: an ordinary checkpoint.
        """
        request = rpb.CheckpointRequest(operator=operator, partitions=partitions, savepoint=savepoint)
        return value_of(Taken, await self._call(name, "Checkpoint", request, CHECKPOINT_TIMEOUT_S))

    async def verify(
        self, name: str, partition: PartitionId, standby_of: int | None = None
    ) -> AsyncGenerator[Verification]:
        """Verifies a partition. Yields the position that is read, then the result.

        Yields nothing if the replica does not have the partition. Ends when the caller stops iterating.

        Args:
            standby_of: the owner's sequence number at which the replica's standby copy is verified; None: the replica
                is the owner, and its partition is verified.
        """
        request = rpb.VerifyRequest(operator=partition.operator, partition=partition.partition, standby_of=standby_of)
        async with aclosing(self._stream(name, "Verify", request)) as pages:
            async for page in pages:
                yield value_of(Verification, page)

    async def fetch(self, name: str, restore: Restore) -> Restored:
        """Lets a replica fetch and prove a checkpoint."""
        return await self._restore(name, restore, own=False)

    async def own(self, name: str, restore: Restore) -> Restored:
        """Lets a replica own and serve the state that it fetched and proved."""
        return await self._restore(name, restore, own=True)

    async def _restore(self, name: str, restore: Restore, own: bool) -> Restored:
        request = message_of(rpb.RestoreRequest, restore, own=own)
        return value_of(Restored, await self._call(name, "Restore", request, RESTORE_TIMEOUT_S))

    async def surrender(self, name: str, fence: Fence) -> None:
        """Makes a replica stop serving a partition for good, without handing its state to the target."""
        await self._call(name, "Surrender", message_of(rpb.FenceRequest, fence))

    # -- calls --------------------------------------------------------------------------------------------

    async def _call(self, name: str, method: str, request: Any, timeout_s: float | None = None) -> Any:
        until = self._clock.monotonic() + self._settings.rpc_timeout_s
        while True:
            await self._connected(name)
            session = self._members.session(name)
            try:
                return await self._ask(name, method, request, timeout_s)
            except LeaseLost:  # the replica restarted so quickly that it was never missed
                while self._members.session(name) in ("", session):
                    if self._clock.monotonic() >= until:
                        raise
                    await self._pause()

    async def _pause(self) -> None:
        await asyncio.sleep(jittered(self._settings.retry_interval_s, self._random))

    async def _ask(self, name: str, method: str, request: Any, timeout_s: float | None = None) -> Any:
        """Calls a replica without waiting for a connection."""
        commanded = self._commanded(name, request)
        try:
            with self._stub(name) as stub:
                answer = await getattr(stub, method)(
                    commanded, timeout=timeout_s or self._settings.rpc_timeout_s, **_traced()
                )
        except grpc.aio.AioRpcError as error:
            raise self._meant(error, name) from error
        return answered(answer, self._shown(name))

    async def _stream(self, name: str, method: str, request: Any) -> AsyncGenerator[Any]:
        """Yields the answers to a request whose work may take hours; the work of a standby never ends.

        The replica may send nothing between two answers, because an older controller would take a sign of life for a
        result. While the replica is silent, this controller sends it another request, which every release answers.
        Raises Unavailable if the replica answers neither request for ``SILENCE_S``.
        """
        await self._connected(name)
        with self._stub(name) as stub:
            call = getattr(stub, method)(self._commanded(name, request), **_traced())
            async with aclosing(read_stream(call, self._shown(name), SILENCE_S, partial(_answers, stub))) as messages:
                try:
                    async for message in messages:
                        yield message
                except StateflowError as error:
                    self._refused(error)
                    raise

    def _commanded(self, name: str, request: Any) -> Any:
        """Adds this controller's identity to a request that is a command. No other place adds it."""
        field = request.DESCRIPTOR.fields_by_name.get("command")
        if field is not None and field.message_type is pb.Command.DESCRIPTOR:
            request.command.CopyFrom(message_of(pb.Command, self._command(name)))
        return request

    def _meant(self, error: grpc.aio.AioRpcError, name: str) -> StateflowError:
        meant = remote_error(error, self._shown(name))
        self._refused(meant)
        return meant

    @contextmanager
    def _stub(self, name: str) -> Iterator[replica_pb2_grpc.ReplicaServiceStub]:
        with self._channel(name) as channel:
            yield replica_pb2_grpc.ReplicaServiceStub(channel)

    @contextmanager
    def _channel(self, name: str) -> Iterator[grpc.aio.Channel]:
        """Yields the channel to a replica, which stays open until the caller is done."""
        address = self._address(name)
        if address not in self._channels:
            self._channels[address] = self._connect(address)
            self._close_unused()
        self._users[address] += 1
        try:
            yield self._channels[address]
        finally:
            self._users[address] -= 1

    def _close_unused(self) -> None:
        """Closes the channels of addresses that no replica has any more: replicas may have another one after each
        restart. A channel in use stays open."""
        known = {info.address for info in self._cluster.roster.replicas.values()}
        self._users = +self._users
        self._round_trips = {address: took for address, took in self._round_trips.items() if address in known}
        for address in self._channels.keys() - known - self._users.keys():
            closing = asyncio.get_running_loop().create_task(self._channels.pop(address).close())
            self._closing.add(closing)
            closing.add_done_callback(self._closing.discard)

    async def _connected(self, name: str) -> None:
        with self._channel(name) as channel:
            await connected(channel, self._shown(name))

    def _shown(self, name: str) -> str:
        """Returns a replica's name and address for messages, or the name alone if the replica was forgotten."""
        info = self._cluster.roster.replicas.get(name)
        return name if info is None else f"{name} ({info.address})"

    def _address(self, name: str) -> str:
        """Returns a replica's address. Raises Unavailable if it was forgotten."""
        info = self._cluster.roster.replicas.get(name)
        if info is None:
            raise Unavailable(f"{name} was forgotten", remedy="see `stateflow status`")
        return info.address

    async def close(self) -> None:
        for channel in self._channels.values():
            await channel.close()
        await asyncio.gather(*self._closing)


async def _answers(stub: replica_pb2_grpc.ReplicaServiceStub, within_s: float) -> bool:
    """Tells whether a replica answers an ordinary request in time.

    A refusal is an answer. A broken connection counts as an answer, too: the silent stream then breaks by itself.
    """
    try:
        await stub.Inspect(_NOTHING, timeout=within_s)
    except grpc.aio.AioRpcError as error:
        return error.code() is not grpc.StatusCode.DEADLINE_EXCEEDED
    return True


def _traced() -> dict[str, Any]:
    """Returns the options by which a call carries the current span; empty: there is no span."""
    metadata = carried()
    return {} if metadata is None else {"metadata": metadata}


def _fetching_s(spec: OperatorSpec) -> float | None:
    """Returns the timeout, in seconds, of a call for which the replica may fetch a bundle over a slow link.

    None: the operator has no bundle, and the default applies.
    """
    return FETCH_TIMEOUT_S if spec.bundle else None
