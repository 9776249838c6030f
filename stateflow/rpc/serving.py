"""Creates gRPC servers, which check each call in layers before its handler runs, and report their health.

A layer is an interceptor that wraps every handler of a server. The layers wrap each other: first :class:`Understood`,
then with TLS :class:`Admission`, then :class:`CallLimits` (:func:`new_server`). gRPC itself limits connections, and the
calls that no layer has counted yet.
"""

from __future__ import annotations

import contextvars
import logging
import socket
from abc import abstractmethod
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import TYPE_CHECKING, Any, TypeAlias

import grpc
import grpc.aio
from google.protobuf.message import DecodeError

from stateflow.clock import SYSTEM_CLOCK, Clock, Throttle
from stateflow.errors import (
    BadCertificate,
    Busy,
    InvalidArgument,
    NotAllowed,
    PortInUse,
    ReleaseMismatch,
)
from stateflow.metrics.figures import Values
from stateflow.metrics.limits import LIMIT_HITS, Limit, LimitHits
from stateflow.partition.control import Command
from stateflow.release import FIRST, Release, check_release, release_of
from stateflow.rpc import agent_pb2 as apb
from stateflow.rpc import agent_pb2_grpc
from stateflow.rpc.faults import abort, remote_error
from stateflow.rpc.secure import CHANNEL_OPTIONS, OPTIONS, add_port, blocking_channel
from stateflow.rpc.wire import USER_KEY, streaming, value_of
from stateflow.security.plain import tls_files
from stateflow.security.refusals import REFUSALS, SAY_EVERY_S, Refusals
from stateflow.security.roles import Asker, Identity
from stateflow.settings import ServerSettings
from stateflow.types import cannot_listen, listened_at

if TYPE_CHECKING:
    from stateflow.security.certificates import Caller, TlsFiles


log = logging.getLogger(__name__)
#: prefix of methods that even a busy server answers, because its supervisor would otherwise consider it dead
_FREE = "/grpc.health.v1.Health/"
#: least number of calls that gRPC admits beyond the limit of calls, to be refused by it
CALLS_AHEAD_MIN = 64


# -- Layers ----------------------------------------------------------------------------------------------------------

Context: TypeAlias = grpc.aio.ServicerContext
#: handlers of calls with one request and one answer, with one request and a stream of answers, and with two streams,
#: for which the handler writes the responses itself
Unary = Callable[[Any, Context], Awaitable[Any]]
Many = Callable[[Any, Context], AsyncIterator[Any]]
Both = Callable[[AsyncIterator[Any], Context], Awaitable[Any]]


class Layer(grpc.aio.ServerInterceptor):
    """An interceptor that wraps each method's handler once, at its first call."""

    def __init__(self) -> None:
        self._wrapped: dict[str, grpc.RpcMethodHandler] = {}

    @abstractmethod
    def unary(self, method: str, inner: Unary) -> Unary: ...

    @abstractmethod
    def many(self, method: str, inner: Many) -> Many: ...

    @abstractmethod
    def both(self, method: str, inner: Both) -> Both: ...

    def leaves(self, method: str) -> bool:
        """Tells whether the layer leaves this method unwrapped."""
        return False

    def read_by(self, read: Any) -> Any:
        """Returns the function that parses requests."""
        return read

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler]],
        details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler:
        handler = await continuation(details)
        if handler is None or self.leaves(details.method):  # None: there is no such method, and gRPC tells the caller
            return handler
        if details.method not in self._wrapped:
            self._wrapped[details.method] = self._wrap(handler, details.method)
        return self._wrapped[details.method]

    def _wrap(self, handler: grpc.RpcMethodHandler, method: str) -> grpc.RpcMethodHandler:
        coded = self.read_by(handler.request_deserializer), handler.response_serializer
        if handler.unary_unary is not None:
            return grpc.unary_unary_rpc_method_handler(self.unary(method, handler.unary_unary), *coded)
        if handler.unary_stream is not None:
            return grpc.unary_stream_rpc_method_handler(self.many(method, handler.unary_stream), *coded)
        return grpc.stream_stream_rpc_method_handler(self.both(method, handler.stream_stream), *coded)


