"""Every RPC of every service, called by every kind of caller: the table of roles decides who is let in."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest

from stateflow.clock import SYSTEM_CLOCK, ManualClock
from stateflow.errors import NotAllowed, ReleaseMismatch, Unavailable
from stateflow.local.cluster import Certificates
from stateflow.rpc import agent_pb2, controller_pb2, replica_pb2
from stateflow.rpc.secure import server_credentials
from stateflow.rpc.serving import Admission, caller, new_server
from stateflow.rpc.wire import CHANNEL_OPTIONS, OPTIONS, remote_error
from stateflow.security import certificates as files_module
from stateflow.security.authority import Authority
from stateflow.security.certificates import ROLES, TlsFiles, decoded_token
from stateflow.security.roles import RULES, Identity, Role, check_call, check_request
from stateflow.settings import ConnectionSettings

APPLY = "/stateflow.rpc.ReplicaService/Apply"
POSITIONS = "/stateflow.rpc.ReplicaService/Positions"
OF_OP = replica_pb2.PositionsRequest(operator="Op")
REQUESTS = {
    f"/{service.full_name}/{method.name}": getattr(module, method.input_type.name, None)
    for module in (agent_pb2, controller_pb2, replica_pb2)
    for service in module.DESCRIPTOR.services_by_name.values()
    for method in service.methods
}


class Anything(grpc.GenericRpcHandler):
    """A handler for every method that answers with its caller.

    As Apply does, the handler answers a stream message by message.
    """

    def service(self, details: Any) -> grpc.RpcMethodHandler | None:
        method = details.method
        kind: Any = REQUESTS.get(method) or replica_pb2.CheckpointRequest
        if method == "/stateflow.rpc.Nothing/Such":
            return None

        async def once(request: Any, _: Any) -> bytes:
            return str(caller()).encode()

        async def each(requests: Any, context: Any) -> None:
            async for _ in requests:
                await context.write(str(caller()).encode())

        async def many(request: Any, _: Any) -> AsyncIterator[bytes]:
            yield str(caller()).encode()

        if method == APPLY:
            return grpc.stream_stream_rpc_method_handler(each, replica_pb2.ApplyRequest.FromString)
        if method == "/stateflow.rpc.ReplicaService/Scan":
            return grpc.unary_stream_rpc_method_handler(many, kind.FromString)
        return grpc.unary_unary_rpc_method_handler(once, kind.FromString)


def settings(environment: Mapping[str, str]) -> ConnectionSettings:
    return ConnectionSettings(**{k.removeprefix("STATEFLOW_").lower(): v for k, v in environment.items()})  # type: ignore[arg-type]


class World:
    def __init__(self, directory: Path) -> None:
        self.certificates = Certificates(directory / "certificates")
        self.files = TlsFiles(settings(self.certificates.issue("here", "node", "127.0.0.1")))
        self.clock = ManualClock(SYSTEM_CLOCK.now_us())

    @contextlib.asynccontextmanager
    async def serving(self) -> AsyncIterator[str]:
        server = grpc.aio.server(interceptors=[Admission(self.files, self.clock)], options=OPTIONS)
        server.add_generic_rpc_handlers((Anything(),))
        port = server.add_secure_port("127.0.0.1:0", server_credentials(self.files))
        await server.start()
        try:
            yield f"127.0.0.1:{port}"
        finally:
            await server.stop(None)

    def channel(self, address: str, environment: Mapping[str, str]) -> grpc.aio.Channel:
        ca = Path(self.certificates.issue("here", "node")["STATEFLOW_TLS_CA"]).read_bytes()
        key, cert = (Path(environment[f"STATEFLOW_TLS_{which}"]).read_bytes() for which in ("KEY", "CERT"))
        return grpc.aio.secure_channel(address, grpc.ssl_channel_credentials(ca, key, cert), options=CHANNEL_OPTIONS)


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    monkeypatch.setattr(files_module, "LOOK_S", 0.0)
    return World(tmp_path)


async def ask(channel: grpc.aio.Channel, method: str, request: Any = None) -> str:
    """Returns the caller that the server recognised. Raises NotAllowed, Unavailable."""
    kind: Any = REQUESTS.get(method) or replica_pb2.CheckpointRequest
    data = (request if request is not None else kind()).SerializeToString()
    try:
        if method == APPLY:
            call = channel.stream_stream(method)()
            await call.write(data)
            answer = await call.read()
            call.cancel()
            return bytes(answer).decode()
        if method == "/stateflow.rpc.ReplicaService/Scan":
            return b"".join([page async for page in channel.unary_stream(method)(data, timeout=10)]).decode()
        answered: bytes = await channel.unary_unary(method)(data, timeout=10)
        return answered.decode()
    except grpc.aio.AioRpcError as error:
        raise remote_error(error, "there") from error


def own_request(method: str, name: str) -> Any:
    """Makes a request in which a node or agent speaks for itself; None: the method has none."""
    rule, kind = RULES[method], REQUESTS.get(method)
    if kind is None:
        return None
    request = kind()
    if rule.own:
        *outer, last = rule.own.split(".")
        message = request
        for each in outer:
            message = getattr(message, each)
        setattr(message, last, name)
    return request


def test_a_token_has_the_rights_of_its_role_until_it_expires(world: World) -> None:
    async def run() -> None:
        given: dict[Role, grpc.ChannelCredentials] = {}
        async with world.serving() as address:
            for role in sorted(ROLES):
                identity = Identity.of(role, "alice", ("Op",) if role is Role.DATA else ())
                parts = decoded_token(world.certificates.authority.token(identity, timedelta(hours=1))[0])
                given[role] = grpc.ssl_channel_credentials(parts.ca, parts.key, parts.cert)
                async with grpc.aio.secure_channel(address, given[role], options=CHANNEL_OPTIONS) as channel:
                    for method in REQUESTS:
                        try:
                            rule = check_call(method, identity)
                            check_request(rule, method, identity, own_request(method, "alice"))
                        except NotAllowed:
                            with pytest.raises(NotAllowed):
                                await ask(channel, method, own_request(method, "alice"))
                        else:
                            assert await ask(channel, method, own_request(method, "alice")) == f"{role}/alice"
                    assert await ask(channel, POSITIONS, OF_OP) == f"{role}/alice"
            world.clock.advance(7200)  # a token expires an hour after it was made
            for role, credentials in given.items():
                async with grpc.aio.secure_channel(address, credentials, options=CHANNEL_OPTIONS) as channel:
                    with pytest.raises(NotAllowed, match=f"{role}/alice has expired"):
                        await ask(channel, POSITIONS, OF_OP)

    asyncio.run(run())


def test_every_rpc_by_every_role(world: World) -> None:
    """Each role calls what the table of roles allows. `pytest -s` prints the table."""
    allowed: dict[str, set[Role]] = {method: set() for method in REQUESTS}
    said: set[tuple[str, str]] = set()

    async def run() -> None:
        async with world.serving() as address:
            for role in Role:
                given = world.certificates.issue("someone", role, "127.0.0.1" if role.listens else "")
                async with world.channel(address, given) as channel:
                    for method in REQUESTS:
                        try:
                            answer = await ask(channel, method, own_request(method, "someone"))
                        except NotAllowed as error:
                            said.add((error.where["role"], error.where["call"]))
                        else:
                            assert answer == f"{role}/someone"
                            allowed[method].add(role)

    asyncio.run(run())
    assert allowed == {method: set(RULES[method].roles) for method in REQUESTS}
    refused = {(role.value, method.rpartition("/")[2]) for method in REQUESTS for role in set(Role) - allowed[method]}
    assert said == refused
    for method, roles in allowed.items():
        marks = " ".join(role if role in roles else "·" * len(role) for role in Role)
        print(f"{method.removeprefix('/stateflow.rpc.'):45} {marks}")


def test_nobody_else_calls_anything(world: World, tmp_path: Path) -> None:
    """A caller without a valid certificate calls nothing.

    Its certificate is missing, of another authority, expired, or not yet valid.
    """
    clock = ManualClock(SYSTEM_CLOCK.now_us() - 100 * 86_400_000_000)
    early = Authority(tmp_path / "certificates" / "authority", clock)
    early.issue(Identity.of("admin", "early"), [], tmp_path / "early", days=90)
    clock.advance(200 * 86_400)
    early.issue(Identity.of("admin", "late"), [], tmp_path / "late", days=90)
    stranger = Certificates(tmp_path / "other").issue("alice", "admin")
    files = {name: Path(value).name for name, value in stranger.items()}
    given = [
        stranger,
        *({name: str(tmp_path / who / file) for name, file in files.items()} for who in ("early", "late")),
    ]

    async def run() -> None:
        async with world.serving() as address:
            ca = Path(world.certificates.issue("here", "node")["STATEFLOW_TLS_CA"]).read_bytes()
            channels = [world.channel(address, each) for each in given]
            channels.append(grpc.aio.secure_channel(address, grpc.ssl_channel_credentials(ca)))
            channels.append(grpc.aio.insecure_channel(address))
            for channel in channels:
                async with channel:
                    for method in REQUESTS:
                        with pytest.raises(Unavailable):
                            await ask(channel, method)

    asyncio.run(run())


def test_what_is_over_is_over_at_the_next_call(world: World) -> None:
    """Revocation and expiry hold from the next call on, for existing connections and streams, too."""
    admin = world.certificates.issue("alice", "admin")
    data = world.certificates.issue("gw", "data")
    method = "/stateflow.rpc.ControllerService/Status"

    async def run() -> None:
        async with world.serving() as address:
            async with world.channel(address, admin) as channel, world.channel(address, data) as feed:
                stream = feed.stream_stream(APPLY)()
                await stream.write(b"")
                assert await stream.read() == b"data/gw"
                assert await ask(channel, method) == "admin/alice"
                world.certificates.revoke("alice")
                with pytest.raises(NotAllowed, match="the certificate of admin/alice was revoked"):
                    await ask(channel, method)
                await stream.write(b"")
                assert await stream.read() == b"data/gw", "others go on"
                world.certificates.revoke("gw")
                await stream.write(b"")
                with pytest.raises(grpc.aio.AioRpcError) as ended:
                    await stream.read()
                assert ended.value.details() == "not_allowed"
            other = world.certificates.issue("bob", "admin")
            async with world.channel(address, other) as channel:
                assert await ask(channel, method) == "admin/bob"
                world.clock.advance(91 * 86_400)
                with pytest.raises(NotAllowed, match="the certificate of admin/bob has expired"):
                    await ask(channel, method)

    asyncio.run(run())


def test_names_and_operators_are_looked_at(world: World) -> None:
    node = world.certificates.issue("edge-0", "node", "127.0.0.1")
    data = world.certificates.issue("gw", "data", operators=("Pumps",))
    beat = controller_pb2.HeartbeatRequest

    async def run() -> None:
        async with world.serving() as address:
            async with world.channel(address, node) as channel:
                heartbeat = "/stateflow.rpc.ControllerService/Heartbeat"
                assert await ask(channel, heartbeat, beat(name="edge-0~2")) == "node/edge-0"
                with pytest.raises(NotAllowed, match="may not call Heartbeat for 'cloud-0'"):
                    await ask(channel, heartbeat, beat(name="cloud-0"))
            async with world.channel(address, data) as channel:
                header = replica_pb2.ApplyHeader
                ours = replica_pb2.ApplyRequest(header=header(operator="Pumps"))
                assert await ask(channel, APPLY, ours) == "data/gw"
                with pytest.raises(NotAllowed, match="may not reach the operator 'Tally'"):
                    await ask(channel, APPLY, replica_pb2.ApplyRequest(header=header(operator="Tally")))
                with pytest.raises(NotAllowed, match="may not reach the operator 'Tally'"):
                    scan = replica_pb2.ScanRequest(operator="Tally")
                    await ask(channel, "/stateflow.rpc.ReplicaService/Scan", scan)
            with pytest.raises(ReleaseMismatch, match="does not know the call"):
                async with world.channel(address, data) as channel:
                    await ask(channel, "/stateflow.rpc.Nothing/Such")

    asyncio.run(run())


def test_in_plain_text_nobody_is_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    for which in ("CA", "CERT", "KEY", "CRL"):
        monkeypatch.delenv(f"STATEFLOW_TLS_{which}", raising=False)

    async def run() -> str:
        server = new_server()
        server.add_generic_rpc_handlers((Anything(),))
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            try:
                return await ask(channel, "/stateflow.rpc.ControllerService/Deploy")
            finally:
                await server.stop(None)

    assert asyncio.run(run()) == "None"
    assert caller() is None
