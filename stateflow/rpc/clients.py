"""Blocking clients of controllers and replicas, for threads and Spark workers; and callers for agents and controllers.

Channels are opened at first use, so that a process may fork before that. :class:`Round` is the order in which several
controllers are asked, and :class:`Seen` rejects answers older than earlier ones. Both are sans-io.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import AsyncGenerator, Callable, Collection, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import aclosing, closing, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, fields
from time import sleep
from typing import Any, TypeVar

import grpc
import grpc.aio
from google.protobuf.message import DecodeError as NoMessage
from google.protobuf.message import Message
from grpc.experimental import ChannelOptions

from stateflow.clock import SYSTEM_CLOCK
from stateflow.errors import DecodeError, HoldLost, InvalidArgument, NotLeading, StateflowError, Unavailable
from stateflow.fleet import Beat, DesiredState
from stateflow.partition.control import Command
from stateflow.partition.layout import Position, Session
from stateflow.partition.positions import Batch, SourceView
from stateflow.reports import OperatorVersion, ReplicaStatistics
from stateflow.rpc import agent_pb2 as apb
from stateflow.rpc import agent_pb2_grpc, controller_pb2_grpc, replica_pb2_grpc
from stateflow.rpc import controller_pb2 as cpb
from stateflow.rpc import replica_pb2 as rpb
from stateflow.rpc.apply import Answers, BatchRows, Link, Replies, requests_of
from stateflow.rpc.faults import WHAT_RUNS, remote_error
from stateflow.rpc.fields import unfit
from stateflow.rpc.secure import CHANNEL_OPTIONS, blocking_channel, own_certificate
from stateflow.rpc.wire import (
    AFTER_KEY,
    JOINED_BYTES_MAX,
    SILENCE_S,
    USER_KEY,
    answered,
    message_of,
    newest_of,
    positions_of,
    read_stream,
    read_stream_blocking,
    value_of,
)
from stateflow.security.roles import Identity
from stateflow.status import Deployment
from stateflow.types import ADDRESS, OperatorSpec, shown

log = logging.getLogger(__name__)
M = TypeVar("M", bound=Message)
Stub = TypeVar("Stub")
P = TypeVar("P")
T = TypeVar("T")
#: methods that change nothing, and may be answered by any controller
READS = frozenset(
    {"Status", "GetDeployment", "ListReconfigurations", "GetReconfiguration", "ListAgents", "ListJobs", "GetJobRun"}
)
READ_TIMEOUT_S = 3.0
#: a client that waits for a controller logs that after this many seconds, and asks again at this interval, in seconds
TOLD_AFTER_S = 1.0
ASKED_AGAIN_S = 0.1
#: maximum number of channels that are kept for further calls, at about 50 KB each
CHANNELS_MAX = 1024
_LOCK = threading.Lock()
_STUBS: dict[tuple[str, object, object], tuple[int, Any]] = {}
_LINKS: dict[tuple[str, object], tuple[int, Link]] = {}
#: whether this process was forked from one that had opened channels: calls would never end here, because gRPC's threads
#: exist only in the process that started them
_is_cut_off = False
#: time limit of a deployment, in seconds: a new version is first tried on all stored state, perhaps of thousands of
#: partitions on slow disks; a dead controller is noticed long before, by its connection
DEPLOY_TIMEOUT_S = 86_400.0
#: the thread that asks reads the answers itself, instead of waking a thread of the channel for each
_OPTIONS = (*CHANNEL_OPTIONS, (ChannelOptions.SingleThreadedUnaryStream, 1))
#: time limit of a call without one of its own, in seconds
CALL_TIMEOUT_S = 30.0
#: time limit of an agent's heartbeat, in seconds
BEAT_TIMEOUT_S = 5.0
#: time limit for opening a source, and for changes of one in all partitions, in seconds: long enough for a replica that
#: waits for its standbys, or for a slow disk
OPEN_TIMEOUT_S = 90.0
#: most controllers that a round asks because others name them as leaders, in addition to its addresses
NAMED_MAX = 9
#: most entries of a list that arrives in pages: sources of partitions, or reconfigurations
LISTED_MAX = 1 << 22
#: gRPC's words for a missing connection
_NOT_CONNECTED = ("failed to connect", "resolution failed")


# -- The order in which several controllers are asked ----------------------------------------------------------------


def addresses_of(text: str) -> list[str]:
    """Parses ``a:7070,b:7070``, each address once. Raises InvalidArgument for none, or for an invalid address."""
    found = list(dict.fromkeys(filter(None, map(str.strip, text.split(",")))))
    if not found:
        raise InvalidArgument("no controller address given", remedy="pass host:port, or several separated by commas")
    for each in found:
        if not ADDRESS.holds(each):
            raise InvalidArgument(f"{shown(each)} is not a valid {ADDRESS.what}", remedy=ADDRESS.how)
    return found


@dataclass(slots=True)
class Seen:
    """The newest leader term, and the newest ledger record since that term began, on which an answer to this client was
    based."""

    term: int = 0
    record: int = 0

    def takes(self, term: int, record: int) -> bool:
        """Notes the term and record of an answer. Returns False if the answer is older than an earlier one.

        A follower's answer (term 0) always counts, because the follower has read the requested record. A former leader
        that still takes itself for the leader is recognised by its term. A new term may have fewer records, if a ledger
        was restored.
        """
        if not term:
            self.record = max(self.record, record)
        elif term < self.term:
            return False
        else:
            self.record = record if term > self.term else max(self.record, record)
            self.term = term
        return True


class Round:
    """One round over the controllers, which asks each of them at most once, and up to ``NAMED_MAX`` leaders that they
    name.

    ``asked`` is the controller to ask, first or next. A controller may name a leader that has died. The round therefore
    ends only when every address has been asked, because another controller may lead by then. ``unled`` tells whether a
    controller has answered that it does not lead.
    """

    def __init__(self, addresses: list[str], first: str) -> None:
        self._addresses, self.asked = addresses, first
        self._tried = {first}
        self.unled = False

    def go_on(self, error: StateflowError) -> bool:
        """Notes that ``asked`` failed with ``error``, and sets ``asked`` to the next controller.

        Returns False if all were asked; ``asked`` is then the first controller of the next round.
        """
        order = self._behind(self.asked)
        if isinstance(error, NotLeading):
            self.unled = True
            leader = error.where.get("leader")
            if leader and (leader in self._addresses or len(self._tried - {*self._addresses}) < NAMED_MAX):
                order = [leader, *order]
        untried = next((each for each in order if each not in self._tried), None)
        self.asked = untried or order[0]
        self._tried.add(self.asked)
        return untried is not None

    def _behind(self, asked: str) -> list[str]:
        at = self._addresses.index(asked) if asked in self._addresses else -1
        return [*self._addresses[at + 1 :], *self._addresses[: at + 1]]


# -- Channels and calls ----------------------------------------------------------------------------------------------


def _note_fork() -> None:
    global _is_cut_off  # noqa: PLW0603 - of this process
    _is_cut_off = _is_cut_off or bool(_STUBS)
    _LINKS.clear()


os.register_at_fork(after_in_child=_note_fork)


def _check_not_cut_off() -> None:
    """Checks that gRPC works in this process. Raises InvalidArgument if it was forked from a process that used it."""
    if _is_cut_off:
        raise InvalidArgument(
            "this process was forked from one that had used a cluster, and can reach none itself",
            remedy="start it with multiprocessing's spawn method, or fork before the first use of a cluster",
        )


def _stub(kind: Callable[[grpc.Channel], Stub], address: str) -> Stub:
    """Returns the stub for an address, with one channel per process, address and token (or files of a certificate).

    A Spark worker therefore keeps its connections from batch to batch, also if its tasks use the tokens of several
    operators in turn. After a change of the TLS files a new channel is opened. Of more than ``CHANNELS_MAX`` the least
    recently used one is dropped, because its replica may be gone. Calls that have begun continue on a dropped channel,
    which ends with the last of them. Raises InvalidArgument in a forked process.
    """
    _check_not_cut_off()
    files, number = own_certificate()
    with _LOCK:
        known = _STUBS.pop((address, kind, files), None)
        if known is None or known[0] != number:
            known = number, kind(blocking_channel(address, _OPTIONS))
        _STUBS[address, kind, files] = known  # behind those that were asked for before
        if len(_STUBS) > CHANNELS_MAX:
            del _STUBS[next(iter(_STUBS))]
        stub: Stub = known[1]
        return stub


@contextmanager
def _named(address: str) -> Iterator[None]:
    """Translates the error of a failed call into the StateflowError that it means."""
    try:
        yield
    except grpc.RpcError as error:
        raise remote_error(error, address) from error


def request_of(kind: type[M], value: object = None, **given: Any) -> M:
    """Returns the message of a request with a caller's arguments, see :func:`~stateflow.rpc.wire.message_of`.

    Raises InvalidArgument for an argument that its field cannot hold.
    """
    try:
        return message_of(kind, value, **given)
    except (TypeError, ValueError, OverflowError) as error:
        said = {} if value is None else {each.name: getattr(value, each.name) for each in fields(value)}  # type: ignore[arg-type]
        if (refused := unfit(kind, said | given)) is None:
            raise
        raise refused from error


def _invalid(address: str, what: str) -> Unavailable:
    return Unavailable(f"invalid answer from {address}: {what}", remedy=WHAT_RUNS)


def _asked_for(found: dict[int, T], partitions: Iterable[int], address: str) -> dict[int, T]:
    """Returns an answer by partition. Raises Unavailable if it names a partition that was not asked for."""
    if others := found.keys() - set(partitions):
        raise _invalid(address, f"it names partition {min(others)}, which was not asked for")
    return found


def listed(pages: Generator[P, None, None], entries: Callable[[P], Sequence[T]], address: str) -> Iterator[tuple[P, T]]:
    """Yields (page, entry) of a list that arrives in pages. Raises Unavailable for an empty page behind the first one,
    and for more than ``LISTED_MAX`` entries: the list would have no end."""
    count = 0
    with closing(pages):
        for number, page in enumerate(pages):
            found = entries(page)
            count += len(found)
            if count > LISTED_MAX or (number and not found):
                raise _invalid(address, "its list does not end")
            yield from ((page, each) for each in found)


def _joined(pieces: Iterable[tuple[P, bytes, bool]], address: str) -> Iterator[tuple[P, bytes]]:
    """Yields (message, data) for data that arrives in pieces; the message is that of the last piece.

    Raises Unavailable if the stream ends within the data, for an empty piece before the last one, and for more than
    ``JOINED_BYTES_MAX``.

    Args:
        pieces: (message, piece, whether another piece of the same data follows).
    """
    begun, size = list[bytes](), 0
    for message, piece, more in pieces:
        begun.append(piece)
        size += len(piece)
        if size > JOINED_BYTES_MAX or (more and not piece):
            raise _invalid(address, "its data does not end")
        if not more:
            yield message, b"".join(begun)
            begun, size = [], 0
    if begun:
        raise Unavailable(f"{address} sent only a part of an answer", remedy="retry", address=address)


def _not_begun(meant: StateflowError, error: grpc.RpcError) -> bool:
    """Tells whether the call cannot have begun, so that any call may be repeated.

    That is certain if no connection was made, or if the server refused the call because it does not lead. A connection
    that broke later may have delivered the call.
    """
    details = (error.details() or "").lower()
    unheard = error.code() is grpc.StatusCode.UNAVAILABLE and any(words in details for words in _NOT_CONNECTED)
    return unheard or isinstance(meant, NotLeading)


_USER: ContextVar[Identity | None] = ContextVar("user", default=None)


@contextmanager
def on_behalf_of(user: Identity | None) -> Iterator[None]:
    """Names a user in the calls to controllers that this thread makes within the context.

    The controller applies the user's rights, too, and records the user as an author. It refuses such calls if this
    process's certificate may not make them for others.

    Args:
        user: None: the calls name nobody.
    """
    before = _USER.set(user)
    try:
        yield
    finally:
        _USER.reset(before)


# -- Clients ---------------------------------------------------------------------------------------------------------


class ControllerClient:
    """A client of all controllers of a cluster. Raises only StateflowErrors: the controller's refusal, or Unavailable.

    It asks the leader, even for facts that followers know. If no controller leads, or the leader does not answer,
    another controller answers calls that only read, and marks its answer as a follower's. No answer is older than an
    earlier answer to this client: the client remembers the newest term and ledger record on which an answer was based.
    It rejects answers of a leader of an older term, and a follower answers only when it has read that record.

    Args:
        address: one address, or several with commas. Raises InvalidArgument.
        connect_timeout_s: seconds for which a call waits while no controller listens, or none leads, as during a start
            or between two terms. They count from the time when all addresses have been asked once.
    """

    def __init__(self, address: str, connect_timeout_s: float = 0.0) -> None:
        self._addresses = addresses_of(address)
        self.address = ",".join(self._addresses)
        self._connect_timeout_s = connect_timeout_s
        self._asked = self._addresses[0]
        self._seen = Seen()
        self._lock = threading.Lock()

    def call(self, method: str, request: Any, timeout_s: float | None = None) -> Any:
        """Calls a method of the leader.

        Asks each address at most once, and the leader that the controllers name. Asks another controller only if the
        earlier attempt cannot have begun, or the method changes nothing.
        """
        attempts, following = self._attempts(), False
        turn = Round(self._addresses, self._asked)
        timeout_s = timeout_s or CALL_TIMEOUT_S
        while True:
            asked = turn.asked
            # a silent controller must not keep the call from the others
            short = method in READS and (len(self._addresses) > 1 or asked not in self._addresses)
            meant: StateflowError
            try:
                return self._call(
                    asked, method, request, min(timeout_s, READ_TIMEOUT_S) if short else timeout_s, following
                )
            except grpc.RpcError as error:
                meant, cause = remote_error(error, f"the controller at {asked}"), error
                not_begun = _not_begun(meant, error)
            except NotLeading as error:  # refused in the controller's own answer
                meant, cause, not_begun = error, None, True
            if not (not_begun or (isinstance(meant, Unavailable) and method in READS)):
                raise meant from cause
            if not turn.go_on(meant):
                following = method in READS and turn.unled and not following
                if not (following or (not_begun and next(attempts, False))):
                    raise meant from cause
                turn = Round(self._addresses, turn.asked)
            self._asked = turn.asked

    def _call(self, address: str, method: str, request: Any, timeout_s: float, following: bool) -> Any:
        stub = _stub(controller_pb2_grpc.ControllerServiceStub, address)
        metadata = self._metadata(following)
        answer, call = getattr(stub, method).with_call(request, timeout=timeout_s, metadata=metadata)
        if not self._is_new(call) and method in READS:
            what = f"the controller at {address} no longer leads, and has not noticed yet"
            raise NotLeading(what, remedy="retry: another controller leads")
        return answered(answer, f"the controller at {address}")

    def leader(self) -> tuple[str, int]:
        """Returns address and term of the leader, if the leader gave the last answer."""
        return self._asked, self._seen.term

    def _metadata(self, following: bool) -> list[tuple[str, str]]:
        """Returns the metadata of a request.

        Args:
            following: a follower may answer.
        """
        user = _USER.get()
        after = [(AFTER_KEY, str(self._seen.record))] if following else []
        return after if user is None else [*after, (USER_KEY, user.uri)]

    def _is_new(self, call: Any) -> bool:
        term, record = newest_of(call.trailing_metadata())
        with self._lock:
            return self._seen.takes(term, record)

    def stream(self, method: str, request: Any, silence_s: float = SILENCE_S) -> Generator[Any, None, None]:
        """Streams the answer of a method that only reads, from the leader, or from a follower if no controller
        leads."""
        begun, attempts, following = False, self._attempts(), False
        turn = Round(self._addresses, self._asked)
        while True:
            asked = turn.asked
            stub = _stub(controller_pb2_grpc.ControllerServiceStub, asked)
            call = getattr(stub, method)(request, metadata=self._metadata(following))
            try:
                with closing(read_stream_blocking(call, f"the controller at {asked}", silence_s)) as messages:
                    for message in messages:
                        begun = True
                        yield message
                self._is_new(call)
                return
            except Unavailable as error:
                if begun:
                    raise
                if not turn.go_on(error):
                    following = turn.unled and not following
                    if not (following or next(attempts, False)):
                        raise
                    turn = Round(self._addresses, turn.asked)
                self._asked = turn.asked

    def watch(self, request: cpb.ReconfigurationRequest) -> Iterator[cpb.Reconfiguration]:
        """Yields the states of a reconfiguration up to its end, also across changes of the leader."""
        while True:
            begun = False
            try:
                for message in self.stream("WatchReconfiguration", request):
                    begun = True
                    yield message
                return
            except (Unavailable, HoldLost):
                if not begun:  # after a first message, the controller may have stopped or lost its leadership
                    raise

    def _attempts(self) -> Iterator[bool]:
        """Yields each time when a new round over all addresses may begin, until ``connect_timeout_s`` after the first
        round.

        The duration of the first round does not count, because a controller that is stopping may keep a call waiting
        for longer.
        """
        begun, told = SYSTEM_CLOCK.monotonic(), False
        while (waited := SYSTEM_CLOCK.monotonic() - begun) < self._connect_timeout_s:
            if waited >= TOLD_AFTER_S and not told:
                told = True
                log.warning("waiting for the controller at %s", self.address)  # on stderr if logging is not set up
            sleep(ASKED_AGAIN_S)
            yield True

    def deploy(self, spec: OperatorSpec, sites: Iterable[str] | None = None, failover: str | None = None) -> Deployment:
        """Deploys an operator. Returns when every partition is in place, however long that takes."""
        named = list(sites or ())
        anywhere = sites is not None and not named
        request = request_of(cpb.DeployRequest, spec=spec, sites=named, anywhere=anywhere, failover=failover or "")
        return value_of(Deployment, self.call("Deploy", request, DEPLOY_TIMEOUT_S))

    def deployment(self, operator: str) -> Deployment:
        return value_of(Deployment, self.call("GetDeployment", request_of(cpb.GetDeploymentRequest, operator=operator)))

    def versions(self, operator: str) -> list[OperatorVersion]:
        """Returns the versions of the operator that is deployed now, in order. Raises OperatorNotDeployed."""
        reply = self.call("ListVersions", request_of(cpb.VersionsRequest, operator=operator))
        return [value_of(OperatorVersion, each) for each in reply.versions]


def packed_deployment(deployment: Deployment) -> bytes:
    """Returns a deployment as bytes for storage; :func:`unpacked_deployment` reads them."""
    return message_of(cpb.Deployment, deployment).SerializeToString()


def unpacked_deployment(data: bytes) -> Deployment:
    """Reads the bytes of :func:`packed_deployment`. Raises DecodeError."""
    try:
        return value_of(Deployment, cpb.Deployment.FromString(data))
    except (NoMessage, InvalidArgument) as error:
        raise DecodeError("a stored deployment cannot be read", remedy="fetch it from the controller") from error


def _link(address: str) -> Link:
    """Returns the Apply stream for an address, one per process and token (or files of a certificate).

    When this process has a new certificate, a new stream is opened, because the certificate of an open stream may
    expire. Earlier calls are answered on the former stream, which closes itself when it has been idle for a while. When
    there are more than ``CHANNELS_MAX``, the least recently used one is dropped if it is closed.
    """
    _check_not_cut_off()
    files, number = own_certificate()
    with _LOCK:
        known = _LINKS.pop((address, files), None)
        if known is None or known[0] != number:
            stub = replica_pb2_grpc.ReplicaServiceStub
            known = number, Link(address, lambda requests: _stub(stub, address).Apply(requests))
        _LINKS[address, files] = known
        if len(_LINKS) > CHANNELS_MAX and _LINKS[oldest := next(iter(_LINKS))][1].is_closed:
            del _LINKS[oldest]
        return known[1]


class ReplicaClient:
    """A blocking client of one replica. Raises only StateflowErrors: the replica's refusal, or Unavailable."""

    def __init__(self, address: str, timeout_s: float = CALL_TIMEOUT_S) -> None:
        self.address = address
        self._timeout_s = timeout_s

    def call(self, method: str, request: Any, timeout_s: float | None = None) -> Any:
        stub = _stub(replica_pb2_grpc.ReplicaServiceStub, self.address)
        with _named(self.address):
            answer = getattr(stub, method)(request, timeout=timeout_s or self._timeout_s)
        return answered(answer, self.address)

    def positions(self, operator: str, source: str, partitions: Iterable[int]) -> dict[int, Position]:
        """Returns the positions of ``source``, without partitions that have no batch of it.

        Raises NotOwner if the replica does not own a partition, and LeaseLost if it cannot tell.
        """
        asked = rpb.PositionsRequest(operator=operator, source=source, partitions=partitions)
        return _asked_for(positions_of(self.call("Positions", asked)), asked.partitions, self.address)

    def begin_positions(
        self, operator: str, source: str, partitions: Collection[int], before: int
    ) -> Callable[[], dict[int, Position]]:
        """Sends the request of :meth:`positions` at once, and returns a function that waits for the answer.

        If all partitions have the batch that precedes ``before``, the answer states only this.
        """
        asked = rpb.PositionsRequest(operator=operator, source=source, partitions=partitions, before=before)
        stub = _stub(replica_pb2_grpc.ReplicaServiceStub, self.address)
        pending = stub.Positions.future(asked, timeout=self._timeout_s)

        def result() -> dict[int, Position]:
            with _named(self.address):
                reply = pending.result()
            return _asked_for(positions_of(answered(reply, self.address), partitions, before), partitions, self.address)

        return result

    def open_source(
        self,
        operator: str,
        source: str,
        partitions: Iterable[int],
        session: Session,
        timeout_s: float = OPEN_TIMEOUT_S,
        settled: int | None = None,
    ) -> dict[int, Position]:
        """Makes a replica refuse older clients of ``source`` from now on, and returns the source's positions.

        Raises SourceTaken if a newer client has opened the source or a restore has stopped this client, StandbyMissing
        if no standby confirmed the change in time, and SourceRetired if outputs of batches after ``settled`` are gone.

        Args:
            settled: for a source whose outputs are kept, the newest batch whose output is no longer needed; None: no
                output is dropped.
        """
        asked = rpb.PositionsRequest(operator=operator, source=source, partitions=partitions)
        request = message_of(rpb.OpenSourceRequest, asked=asked, session=session, settled=settled)
        return _asked_for(positions_of(self.call("OpenSource", request, timeout_s)), asked.partitions, self.address)

    def outputs(
        self, operator: str, source: str, partitions: Iterable[int], after: int
    ) -> Iterator[tuple[int, int, bytes]]:
        """Yields (partition, batch, output) of a source's batches after ``after`` whose outputs are kept: one partition
        after another, each in the order of batches.

        Raises NotOwner, LeaseLost, Unavailable.
        """
        stub = _stub(replica_pb2_grpc.ReplicaServiceStub, self.address)
        asked = set(partitions)
        request = rpb.OutputsRequest(operator=operator, source=source, partitions=sorted(asked), after=after)
        with closing(read_stream_blocking(stub.Outputs(request), self.address)) as pages:
            for page, output in _joined(((page, page.output, page.more) for page in pages), self.address):
                _asked_for({page.partition: output}, asked, self.address)
                yield page.partition, page.batch, output

    def sources(self, operator: str, partitions: Collection[int]) -> dict[int, list[SourceView]]:
        """Returns the sources that have sent to each of the partitions. Raises NotOwner, LeaseLost, Unavailable."""
        stub = _stub(replica_pb2_grpc.ReplicaServiceStub, self.address)
        request = request_of(rpb.SourcesRequest, operator=operator, partitions=partitions)
        found: dict[int, list[SourceView]] = {partition: [] for partition in partitions}
        pages = read_stream_blocking(stub.Sources(request), self.address)
        for _, view in listed(pages, lambda page: page.sources, self.address):
            found.setdefault(view.partition, []).append(value_of(SourceView, view))
        return _asked_for(found, partitions, self.address)

    def retire_source(self, operator: str, source: str, partitions: Iterable[int]) -> None:
        """Reduces a source to a tombstone in partitions. Raises NotOwner, LeaseLost, Unavailable."""
        request = request_of(rpb.PositionsRequest, operator=operator, source=source, partitions=partitions)
        self.call("RetireSource", request, OPEN_TIMEOUT_S)

    def drop_output(
        self, operator: str, source: str, batch: int, partitions: Iterable[int], apply: bool
    ) -> dict[int, int]:
        """Makes partitions drop their stored output of a batch. Returns partition → the output's size in bytes, without
        partitions that have none. Raises NotOwner, LeaseLost, Unavailable.

        Args:
            apply: False: only return the sizes.
        """
        request = request_of(
            rpb.DropOutputRequest, operator=operator, source=source, partitions=partitions, batch=batch, apply=apply
        )
        sizes = dict(self.call("DropOutput", request, OPEN_TIMEOUT_S).sizes)
        return _asked_for(sizes, request.partitions, self.address)

    def statistics(
        self, after: int, newest: int = 0, sizes: bool = False, timeout_s: float | None = None
    ) -> ReplicaStatistics:
        """Returns statistics of the replica, with its requests after number ``after``.

        Args:
            newest: number of newest requests to return; 0: all.
            sizes: include sizes of partitions, for which the replica inspects its files.
        """
        request = request_of(rpb.StatsRequest, after=after, newest=newest, sizes=sizes)
        return value_of(ReplicaStatistics, self.call("Stats", request, timeout_s))

    def scan(self, operator: str, state: str, partitions: Iterable[int], keys: Iterable[bytes] = ()) -> Iterator[bytes]:
        """Yields the entries of one state as Arrow IPC streams, for ``keys`` in their stored encoding; no keys: for
        all."""
        stub = _stub(replica_pb2_grpc.ReplicaServiceStub, self.address)
        request = request_of(
            rpb.ScanRequest, operator=operator, state=state, partitions=list(partitions), keys=list(keys)
        )
        with closing(read_stream_blocking(stub.Scan(request), self.address)) as pages:
            for _, records in _joined(((page, page.records, page.continues) for page in pages), self.address):
                yield records

    def apply(
        self,
        operator: str,
        batch: Batch,
        rows: BatchRows,
        parts: Collection[tuple[int, int]],
        chunk_bytes: int,
        after: Mapping[int, int] | None,
        tell: Callable[[Answers], None],
    ) -> None:
        """Sends one batch's rows for ``parts``, which are (partition, epoch), and returns at once.

        ``tell`` is called in another thread as answers arrive, once for each partition.
        """
        requests = requests_of(operator, batch, rows, parts, chunk_bytes, after)
        replies = Replies(self.address, [partition for partition, _ in parts], tell)
        _link(self.address).call(requests, replies)

    @property
    def heard_at(self) -> float | None:
        """Time at which the replica's last message about batches arrived, in monotonic seconds; None: there is no
        stream.
        """
        return _link(self.address).heard_at

    def give_up(self, since: float) -> None:
        """Fails the batches of a stream that has been silent since ``since``; the next batch gets a new stream."""
        _link(self.address).give_up(since)


