"""The errors, limits and handlers that all channels share.

An error of a handler goes to the caller as a ``Fault`` in the trailing metadata of the failed call, and the caller
raises the same StateflowError (:func:`abort`, :func:`remote_error`). Both ends check the fields of what they receive
(:func:`unary`, :func:`streaming`, :func:`answered`).
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import math
import threading
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterable, Iterator
from typing import Any, TypeVar

import grpc
import grpc.aio
from google.protobuf.message import DecodeError as NoMessage
from google.protobuf.message import Message

from stateflow.clock import SYSTEM_CLOCK
from stateflow.errors import (
    REPORT_LOG,
    InvalidArgument,
    ReleaseMismatch,
    StateflowError,
    Unavailable,
    from_wire,
)
from stateflow.release import OWN
from stateflow.rpc import common_pb2 as pb
from stateflow.rpc.fields import checked
from stateflow.rpc.secure import channel
from stateflow.storage.faults import meaning

#: limit of requests, which contain pieces of at most 3 MiB (settings); the rest is for their envelope
MESSAGE_BYTES_MAX = 4 << 20
#: limit of answers, which may name every partition, with a few hundred bytes each
ANSWER_BYTES_MAX = 64 << 20
#: after this silence a connection is asked for a sign of life, which must arrive within the second time, seconds
KEEPALIVE_S, KEEPALIVE_TIMEOUT_S = 10, 5
#: time for the sign of life of a peer whose system still acknowledges packets, in seconds: a process that was stopped,
#: or a proxy that holds. gRPC applies the time above to the system alone, and would wait for the peer for 60 s
PING_TIMEOUT_S = 15
#: longest silence of a stream without deadline, in seconds
SILENCE_S = 60.0
_COMMON = [
    ("grpc.max_send_message_length", ANSWER_BYTES_MAX),
    ("grpc.so_reuseport", 0),
    ("grpc.keepalive_time_ms", KEEPALIVE_S * 1000),
    ("grpc.keepalive_timeout_ms", KEEPALIVE_TIMEOUT_S * 1000),
    ("grpc.http2.ping_timeout_ms", PING_TIMEOUT_S * 1000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.http2.max_ping_strikes", 0),  # a server that takes pings for abuse would cut the channel in mid-call
    ("grpc.initial_reconnect_backoff_ms", 50),
    ("grpc.max_reconnect_backoff_ms", 500),
]
OPTIONS = [("grpc.max_receive_message_length", MESSAGE_BYTES_MAX), *_COMMON]  # of servers
CHANNEL_OPTIONS = [
    ("grpc.primary_user_agent", OWN.agent),
    ("grpc.max_receive_message_length", ANSWER_BYTES_MAX),
    # otherwise the channel dials a dead peer twice a second forever, at a port that may belong to another program by
    # then
    ("grpc.client_idle_timeout_ms", 10_000),
    *_COMMON,
]
#: repeated fields that may outgrow a message are sent in pieces of about this many bytes
PIECE_BYTES = 1 << 20
#: bytes of a page of a long list for display, small because the event loop that builds pages also has urgent work
PAGE_BYTES = 32 << 10
CONNECT_TIMEOUT_S = 2.0
FAULT_KEY = "stateflow-fault-bin"
#: metadata of an answer: the newest ledger record on which it is based, and the leader's term. Metadata of a request:
#: the record that a follower must have read to answer it.
NEWEST_KEY, TERM_KEY, AFTER_KEY = "stateflow-newest", "stateflow-term", "stateflow-after"
#: limits in characters, for a fault that is too long for HTTP/2's metadata
FAULT_TEXT_MAX, FAULT_FACT_MAX, FAULT_FACTS_MAX = 600, 100, 12
T = TypeVar("T")
M = TypeVar("M", bound=Message)
log = logging.getLogger(__name__)


# -- faults -----------------------------------------------------------------------------------------------


def fault_of(error: StateflowError) -> pb.Fault:
    wire = error.to_wire()
    where = {_sendable(key): _sendable(value) for key, value in wire["where"].items()}
    return pb.Fault(code=wire["code"], what=_sendable(wire["what"]), remedy=_sendable(wire["remedy"]), where=where)


def _sendable(text: str) -> str:
    """Escapes lone surrogates, which may occur in file names: UTF-8 cannot encode them, and sending an error must not
    fail."""
    return text.encode(errors="backslashreplace").decode()


def error_of(fault: pb.Fault) -> StateflowError:
    """Returns the error of a fault from any sender, trusted or not."""
    wire = {"code": fault.code, "what": fault.what, "remedy": fault.remedy, "where": dict(fault.where)}
    return from_wire(wire)


def unexpected(error: BaseException) -> StateflowError:
    """Returns the error of the environment, if it is one; otherwise a StateflowError that users can report."""
    return meaning(error) or StateflowError(f"{type(error).__name__}: {error}", remedy=REPORT_LOG)


def remote_error(error: grpc.RpcError, address: str) -> StateflowError:
    """Returns the meaning of a failed call: the error that the server named, or Unavailable."""
    for key, value in error.trailing_metadata() or ():
        if key == FAULT_KEY:
            with contextlib.suppress(NoMessage):
                return error_of(pb.Fault.FromString(value))
    code = error.code()
    details = error.details() or ""
    if code is grpc.StatusCode.UNIMPLEMENTED:
        return ReleaseMismatch(f"{address} does not know the call: its stateflow is older", remedy="upgrade it first")
    why = details.rpartition(": ")[2].strip(" []")  # the text before is gRPC's own
    what = f"no answer from {address}: {code.name.lower().replace('_', ' ')}" + (f", {why}" if why else "")
    return Unavailable(what, remedy=_mended(details))


def _mended(details: str) -> str:
    """Returns the remedy for a failed handshake, chosen by gRPC's message."""
    for word, remedy in _HANDSHAKES.items():
        if word in details:
            return remedy
    return "check that it runs and that the address is right"