def _release_of(context: Context) -> Release:
    for key, value in context.invocation_metadata() or ():
        if key == "user-agent":
            return release_of(value if isinstance(value, str) else "")
    return FIRST


class _Unreadable:
    def __init__(self, error: Exception) -> None:
        self.refusal = InvalidArgument(
            f"the request cannot be read: {error}", remedy="check who sends it, and its version"
        )


class Understood(Layer):
    """Refuses callers with an incompatible release, and requests that cannot be parsed.

    Unparsable requests are refused like any other invalid one; gRPC alone would only answer ``unknown``. This layer is
    the first one, because the others read the contents of requests.
    """

    def read_by(self, read: Any) -> Any:
        if read is None:  # the method takes raw bytes
            return None

        def reading(data: bytes) -> Any:
            try:
                return read(data)
            except DecodeError as error:
                return _Unreadable(error)

        return reading

    def unary(self, method: str, inner: Unary) -> Unary:
        async def call(request: Any, context: Context) -> Any:
            await _understand(request, context)
            return await inner(request, context)

        return call

    def many(self, method: str, inner: Many) -> Many:
        async def call(request: Any, context: Context) -> AsyncIterator[Any]:
            await _understand(request, context)
            async for message in inner(request, context):
                yield message

        return call

    def both(self, method: str, inner: Both) -> Both:
        async def call(requests: AsyncIterator[Any], context: Context) -> None:
            await _understand(None, context)
            refusal: InvalidArgument | None = None

            async def readable() -> AsyncIterator[Any]:
                nonlocal refusal
                async for request in requests:
                    if type(request) is _Unreadable:
                        refusal = request.refusal
                        raise refusal
                    yield request

            try:
                await inner(readable(), context)
            except InvalidArgument as error:
                if error is not refusal:
                    raise
                await abort(context, error)

        return call


async def _understand(request: Any, context: Context) -> None:
    """Ends the call if the caller's release is incompatible or the request cannot be parsed."""
    try:
        check_release(_release_of(context))
    except ReleaseMismatch as error:
        await abort(context, error)
    if type(request) is _Unreadable:
        await abort(context, request.refusal)


# -- Admission of calls ----------------------------------------------------------------------------------------------

_CALLER: contextvars.ContextVar[Identity | None] = contextvars.ContextVar("caller", default=None)
#: the caller, and the user for whom it calls, unless the running call is only a report of a member of the cluster
_ASKER: contextvars.ContextVar[Asker | None] = contextvars.ContextVar("asker", default=None)


def caller() -> Identity | None:
    """Returns the caller of the running call. None: the call arrived in plain text, or no call is running."""
    return _CALLER.get()


def asker() -> Asker | None:
    """Returns the caller that asked for the work in progress. None: no call is running, the call arrived in plain text,
    or it is only a report of a member of the cluster.
    """
    return _ASKER.get()


def caller_name(context: Context) -> str:
    """Returns the name under which a call's caller is counted: that of its identity, or in plain text its host. A
    connection has no name of its own, because a host may open any number of connections.
    """
    return str(caller() or _host_of(context.peer()))


def _user_of(context: Context) -> Identity | None:
    """Returns the user for whom the caller calls; None: it calls for itself. Raises NotAllowed for another text."""
    said = dict(context.invocation_metadata() or ()).get(USER_KEY)
    if said is None:
        return None
    user = Identity.of_uri(said) if isinstance(said, str) else None
    if user is None:
        raise NotAllowed("the user of the call has no identity", remedy="check who sends it, and its version")
    return user


