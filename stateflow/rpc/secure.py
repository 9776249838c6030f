"""Opens channels and ports of servers with the configured TLS files, or in plain text if that is allowed.

The options of all channels and servers limit messages, silence and connections.
"""

from __future__ import annotations

import asyncio
import functools
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import grpc
import grpc.aio

from stateflow.errors import BadCertificate
from stateflow.release import OWN
from stateflow.security.plain import check_dialled, check_served, connection_settings, tls_files

if TYPE_CHECKING:
    from stateflow.security.certificates import Material, TlsFiles


Options = Sequence[tuple[str, Any]]
#: limit of requests, which contain pieces of at most 3 MiB (settings); the rest is for their envelope
MESSAGE_BYTES_MAX = 4 << 20
#: limit of answers, which may name every partition, with a few hundred bytes each
ANSWER_BYTES_MAX = 64 << 20
#: seconds of silence after which a connection is asked for a sign of life, and seconds within which it must arrive
KEEPALIVE_S, KEEPALIVE_TIMEOUT_S = 10, 5
#: time for the sign of life of a peer whose system still acknowledges packets, in seconds: a suspended process, or a
#: proxy that holds messages back. gRPC applies the time above to the system alone, and would wait for the peer for 60 s
PING_TIMEOUT_S = 15
#: longest time in which a client sets up its connection to a server, TLS and the first bytes of HTTP/2 included, in
#: seconds; by default gRPC waits for 120 s
HANDSHAKE_S = 20
#: longest time for which a server keeps a connection without a call, in seconds; by default gRPC keeps it forever. The
#: project's own clients close such a connection sooner
IDLE_S = 60
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
OPTIONS = [  # of servers
    ("grpc.max_receive_message_length", MESSAGE_BYTES_MAX),
    ("grpc.server_handshake_timeout_ms", HANDSHAKE_S * 1000),
    ("grpc.max_connection_idle_ms", IDLE_S * 1000),
    *_COMMON,
]
CHANNEL_OPTIONS = [
    ("grpc.primary_user_agent", OWN.agent),
    ("grpc.max_receive_message_length", ANSWER_BYTES_MAX),
    # otherwise the channel dials a dead peer twice a second forever, at a port that may belong to another program by
    # then
    ("grpc.client_idle_timeout_ms", 10_000),
    *_COMMON,
]


def own_certificate() -> tuple[TlsFiles | None, int]:
    """Returns the files of this process's present token or certificate, and its serial number. (None, 0): plain text.

    A new number of the same files means that they have changed; later channels use the new ones.
    """
    files = tls_files()
    return files, 0 if files is None else files.current().own.serial


@functools.lru_cache(maxsize=4)
def _credentials(ca: bytes, cert: bytes, key: bytes) -> grpc.ChannelCredentials:
    return grpc.ssl_channel_credentials(ca, key, cert)


def _of(material: Material) -> grpc.ChannelCredentials:
    return _credentials(material.ca, material.cert, material.key)


def _routed(options: Options) -> Options:
    """Adds the option that decides whether a channel goes through the environment's proxy or directly to its member.

    By default gRPC would use the proxy for every address, also for those of this machine; if the proxy cannot reach an
    address, the member would seem not to answer.
    """
    return [*options, ("grpc.enable_http_proxy", int(connection_settings().http_proxy))]


def blocking_channel(address: str, options: Options) -> grpc.Channel:
    """Opens a channel with the current TLS files. Raises InsecureRefused, BadCertificate, InvalidArgument."""
    files, options = tls_files(), _routed(options)
    if files is None:
        check_dialled(address)
        return grpc.insecure_channel(address, options=options)
    return grpc.secure_channel(address, _of(files.current()), options=options)


def channel(address: str, options: Options) -> grpc.aio.Channel:
    """Opens a channel that follows changes of the TLS files.

    Raises InsecureRefused, BadCertificate, InvalidArgument.
    """
    files, options = tls_files(), _routed(options)
    if files is None:
        check_dialled(address)
        return grpc.aio.insecure_channel(address, options=options)
    return _SecureChannel(address, options, files)