_HANDSHAKES = {
    "Hostname Verification": "its certificate is not for this host: `stateflow certs issue --host`",
    "certificate has expired": "its certificate has expired: `stateflow certs renew`",
    "CERTIFICATE_VERIFY_FAILED": "its certificate is not from the authority in STATEFLOW_TLS_CA, or not for servers: "
    "`stateflow certs issue`",
    "WRONG_VERSION_NUMBER": "it speaks plain text: set STATEFLOW_TLS_CA, _CERT and _KEY there, or none of them here",
    "Socket closed": "check that it runs and that the address is right; with TLS it closes connections in plain text, "
    "and those with a certificate that has expired or is from another authority",
}


def answered(message: M, address: str) -> M:
    """Returns the answer, if each of its fields holds a valid value.

    Raises Unavailable otherwise: the answering process is not a member of the cluster.
    """
    try:
        return checked(message)
    except InvalidArgument as error:
        what = f"invalid answer from {address}: {error.what}"
        raise Unavailable(what, remedy="check what runs there, and its version", **error.where) from error


def connect(address: str) -> grpc.aio.Channel:
    """Opens a channel between servers; a simulation passes another function. Raises InsecureRefused, BadCertificate."""
    return channel(address, CHANNEL_OPTIONS)


async def connected(channel: grpc.aio.Channel, address: str) -> None:
    """Waits until the channel has a connection.

    Without that wait, calls to a restarted peer would be refused while the channel backs off, although the peer is
    running. Raises Unavailable.
    """
    try:
        await asyncio.wait_for(channel.channel_ready(), CONNECT_TIMEOUT_S)
    except TimeoutError as error:
        what = f"no connection to {address} within {CONNECT_TIMEOUT_S:g} s"
        raise Unavailable(what, remedy="check that it runs and that the address is right") from error


async def read_stream(
    call: Any,
    address: str,
    silence_s: float = SILENCE_S,
    answers: Callable[[float], Awaitable[bool]] | None = None,
) -> AsyncGenerator[Any]:
    """Yields the messages of a stream without deadline, whose duration cannot be known.

    gRPC answers keepalive in its own threads, so a server whose event loop hangs keeps its connections. Raises the
    refusal of the server, or Unavailable if the server is silent for about ``silence_s``.

    Args:
        call: the stream, which is cancelled at the end.
        answers: asks the server for something else, and tells whether it answered within so many seconds; work that
            takes long is not silence then. None: only messages count, which the server sends more often.
    """
    loop = asyncio.get_running_loop()
    waits_since, silent = loop.time(), False

    async def watch() -> None:
        nonlocal waits_since, silent
        patience_s = silence_s if answers is None else silence_s / 2
        while not silent:
            await asyncio.sleep(silence_s / 8)
            since = waits_since
            if loop.time() - since < patience_s:
                continue
            alive = answers is not None and await answers(silence_s / 4)
            if waits_since == since:  # otherwise a message has come meanwhile
                waits_since, silent = loop.time(), not alive
        call.cancel()

    watching = asyncio.ensure_future(watch())
    try:
        while (message := await call.read()) is not grpc.aio.EOF:
            waits_since = math.inf  # the reader may take any time before it asks for more
            yield answered(message, address)
            waits_since = loop.time()
    except grpc.aio.AioRpcError as error:
        raise remote_error(error, address) from error
    except asyncio.CancelledError:
        reader = asyncio.current_task()
        if not silent or (reader is not None and reader.cancelling()):
            raise
        what = f"no message from {address} for {silence_s:g} s"
        raise Unavailable(what, remedy="check that it is healthy, and retry") from None
    finally:
        watching.cancel()
        call.cancel()


