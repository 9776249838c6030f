"""Blocking clients for threads and Spark workers. Channels are made at first use, so that a process may fork before."""

from __future__ import annotations

import logging
import math
import os
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from time import sleep
from typing import Any, TypeVar

import grpc
from grpc.experimental import ChannelOptions

from stateflow.clock import SYSTEM_CLOCK
from stateflow.errors import HoldLost, NotLeading, StateflowError, Unavailable
from stateflow.reports import Deployment, ReplicaStatistics
from stateflow.rpc import controller_pb2 as cpb
from stateflow.rpc import controller_pb2_grpc, replica_pb2_grpc
from stateflow.rpc import replica_pb2 as rpb
from stateflow.rpc.batches import Answers, Replies, requests_of
from stateflow.rpc.controllers import Round, Seen, addresses_of
from stateflow.rpc.link import Link
from stateflow.rpc.reports import deployment_of, statistics_of
from stateflow.rpc.rows import BatchRows
from stateflow.rpc.secure import blocking_channel, own_certificate
from stateflow.rpc.wire import (
    AFTER_KEY,
    CHANNEL_OPTIONS,
    answered,
    newest_of,
    positions_of,
    remote_error,
    session_to_pb,
    source_of,
    spec_to_pb,
)
from stateflow.runtime.layout import Position, Session
from stateflow.runtime.positions import Batch
from stateflow.runtime.retirement import SourceView
from stateflow.types import OperatorSpec

log = logging.getLogger(__name__)
Stub = TypeVar("Stub")
#: a stream that has no deadline says something more often than this
SILENCE_S = 60.0
#: changes nothing, and may be asked of any controller
READS = frozenset(
    {"Status", "GetDeployment", "ListReconfigurations", "GetReconfiguration", "ListAgents", "ListJobs", "GetJobRun"}
)
READ_TIMEOUT_S = 3.0
#: people are told after so long that a controller is waited for, which is asked again so often
TOLD_AFTER_S = 1.0
ASKED_AGAIN_S = 0.1
_LOCK = threading.Lock()
_STUBS: dict[tuple[str, object], tuple[int, Any]] = {}
_LINKS: dict[str, tuple[int, Link]] = {}
#: the threads of a stream stay with the process that opened it
os.register_at_fork(after_in_child=_LINKS.clear)
#: of thousands of partitions on a slow disk; a controller that has gone away is noticed by the connection
#: a new version is tried on all stored state first; a controller that dies is noticed long before
DEPLOY_TIMEOUT_S = 86_400.0
#: who asks reads the answers itself, instead of waking a thread of the channel's for each
_OPTIONS = (*CHANNEL_OPTIONS, (ChannelOptions.SingleThreadedUnaryStream, 1))


def _stub(kind: Callable[[grpc.Channel], Stub], address: str) -> Stub:
    """One channel per address and process: a Spark worker keeps its connections from batch to batch. Another one where
    the files of TLS have changed: calls that have begun go on on theirs."""
    number = own_certificate()
    with _LOCK:
        known = _STUBS.get((address, kind))
        if known is None or known[0] != number:
            known = _STUBS[address, kind] = number, kind(blocking_channel(address, _OPTIONS))
        stub: Stub = known[1]
        return stub


def _heard(call: Any, address: str, silence_s: float) -> Iterator[Any]:
    """Messages of a stream that has no deadline, for nobody knows how long it may go on. Raises what it was refused
    with, or Unavailable, also when it said nothing for ``silence_s``."""
    heard_at, ended, silent = SYSTEM_CLOCK.monotonic(), threading.Event(), False

    def watch() -> None:
        nonlocal silent
        while not ended.wait(silence_s / 4):
            if SYSTEM_CLOCK.monotonic() - heard_at > silence_s:
                silent = True
                call.cancel()
                return

    threading.Thread(target=watch, name="silence", daemon=True).start()
    try:
        for message in call:
            heard_at = math.inf  # it is the reader's turn, who may take any time
            yield answered(message, address)
            heard_at = SYSTEM_CLOCK.monotonic()
    except grpc.RpcError as error:
        if silent:
            what = f"{address} said nothing for {silence_s:g} s"
            raise Unavailable(what, remedy="see whether it is well, and ask again") from error
        raise remote_error(error, address) from error
    finally:
        ended.set()
        call.cancel()