class _SecureChannel(grpc.aio.Channel):
    """A channel that opens a new connection when the TLS files have changed.

    Calls that begin later use the new connection. Earlier calls continue on the former one, which is closed after the
    last of them.
    """

    def __init__(self, address: str, options: Options, files: TlsFiles) -> None:
        self._address, self._options, self._files = address, options, files
        self._number = -1
        self._channels: list[grpc.aio.Channel] = []
        self._running = Counter[grpc.aio.Channel]()
        self._closing: set[asyncio.Task[None]] = set()

    def current(self) -> grpc.aio.Channel:
        material = self._files.current()
        if material.number != self._number:
            self._number = material.number
            self._channels.append(grpc.aio.secure_channel(self._address, _of(material), options=self._options))
            for former in self._channels[:-1]:
                self._leave(former)
        return self._channels[-1]

    def begun(self, channel: grpc.aio.Channel, call: Any) -> None:
        self._running[channel] += 1
        call.add_done_callback(lambda _: self._ended(channel))

    def _ended(self, channel: grpc.aio.Channel) -> None:
        self._running[channel] -= 1
        self._leave(channel)

    def _leave(self, channel: grpc.aio.Channel) -> None:
        """Closes a former channel once it has no calls left. It is not closed with a grace period, because such a close
        could not be shortened later.
        """
        if self._running[channel] or channel not in self._channels[:-1]:
            return
        self._channels.remove(channel)
        del self._running[channel]
        closing = asyncio.get_running_loop().create_task(channel.close())
        self._closing.add(closing)
        closing.add_done_callback(self._closing.discard)

    def unary_unary(self, *arguments: Any, **named: Any) -> Any:
        return _Calls(self, "unary_unary", arguments, named)

    def unary_stream(self, *arguments: Any, **named: Any) -> Any:
        return _Calls(self, "unary_stream", arguments, named)

    def stream_unary(self, *arguments: Any, **named: Any) -> Any:
        return _Calls(self, "stream_unary", arguments, named)

    def stream_stream(self, *arguments: Any, **named: Any) -> Any:
        return _Calls(self, "stream_stream", arguments, named)

    async def __aenter__(self) -> _SecureChannel:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self, grace: float | None = None) -> None:
        while self._channels:
            await self._channels.pop().close(grace)
        await asyncio.gather(*self._closing)
        self._number = -1

    def get_state(self, try_to_connect: bool = False) -> grpc.ChannelConnectivity:
        return self.current().get_state(try_to_connect)

    async def wait_for_state_change(self, last_observed_state: grpc.ChannelConnectivity) -> None:
        await self.current().wait_for_state_change(last_observed_state)

    async def channel_ready(self) -> None:
        await self.current().channel_ready()


class _Calls:
    """Calls of one method. Each uses the channel that is current when it begins."""

    def __init__(self, owner: _SecureChannel, kind: str, arguments: Any, named: Any) -> None:
        self._owner, self._kind, self._arguments, self._named = owner, kind, arguments, named
        self._channel: grpc.aio.Channel | None = None
        self._made: Any = None

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        channel = self._owner.current()
        if channel is not self._channel:
            self._channel = channel
            self._made = getattr(channel, self._kind)(*self._arguments, **self._named)
        call = self._made(*arguments, **named)
        self._owner.begun(channel, call)
        return call


def check_reach(addresses: Iterable[str]) -> None:
    """Checks early whether channels to ``addresses`` can be opened, for a process that uses them as long as it runs.
    Raises the errors of :func:`channel`."""
    if tls_files() is None:
        for address in addresses:
            check_dialled(address)


def add_port(server: grpc.aio.Server, listen: str, advertise: str | None) -> int:
    """Binds a server to an address, and returns the port; 0: it cannot be bound.

    Raises InsecureRefused, BadCertificate, InvalidArgument, and gRPC's errors.
    """
    files = tls_files()
    if files is None:
        check_served(listen, advertise)
        return int(server.add_insecure_port(listen))
    if not files.current().own.serves:
        raise BadCertificate(
            f"the certificate of {files.current().own.identity} is not a server certificate",
            remedy="give this process a certificate of the role node, agent or controller: `stateflow certs issue`",
        )
    return int(server.add_secure_port(listen, server_credentials(files)))


def server_credentials(files: TlsFiles) -> grpc.ServerCredentials:
    """Returns credentials that follow changes of the TLS files.

    Each handshake uses the files of its time; existing connections stay open. The server admits no client without a
    certificate of the authority.
    """
    given = [-1]

    def configuration() -> grpc.ServerCertificateConfiguration | None:
        material = files.current()
        if material.number == given[0]:
            return None  # unchanged
        given[0] = material.number
        return grpc.ssl_server_certificate_configuration([(material.key, material.cert)], material.ca)

    return grpc.dynamic_ssl_server_credentials(configuration(), configuration, require_client_authentication=True)