def read_stream_blocking(call: Any, address: str, silence_s: float = SILENCE_S) -> Iterator[Any]:
    """Yields the messages of a stream without deadline; see :func:`read_stream`. A thread watches for silence.

    Raises the refusal of the server, or Unavailable, also after ``silence_s`` without a message.
    """
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
            heard_at = math.inf  # the reader may take any time before it asks for more
            yield answered(message, address)
            heard_at = SYSTEM_CLOCK.monotonic()
    except grpc.RpcError as error:
        if silent:
            what = f"no message from {address} for {silence_s:g} s"
            raise Unavailable(what, remedy="check that it is healthy, and retry") from error
        raise remote_error(error, address) from error
    finally:
        ended.set()
        call.cancel()


async def abort(context: grpc.aio.ServicerContext, error: StateflowError) -> None:
    fault = fault_of(error)
    if fault.ByteSize() > 6000:  # HTTP/2 metadata is limited
        for key in ("traceback", "row"):
            fault.where.pop(key, None)
        fault.what, fault.remedy = fault.what[:FAULT_TEXT_MAX], fault.remedy[:FAULT_TEXT_MAX]
        for key in list(fault.where)[FAULT_FACTS_MAX:]:
            del fault.where[key]
        for key, value in fault.where.items():
            fault.where[key] = value[:FAULT_FACT_MAX]
    await context.abort(
        grpc.StatusCode.FAILED_PRECONDITION,
        fault.code,
        trailing_metadata=((FAULT_KEY, fault.SerializeToString()),),
    )


def unary(method: Callable[..., Awaitable[T]]) -> Callable[..., Awaitable[T]]:
    """Decorates a unary handler: it checks the request's fields, and sends StateflowErrors to the caller unchanged."""

    @functools.wraps(method)
    async def handler(self: Any, request: Any, context: grpc.aio.ServicerContext) -> T:
        try:
            return await method(self, checked(request), context)
        except StateflowError as error:
            await abort(context, error)
            raise
        except Exception as error:
            _say(method.__name__, error)
            await abort(context, unexpected(error))
            raise

    return handler


def streaming(method: Callable[..., AsyncIterator[T]]) -> Callable[..., AsyncIterator[T]]:
    @functools.wraps(method)
    async def handler(self: Any, request: Any, context: grpc.aio.ServicerContext) -> AsyncIterator[T]:
        try:
            async for message in method(self, checked(request), context):
                yield message
        except StateflowError as error:
            await abort(context, error)
        except Exception as error:  # noqa: BLE001 - logged, and sent to the caller
            _say(method.__name__, error)
            await abort(context, unexpected(error))

    return handler


def _say(what: str, error: Exception) -> None:
    """Logs an error: in one line if the environment is to blame, or with its stack trace if stateflow may be."""
    meant = meaning(error)
    log.error("%s failed: %s", what, meant or error, exc_info=None if meant else error)


# -- freshness of answers ---------------------------------------------------------------------------------


def tell_newest(context: grpc.aio.ServicerContext, term: int, record: int) -> None:
    """Attaches to an answer the term and record on which it is based.

    Args:
        term: term of the answering leader; 0: a follower answers.
    """
    context.set_trailing_metadata(((NEWEST_KEY, str(record)), (TERM_KEY, str(term))))


def newest_of(metadata: Iterable[tuple[str, str | bytes]] | None) -> tuple[int, int]:
    """Returns (term, record) of an answer; 0: not stated."""
    return _number_of(TERM_KEY, metadata) or 0, _number_of(NEWEST_KEY, metadata) or 0


def after_of(context: grpc.aio.ServicerContext) -> int | None:
    """Returns the ledger record that a follower must have read to answer; None: only the leader may answer."""
    return _number_of(AFTER_KEY, context.invocation_metadata())


def _number_of(key: str, metadata: Any) -> int | None:
    """Returns the number under a key; None: there is none, or it is invalid, because any process may have sent it."""
    said = dict(metadata or ()).get(key, "")
    return int(said) if isinstance(said, str) and said.isdecimal() and len(said) < 19 else None


# -- pieces -----------------------------------------------------------------------------------------------


def pieces(data: bytes, size: int) -> Iterator[tuple[bytes, bool]]:
    """Yields (piece of at most ``size`` bytes, whether it is the last); one empty piece for no data."""
    for at in range(0, max(len(data), 1), size):
        yield data[at : at + size], at + size >= len(data)


def batched(messages: Iterable[M], piece_bytes: int = PIECE_BYTES) -> Iterator[list[M]]:
    """Yields messages in lists of about ``piece_bytes``; one empty list if there are none."""
    batch: list[M] = []
    size = 0
    for message in messages:
        if size >= piece_bytes:
            yield batch
            batch, size = [], 0
        batch.append(message)
        size += message.ByteSize()
    yield batch