@contextmanager
def _named(address: str) -> Iterator[None]:
    """A call that fails raises what was meant by it."""
    try:
        yield
    except grpc.RpcError as error:
        raise remote_error(error, address) from error


#: a replica waits for its standbys meanwhile, as long as it holds a batch
OPEN_TIMEOUT_S = 90.0
#: by which gRPC says that there was no connection to send anything on
_NOT_CONNECTED = ("failed to connect", "resolution failed")


def _not_begun(meant: StateflowError, error: grpc.RpcError) -> bool:
    """Nobody was there to hear it, or nobody who leads: it may be asked again, whatever it is. A connection that broke
    may have carried it."""
    details = (error.details() or "").lower()
    unheard = error.code() is grpc.StatusCode.UNAVAILABLE and any(words in details for words in _NOT_CONNECTED)
    return unheard or isinstance(meant, NotLeading)


class ControllerClient:
    """Raises StateflowErrors only: what the controller refused with, or Unavailable.

    The one that leads is asked, also what others know; where none of them leads, or it does not answer, what only is
    read is answered by another one, and says so. No answer is older than one that this client has had: it remembers the
    newest term, and the newest record of the ledger, that any rested on. One that leads in an older term is not
    believed, and one that does not lead has read that record.

    Args:
        address: or those of several, with commas. Raises InvalidArgument.
        connect_timeout_s: so long a call waits where nobody listens at any of them, or none of them leads, as while one
            is being started or is between two terms. It counts from the first such answer.
    """

    def __init__(self, address: str, timeout_s: float = 30.0, connect_timeout_s: float = 0.0) -> None:
        self._addresses = addresses_of(address)
        self.address = ",".join(self._addresses)
        self._connect_timeout_s = connect_timeout_s
        self._asked = self._addresses[0]
        self._timeout_s = timeout_s
        self._seen = Seen()
        self._lock = threading.Lock()

    def call(self, method: str, request: Any, timeout_s: float | None = None) -> Any:
        """Each address is asked once at most, and the one that they say leads; another one only where the first cannot
        have begun, or it changes nothing."""
        attempts, following = self._attempts(), False
        turn = Round(self._addresses, self._asked)
        timeout_s = timeout_s or self._timeout_s
        while True:
            asked = turn.asked
            # one that is silent must not keep it from the others
            short = method in READS and (len(self._addresses) > 1 or asked not in self._addresses)
            meant: StateflowError
            try:
                return self._call(
                    asked, method, request, min(timeout_s, READ_TIMEOUT_S) if short else timeout_s, following
                )
            except grpc.RpcError as error:
                meant, cause = remote_error(error, f"the controller at {asked}"), error
                not_begun = _not_begun(meant, error)
            except NotLeading as error:  # by its own answer
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
        metadata = self._follow() if following else None
        answer, call = getattr(stub, method).with_call(request, timeout=timeout_s, metadata=metadata)
        if not self._is_new(call) and method in READS:
            what = f"the controller at {address} leads no more, and does not know it yet"
            raise NotLeading(what, remedy="ask again: another one leads")
        return answered(answer, f"the controller at {address}")

    def leader(self) -> tuple[str, int]:
        """Address and term of who gave the last answer, where that was the leader's."""
        return self._asked, self._seen.term

    def _follow(self) -> tuple[tuple[str, str]]:
        """One that does not lead may answer."""
        return ((AFTER_KEY, str(self._seen.record)),)

    def _is_new(self, call: Any) -> bool:
        term, record = newest_of(call.trailing_metadata())
        with self._lock:
            return self._seen.takes(term, record)

    def stream(self, method: str, request: Any, silence_s: float = SILENCE_S) -> Iterator[Any]:
        """Only what is read is streamed: by the one that leads, until that changes, or by one that does not lead."""
        begun, attempts, following = False, self._attempts(), False
        turn = Round(self._addresses, self._asked)
        while True:
            asked = turn.asked
            stub = _stub(controller_pb2_grpc.ControllerServiceStub, asked)
            call = getattr(stub, method)(request, metadata=self._follow() if following else None)
            try:
                for message in _heard(call, f"the controller at {asked}", silence_s):
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
        """As it goes on, whoever leads meanwhile; the last one is over."""
        while True:
            begun = False
            try:
                for message in self.stream("WatchReconfiguration", request):
                    begun = True
                    yield message
                return
            except (Unavailable, HoldLost):
                if not begun:  # else whoever told of it has ended, or does not lead any more
                    raise

    def _attempts(self) -> Iterator[bool]:
        """When all of them may be asked once more; ends ``connect_timeout_s`` after the first of these was wanted. What
        came before does not count: a controller that is stopped keeps a call for longer, and does not lead then."""
        begun, told = SYSTEM_CLOCK.monotonic(), False
        while (waited := SYSTEM_CLOCK.monotonic() - begun) < self._connect_timeout_s:
            if waited >= TOLD_AFTER_S and not told:
                told = True
                log.warning("waiting for the controller at %s", self.address)  # on stderr, where nobody set up logging
            sleep(ASKED_AGAIN_S)
            yield True

    def deploy(self, spec: OperatorSpec, sites: Iterable[str] | None = None, failover: str | None = None) -> Deployment:
        """Returns when every partition is there, however long that takes."""
        named = list(sites or ())
        anywhere = sites is not None and not named
        request = cpb.DeployRequest(spec=spec_to_pb(spec), sites=named, anywhere=anywhere, failover=failover or "")
        return deployment_of(self.call("Deploy", request, DEPLOY_TIMEOUT_S))

    def deployment(self, operator: str) -> Deployment:
        return deployment_of(self.call("GetDeployment", cpb.GetDeploymentRequest(operator=operator)))