# -- Calls between agents and controllers ----------------------------------------------------------------------------


class ControllerCaller:
    """A controller, called by its agents. Raises the controller's error, or Unavailable."""

    def __init__(self, channel: grpc.aio.Channel, address: str) -> None:
        self.address = address
        self._stub = controller_pb2_grpc.ControllerServiceStub(channel)

    async def beat(self, beat: Beat) -> DesiredState:
        try:
            reply = await self._stub.AgentBeat(message_of(cpb.AgentBeatRequest, beat), timeout=BEAT_TIMEOUT_S)
        except grpc.aio.AioRpcError as error:
            raise remote_error(error, self.address) from error
        return value_of(DesiredState, answered(reply, self.address))


class AgentCaller:
    """An agent, called by its controller. Raises the agent's error, or Unavailable."""

    def __init__(self, channel: grpc.aio.Channel, address: str) -> None:
        self._address = address
        self._stub = agent_pb2_grpc.AgentServiceStub(channel)

    async def logs(self, command: Command, replica: str, lines: int, follow: bool) -> AsyncGenerator[bytes]:
        """Yields a replica's log. While nothing is logged, the agent sends a page without data every few seconds."""
        request = message_of(apb.LogsRequest, replica=replica, lines=lines, follow=follow, command=command)
        async with aclosing(read_stream(self._stub.Logs(request), self._address)) as pages:
            async for page in pages:
                yield page.data