class Admission(Layer):
    """Admits a call before its handler runs, if the role in the caller's certificate allows the call.

    Args:
        refusals: counts and logs the calls that are not admitted.
    """

    def __init__(self, files: TlsFiles, clock: Clock = SYSTEM_CLOCK, refusals: Refusals = REFUSALS) -> None:
        super().__init__()
        self._files, self._clock, self._refusals = files, clock, refusals

    def unary(self, method: str, inner: Unary) -> Unary:
        async def call(request: Any, context: Context) -> Any:
            await self._admit(method, request, context)
            return await inner(request, context)

        return call

    def many(self, method: str, inner: Many) -> Many:
        async def call(request: Any, context: Context) -> AsyncIterator[Any]:
            """Checks the caller before each message, because its certificate may be revoked while the stream lasts,
            perhaps for days."""
            who = await self._admit(method, request, context)
            async for message in inner(request, context):
                try:
                    who.check(request)
                except NotAllowed as error:
                    await self._refuse(method, context, error)
                yield message

        return call

    def both(self, method: str, inner: Both) -> Both:
        async def call(requests: AsyncIterator[Any], context: Context) -> None:
            """Checks each request, because the stream may last for days. The handler writes its responses itself."""
            who = await self._admit(method, None, context)

            async def checked() -> AsyncIterator[Any]:
                async for request in requests:
                    try:
                        who.check(request)
                    except NotAllowed as error:  # noted here, because the handler may answer it as its own error
                        self._note(method, context, error)
                        raise
                    yield request

            try:
                await inner(checked(), context)
            except NotAllowed as error:
                await abort(context, error)

        return call

    async def _admit(self, method: str, request: Any, context: Context) -> Caller:
        """Admits the caller, or ends the call with NotAllowed.

        Args:
            request: the request; None: the first one has not arrived yet.
        """
        from stateflow.security.certificates import Caller

        try:
            sent = context.auth_context().get("x509_pem_cert", [b""])[0]
            who = Caller(self._files, self._clock, method, sent, _user_of(context))
            who.check(request)
        except BadCertificate as error:
            refused = NotAllowed(error.what, remedy=error.remedy, **error.where)
        except NotAllowed as error:
            refused = error
        else:
            # for the task of this call, and the tasks that it begins
            _CALLER.set(who.identity)
            _ASKER.set(None if who.rule.is_report else who.asker)
            return who
        await self._refuse(method, context, refused)
        raise refused

    async def _refuse(self, method: str, context: Context, error: NotAllowed) -> None:
        self._note(method, context, error)
        await abort(context, error)

    def _note(self, method: str, context: Context, error: NotAllowed) -> None:
        self._refusals.note(method.rpartition("/")[2], error, _host_of(context.peer()))


# -- Limits on the calls under way -----------------------------------------------------------------------------------