def _link(address: str) -> Link:
    """One Apply stream per address and process. Another one where this process shows another certificate, as the one
    that a stream was opened with expires while that is open: what was sent is answered on the former one, which is
    closed when nobody has used it for a while."""
    number = own_certificate()
    with _LOCK:
        known = _LINKS.get(address)
        if known is None or known[0] != number:
            stub = replica_pb2_grpc.ReplicaServiceStub
            known = _LINKS[address] = number, Link(address, lambda requests: _stub(stub, address).Apply(requests))
        return known[1]


class ReplicaClient:
    def __init__(self, address: str, timeout_s: float = 30.0) -> None:
        self.address = address
        self._timeout_s = timeout_s

    def call(self, method: str, request: Any, timeout_s: float | None = None) -> Any:
        stub = _stub(replica_pb2_grpc.ReplicaServiceStub, self.address)
        with _named(self.address):
            answer = getattr(stub, method)(request, timeout=timeout_s or self._timeout_s)
        return answered(answer, self.address)

    def positions(self, operator: str, source: str, partitions: Iterable[int]) -> dict[int, Position]:
        """How far ``source`` has come; without partitions that have seen nothing of it. Raises NotOwner when one of
        them is not there, LeaseLost when that is not known."""
        asked = rpb.PositionsRequest(operator=operator, source=source, partitions=partitions)
        return positions_of(self.call("Positions", asked))

    def begin_positions(
        self, operator: str, source: str, partitions: Collection[int], before: int
    ) -> Callable[[], dict[int, Position]]:
        """The same; where all of them contain the batch before ``before``, only that is said of them. Sent now; what is
        returned waits for the answer."""
        asked = rpb.PositionsRequest(operator=operator, source=source, partitions=partitions, before=before)
        stub = _stub(replica_pb2_grpc.ReplicaServiceStub, self.address)
        pending = stub.Positions.future(asked, timeout=self._timeout_s)

        def result() -> dict[int, Position]:
            with _named(self.address):
                reply = pending.result()
            return positions_of(answered(reply, self.address), partitions, before)

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
        """Refuse older clients of ``source`` from now on, and say how far it has come. Raises SourceTaken, and
        StandbyMissing where it waited for one in vain.

        Args:
            settled: of a source whose outputs are kept: those of batches up to this one are wanted no more. Raises
                SourceRetired where later ones are gone.
        """
        asked = rpb.PositionsRequest(operator=operator, source=source, partitions=partitions)
        request = rpb.OpenSourceRequest(asked=asked, session=session_to_pb(session), settled=settled)
        return positions_of(self.call("OpenSource", request, timeout_s))

    def outputs(
        self, operator: str, source: str, partitions: Iterable[int], after: int
    ) -> Iterator[tuple[int, int, bytes]]:
        """(partition, batch, output) of batches of a source behind ``after`` whose outputs are kept; of each partition
        in order. Raises NotOwner, LeaseLost, Unavailable."""
        stub = _stub(replica_pb2_grpc.ReplicaServiceStub, self.address)
        request = rpb.OutputsRequest(operator=operator, source=source, partitions=list(partitions), after=after)
        begun: list[bytes] = []
        for page in _heard(stub.Outputs(request), self.address, SILENCE_S):
            begun.append(page.output)
            if not page.more:
                yield page.partition, page.batch, b"".join(begun)
                begun.clear()
        if begun:  # less than was said would come
            raise Unavailable("an output ended in the middle", remedy="ask again", address=self.address)

    def sources(self, operator: str, partition: int) -> list[SourceView]:
        """Whoever has sent to a partition."""
        stub = _stub(replica_pb2_grpc.ReplicaServiceStub, self.address)
        request = rpb.SourcesRequest(operator=operator, partitions=[partition])
        with _named(self.address):
            pages = [answered(page, self.address) for page in stub.Sources(request, timeout=self._timeout_s)]
        return [source_of(view) for page in pages for view in page.sources]

    def retire_source(self, operator: str, source: str, partition: int) -> bool:
        """Have a partition keep a tombstone of it only. False: it had no more."""
        request = rpb.PositionsRequest(operator=operator, source=source, partitions=[partition])
        return bool(self.call("RetireSource", request).retired)

    def drop_output(self, operator: str, source: str, batch: int, partition: int, apply: bool) -> int:
        """Have a partition keep no output of a batch. Returns its bytes, 0: there is none. Args: apply: else only
        look."""
        request = rpb.DropOutputRequest(
            operator=operator, source=source, partitions=[partition], batch=batch, apply=apply
        )
        return int(self.call("DropOutput", request).sizes.get(partition, 0))

    def statistics(
        self, after: int, newest: int = 0, sizes: bool = False, timeout_s: float | None = None
    ) -> ReplicaStatistics:
        """What it holds and did; of the requests that it served, those behind number ``after``, and of these the
        ``newest`` so many, 0: all. ``sizes``: of partitions, too, for which it looks at its files."""
        return statistics_of(self.call("Stats", rpb.StatsRequest(after=after, newest=newest, sizes=sizes), timeout_s))

    def scan(self, operator: str, state: str, partitions: Iterable[int], keys: Iterable[bytes] = ()) -> Iterator[bytes]:
        """Arrow IPC streams of one state's entries, of these stored keys or of all."""
        stub = _stub(replica_pb2_grpc.ReplicaServiceStub, self.address)
        request = rpb.ScanRequest(operator=operator, state=state, partitions=list(partitions), keys=list(keys))
        begun: list[bytes] = []
        for page in _heard(stub.Scan(request), self.address, SILENCE_S):
            begun.append(page.records)
            if not page.continues:
                yield b"".join(begun)
                begun.clear()
        if begun:  # less than was said would come
            raise Unavailable("a page of state ended in the middle", remedy="ask again", address=self.address)

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
        """Send one batch's rows for these (partition, epoch), and return at once. ``tell`` is called in another thread
        as answers come, and hears of each partition once."""
        requests = requests_of(operator, batch, rows, parts, chunk_bytes, after)
        replies = Replies(self.address, [partition for partition, _ in parts], tell)
        _link(self.address).call(requests, replies)

    @property
    def heard_at(self) -> float | None:
        """When anything came last of batches that were sent there, monotonic seconds; None: nothing is awaited."""
        return _link(self.address).heard_at

    def give_up(self, since: float) -> None:
        """It is silent since then: whoever waits for an answer to a batch is told so, and batches go there anew."""
        _link(self.address).give_up(since)