class CallLimits(Layer):
    """Limits the number of running calls, of each caller and of all callers together. ``refused``: number of calls
    refused since the start.

    Further calls are refused as busy, and their callers try again. The limit of one caller does not affect others.
    Health checks are not limited.

    The layer runs after :class:`Admission`, which identifies a caller by its certificate. In plain text the host
    identifies the caller.

    Args:
        refusals: the refusals that :class:`Admission` counts, which are reported as figures.
        hits: counts of the limits that were reached.
        clock: measures the interval of log lines.
    """

    def __init__(
        self,
        settings: ServerSettings,
        refusals: Refusals = REFUSALS,
        hits: LimitHits = LIMIT_HITS,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        super().__init__()
        self._settings, self._refusals, self._hits = settings, refusals, hits
        self._lines = Throttle(clock, SAY_EVERY_S)
        self._under_way: Counter[str] = Counter()
        self.running = self.refused = 0
        hits.watch("calls", "calls_per_caller")

    def leaves(self, method: str) -> bool:
        return method.startswith(_FREE)

    def unary(self, method: str, inner: Unary) -> Unary:
        async def call(request: Any, context: Context) -> Any:
            whose = await self._begin(context)
            try:
                return await inner(request, context)
            finally:
                self._end(whose)

        return call

    def many(self, method: str, inner: Many) -> Many:
        async def call(request: Any, context: Context) -> AsyncIterator[Any]:
            whose = await self._begin(context)
            try:
                async for message in inner(request, context):
                    yield message
            finally:
                self._end(whose)

        return call

    def both(self, method: str, inner: Both) -> Both:
        return self.unary(method, inner)

    async def _begin(self, context: Context) -> str:
        whose, settings = caller_name(context), self._settings
        if self._under_way[whose] >= settings.calls_per_caller_max:
            most = settings.calls_per_caller_max
            self._note("calls_per_caller", whose, f"caller {whose} has {most} calls in progress")
            await abort(
                context,
                Busy(
                    f"{most} calls of {whose} are already in progress here",
                    remedy="wait for the retry, use fewer clients, or raise STATEFLOW_SERVER_CALLS_PER_CALLER_MAX",
                ),
            )
        if self.running >= settings.calls_max:
            most = settings.calls_max
            self._note("calls", "", f"{most} calls of all callers are in progress")
            await abort(
                context,
                Busy(
                    f"{most} calls of all callers are already in progress here",
                    remedy="wait for the retry, use fewer clients, or raise STATEFLOW_SERVER_CALLS_MAX",
                ),
            )
        self._under_way[whose] += 1
        self.running += 1
        return whose

    def figures(self, used: Mapping[Limit, float] | None = None) -> Values:
        """Returns the metrics of calls and of limits.

        Args:
            used: by limit, the share of it that is in use, for limits of the process that are not kept here.
        """
        settings, busiest = self._settings, max(self._under_way.values(), default=0)
        shares: dict[Limit, float] = {
            "calls": self.running / settings.calls_max,
            "calls_per_caller": busiest / settings.calls_per_caller_max,
            **(used or {}),
        }
        return {
            "stateflow_calls_running": {(): self.running},
            "stateflow_calls_refused_total": {(): self.refused},
            "stateflow_calls_not_allowed_total": self._refusals.counts(),
            "stateflow_limit_used_ratio": {(limit,): share for limit, share in shares.items()},
            "stateflow_limit_reached_total": self._hits.counts(),
        }

    def _note(self, limit: Limit, whose: str, what: str) -> None:
        self.refused += 1
        self._hits.note(limit)
        if self._lines.passes(whose):
            log.warning("%s, more are refused; %d refused so far", what, self.refused)

    def _end(self, whose: str) -> None:
        self.running -= 1
        self._under_way[whose] -= 1
        if not self._under_way[whose]:
            del self._under_way[whose]


def _host_of(peer: str) -> str:
    """Returns an address such as ``ipv4:10.0.0.7:51234`` without the port, which differs between connections."""
    return peer.rpartition(":")[0] if peer.startswith("ip") else peer


# -- Health of a process ---------------------------------------------------------------------------------------------

# The two messages have one field each, so they are written here without a further package.
READY = "ready"
#: HealthCheckResponse: field 1, an enum
SERVING, NOT_SERVING = b"\x08\x01", b"\x08\x02"
#: tag of a HealthCheckRequest: field 1, a text of at most 127 bytes
_TAG = 0x0A


def _asked(request: bytes) -> str | None:
    """Returns the name of the service that a health request asks about; None: the request is malformed."""
    if not request:
        return ""
    if len(request) < 2 or request[0] != _TAG or request[1] != len(request) - 2:
        return None
    return request[2:].decode("utf-8", errors="replace")


def ask_health(address: str, service: str, timeout_s: float) -> bool:
    """Asks a process whether it is healthy. Raises NotAllowed, and Unavailable if no process answers or it has no such
    service."""
    asked = service.encode()
    with blocking_channel(address, CHANNEL_OPTIONS) as channel:
        try:
            answer: bytes = channel.unary_unary("/grpc.health.v1.Health/Check")(
                bytes([_TAG, len(asked)]) + asked, timeout=timeout_s
            )
        except grpc.RpcError as error:
            raise remote_error(error, address) from error
    return answer == SERVING


def add_health(server: Any, is_ready: Callable[[], bool] = lambda: True) -> None:
    """Adds gRPC's own health protocol (``grpc.health.v1``), which Kubernetes and others speak, to a server.

    The service ``live`` is healthy if the process answers; ``ready``, or no name, if the process can take work.
    """

    async def check(request: bytes, context: grpc.aio.ServicerContext) -> bytes:
        match _asked(request):
            case "live":
                return SERVING
            case "" | "ready":
                return SERVING if is_ready() else NOT_SERVING
            case _:
                await context.abort(grpc.StatusCode.NOT_FOUND, "unknown service: use live or ready")
                raise AssertionError

    method = grpc.unary_unary_rpc_method_handler(check)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("grpc.health.v1.Health", {"Check": method}),))


# -- A server --------------------------------------------------------------------------------------------------------


def new_server(limits: CallLimits | None = None) -> grpc.aio.Server:
    """Creates a server that checks each call before its handler runs.

    The checks, in order:

    1. The caller has a compatible release, and the request can be parsed.
    2. With TLS, the caller's identity allows the call. Plain text does not tell callers apart.
    3. Neither the caller nor all callers together have too many running calls.

    Before that, gRPC closes connections beyond ``connections_max``, those that are not set up within ``HANDSHAKE_S``,
    and those without a call for ``IDLE_S``.

    Raises BadCertificate, InvalidArgument.

    Args:
        limits: call limits, for a process that reports them; None: new ones.
    """
    settings, files = ServerSettings(), tls_files()
    admission = [] if files is None else [Admission(files)]
    outer = outer_calls_max(settings)
    return grpc.aio.server(
        interceptors=[Understood(), *admission, limits or CallLimits(settings)],
        options=[
            *OPTIONS,
            ("grpc.max_allowed_incoming_connections", settings.connections_max),
            ("grpc.max_concurrent_streams", outer),  # of one connection: further ones wait at the client
        ],
        maximum_concurrent_rpcs=outer,
    )


def outer_calls_max(settings: ServerSettings) -> int:
    """Returns the limit on calls that gRPC itself applies, without a count, and to health checks, too.

    It is above that of :class:`CallLimits`, so that health checks have room, and calls that are about to be refused. It
    bounds a flood that arrives faster than calls are refused.
    """
    return settings.calls_max + max(CALLS_AHEAD_MIN, settings.calls_max // 4)


def _probe(host: str, port: int) -> None:
    """Binds the address for a moment. Raises OSError, which gRPC would report only on stderr and in its own words."""
    family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind(address)


def bind(server: grpc.aio.Server, listen: str, advertise: str | None = None) -> str:
    """Binds a server, and returns the address with the real port.

    Raises PortInUse, InvalidArgument, InsecureRefused, BadCertificate.
    """
    host, port = listened_at(listen)
    try:
        _probe(host, port)
        bound = add_port(server, listen, advertise)
    except OSError as error:
        raise cannot_listen(error, listen) from error
    except (RuntimeError, UnicodeError) as error:  # gRPC's errors, and that of a malformed host name
        raise _not_bound(listen) from error
    if bound == 0:
        raise _not_bound(listen)
    return f"{listen.rpartition(':')[0]}:{bound}"


def _not_bound(listen: str) -> PortInUse:
    remedy = "check the host name, or choose another port"
    return PortInUse("the address cannot be bound", remedy=remedy, address=listen)


def reached_at(advertise: str | None, bound: str) -> str:
    """Returns the address at which others reach a server that listens at ``bound``.

    Args:
        advertise: host:port; port 0 stands for the bound one.
    """
    if advertise and advertise.endswith(":0"):
        return f"{advertise[:-2]}:{bound.rpartition(':')[2]}"
    return advertise or bound


# -- The service of an agent -----------------------------------------------------------------------------------------

#: (command, replica, lines, follow) → pieces of the replica's log; an empty piece is only a sign of life
Logs = Callable[[Command, str, int, bool], AsyncIterator[bytes]]


class AgentService(agent_pb2_grpc.AgentServiceServicer):
    """The gRPC service of an agent."""

    def __init__(self, logs: Logs) -> None:
        self._logs = logs

    @streaming
    async def Logs(self, request: apb.LogsRequest, _: grpc.aio.ServicerContext) -> AsyncIterator[apb.LogsPage]:
        async for data in self._logs(
            value_of(Command, request.command), request.replica, request.lines, request.follow
        ):
            yield apb.LogsPage(data=data)


def add_agent_service(server: Any, logs: Logs) -> None:
    agent_pb2_grpc.add_AgentServiceServicer_to_server(AgentService(logs), server)
