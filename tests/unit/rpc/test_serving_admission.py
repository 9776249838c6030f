"""Every RPC of every service, called by every kind of caller: the table of roles decides who is let in.

The servicers are those of the product. Behind them is nothing: a controller that does not lead, and a replica that has
not registered. So a caller that is let in is answered, or gets an error other than NotAllowed.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine, Iterator, Mapping
from datetime import timedelta
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn, Self, TypeVar

import grpc
import grpc.aio
import pytest
from google.protobuf.descriptor import MethodDescriptor
from google.protobuf.message_factory import GetMessageClass

from reconfig.controller.context import author
from reconfig.controller.service import ControllerService
from stateflow.clock import SYSTEM_CLOCK, ManualClock
from stateflow.errors import NotAllowed, NotLeading, ReleaseMismatch, StateflowError, Unavailable
from stateflow.local.cluster import Certificates
from stateflow.partition.registry import Lease
from stateflow.partition.replica import ReplicaNode
from stateflow.replica.service import ReplicaService
from stateflow.rpc import agent_pb2, controller_pb2, replica_pb2, replica_pb2_grpc, serving
from stateflow.rpc.faults import remote_error
from stateflow.rpc.secure import CHANNEL_OPTIONS
from stateflow.rpc.serving import Admission, add_agent_service, add_health, bind, caller, new_server
from stateflow.rpc.wire import USER_KEY
from stateflow.security import certificates as files_module
from stateflow.security.authority import Authority
from stateflow.security.certificates import ROLES, decoded_token
from stateflow.security.refusals import Refusals
from stateflow.security.roles import RULES, Identity, Role, check_call, check_request
from stateflow.types import ReplicaInfo

T = TypeVar("T")
CONTROLLER, REPLICA = "/stateflow.rpc.ControllerService/", "/stateflow.rpc.ReplicaService/"
APPLY, POSITIONS, STATUS = REPLICA + "Apply", REPLICA + "Positions", CONTROLLER + "Status"
HEALTH = "/grpc.health.v1.Health/Check"
OF_OP = replica_pb2.PositionsRequest(operator="Op", source="s")
METHODS: dict[str, MethodDescriptor] = {
    f"/{service.full_name}/{method.name}": method
    for module in (agent_pb2, controller_pb2, replica_pb2)
    for service in module.DESCRIPTOR.services_by_name.values()
    for method in service.methods
}
#: every method of a process that speaks gRPC
ALL = [*METHODS, HEALTH]


class Later:
    """The system's clock, ``ahead_s`` seconds ahead."""

    ahead_s = 0.0

    def now_us(self) -> int:
        return SYSTEM_CLOCK.now_us() + round(self.ahead_s * 1e6)

    def monotonic(self) -> float:
        return SYSTEM_CLOCK.monotonic() + self.ahead_s


def nobody_leads() -> NoReturn:
    """Refuses a request, with its caller and with the author of what the controller would record."""
    raise NotLeading("nobody leads here", remedy="ask nobody", caller=caller(), author=author())


async def no_lines(*_: object) -> AsyncIterator[bytes]:
    yield b""


class Calling:
    """The two channels of one caller.

    Streams of requests are sent by the blocking one, as the client does: an asynchronous one whose server ends the call
    while it sends loses the server's reason (grpc issue 36066).
    """

    def __init__(self, address: str, credentials: grpc.ChannelCredentials | None) -> None:
        if credentials is None:
            self.channel, self.blocking = grpc.aio.insecure_channel(address), grpc.insecure_channel(address)
        else:
            self.channel = grpc.aio.secure_channel(address, credentials, options=CHANNEL_OPTIONS)
            self.blocking = grpc.secure_channel(address, credentials, options=CHANNEL_OPTIONS)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.channel.close()
        self.blocking.close()

    def first(self, method: str, data: bytes, metadata: Any) -> None:
        """Sends one message on a stream, and waits for the first answer."""
        call = self.blocking.stream_stream(method)(iter([data]), timeout=10, metadata=metadata)
        next(call, None)
        call.cancel()


class World:
    """A server with all services, and certificates for its callers. Everything runs in one event loop."""

    def __init__(self, directory: Path) -> None:
        self.directory, self.clock, self.refusals = directory, Later(), Refusals()
        self.certificates = Certificates(directory / "certificates")
        self.own = self.certificates.issue("here", "node", "127.0.0.1")
        self.loop = asyncio.new_event_loop()
        self.address = ""

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        return self.loop.run_until_complete(asyncio.wait_for(work, 60))

    async def begin(self) -> None:
        self.server = new_server()
        self.replica = ReplicaService(
            ReplicaNode(ReplicaInfo("here", "site", "here:1"), self.directory / "data", lease=Lease.none()), None
        )
        leading: Any = SimpleNamespace(leads=False, heard_of=lambda *_: None, term=nobody_leads)
        ControllerService(leading).add_to(self.server)
        replica_pb2_grpc.add_ReplicaServiceServicer_to_server(self.replica, self.server)
        add_agent_service(self.server, no_lines)
        add_health(self.server)
        self.address = bind(self.server, "127.0.0.1:0")
        await self.server.start()

    async def end(self) -> None:
        await self.server.stop(None)
        await self.replica.close()

    def calling(self, environment: Mapping[str, str]) -> Calling:
        ca = Path(self.own["STATEFLOW_TLS_CA"]).read_bytes()
        key, cert = (Path(environment[f"STATEFLOW_TLS_{which}"]).read_bytes() for which in ("KEY", "CERT"))
        return self.calling_with(grpc.ssl_channel_credentials(ca, key, cert))

    def calling_with(self, credentials: grpc.ChannelCredentials | None) -> Calling:
        return Calling(self.address, credentials)

    def issue(self, name: str, role: Role) -> Mapping[str, str]:
        return self.certificates.issue(name, role, "127.0.0.1" if role.listens else "")


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    with pytest.MonkeyPatch.context() as patch:
        made = World(tmp_path_factory.mktemp("admission"))
        for variable, file in made.own.items():
            patch.setenv(variable, file)
        patch.setattr(files_module, "LOOK_S", 0.0)
        patch.setattr(serving, "Admission", partial(Admission, clock=made.clock, refusals=made.refusals))
        made.run(made.begin())
        try:
            yield made
        finally:
            made.run(made.end())
            made.loop.close()


async def ask(calling: Calling, method: str, request: Any = None, metadata: Any = None) -> StateflowError | None:
    """Calls a method, in the shape that its description gives.

    Returns the error of the handler; None: the handler has answered. Raises the error of a call that reached no
    handler: NotAllowed, Unavailable, ReleaseMismatch.
    """
    data = b"" if request is None else request.SerializeToString()
    shape = METHODS.get(method)
    try:
        if shape is not None and shape.client_streaming:
            await asyncio.to_thread(calling.first, method, data, metadata)
        elif shape is not None and shape.server_streaming:
            call = calling.channel.unary_stream(method)(data, timeout=10, metadata=metadata)
            await call.read()
            call.cancel()
        else:
            await calling.channel.unary_unary(method)(data, timeout=10, metadata=metadata)
    except grpc.RpcError as error:
        found = remote_error(error, "there")
        if isinstance(found, NotAllowed) or error.code() is not grpc.StatusCode.FAILED_PRECONDITION:
            raise found from None
        return found
    return None


async def who_and_author(
    calling: Calling, method: str, request: Any = None, user: Identity | None = None
) -> tuple[str, str]:
    """Returns the caller that a controller sees, and the author that it would record.

    Args:
        user: the user for whom the caller calls; None: it calls for itself.
    """
    answered = await ask(calling, method, request, None if user is None else ((USER_KEY, user.uri),))
    assert isinstance(answered, NotLeading), answered
    return answered.where.get("caller", ""), answered.where["author"]


def own_request(method: str, name: str) -> Any:
    """Makes a request in which a node or agent speaks for itself; None: the method has no description."""
    if method not in METHODS:
        return None
    rule, request = RULES[method], GetMessageClass(METHODS[method].input_type)()
    if rule.own:
        *outer, last = rule.own.split(".")
        message = request
        for each in outer:
            message = getattr(message, each)
        setattr(message, last, name)
    return request


async def let_in(calling: Calling, name: str) -> tuple[set[str], dict[str, NotAllowed]]:
    """Calls every method. Returns the methods that let the caller in, and the refusals of the others."""
    entered, refused = set(), {}
    for method in ALL:
        try:
            await ask(calling, method, own_request(method, name))
        except NotAllowed as error:
            refused[method] = error
        else:
            entered.add(method)
    return entered, refused


def admits(method: str, who: Identity, request: Any) -> bool:
    try:
        check_request(check_call(method, who), method, who, request)
    except NotAllowed:
        return False
    return True


@pytest.mark.parametrize("role", sorted(ROLES))
def test_a_token_has_the_rights_of_its_role_until_it_expires(
    role: Role, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    who = Identity.of(role, "alice", ("Op",) if role.limited else ())
    parts = decoded_token(world.certificates.authority.token(who, timedelta(hours=1))[0])
    credentials = grpc.ssl_channel_credentials(parts.ca, parts.key, parts.cert)

    async def run() -> None:
        async with world.calling_with(credentials) as calling:
            entered, _ = await let_in(calling, "alice")
            assert entered == {method for method in ALL if admits(method, who, own_request(method, "alice"))}
            await ask(calling, POSITIONS, OF_OP)
        monkeypatch.setattr(world.clock, "ahead_s", 7200.0)  # a token expires an hour after it was made
        async with world.calling_with(credentials) as calling:
            with pytest.raises(NotAllowed, match=f"{role}/alice has expired"):
                await ask(calling, POSITIONS, OF_OP)

    world.run(run())


@pytest.mark.parametrize("role", Role)
def test_every_rpc_by_every_role(role: Role, world: World) -> None:
    """Each role calls what the table of roles allows. What it must not allow is in `unit/security/test_roles.py`."""

    async def run() -> tuple[set[str], dict[str, NotAllowed]]:
        async with world.calling(world.issue("someone", role)) as calling:
            return await let_in(calling, "someone")

    entered, refused = world.run(run())
    assert entered == {method for method in ALL if role in RULES[method].roles}
    said = {method: (error.where["role"], error.where["call"]) for method, error in refused.items()}
    assert said == {method: (role, method.rpartition("/")[2]) for method in ALL if method not in entered}
    assert entered, "each role may call something"


@pytest.mark.parametrize("role", Role)
def test_who_was_revoked_calls_nothing(role: Role, world: World) -> None:
    """Each method that the role may call refuses its revoked certificate, before a stream begins, too."""
    who = f"{role}/gone"
    methods = [method for method in ALL if role in RULES[method].roles]

    async def run() -> None:
        async with world.calling(world.issue("gone", role)) as calling:
            await ask(calling, HEALTH)
            world.certificates.revoke(who)
            for method in methods:
                with pytest.raises(NotAllowed, match=f"the certificate of {who} was revoked"):
                    await ask(calling, method, own_request(method, "gone"))
            call = calling.channel.stream_stream(APPLY)()  # nothing is sent
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await asyncio.wait_for(call.read(), 10)
            assert refused.value.details() == "not_allowed"

    before = world.refusals.counts()
    world.run(run())
    after = world.refusals.counts()
    calls = [method.rpartition("/")[2] for method in (*methods, APPLY)]
    for call in calls:
        assert after[call, role] - before.get((call, role), 0) == calls.count(call)


def test_nobody_else_calls_anything(world: World, tmp_path: Path) -> None:
    """A caller without a valid certificate calls nothing.

    Its certificate is missing, of another authority, expired, or not yet valid.
    """
    clock = ManualClock(SYSTEM_CLOCK.now_us() - 100 * 86_400_000_000)
    early = Authority(world.directory / "certificates" / "authority", clock)
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
        ca = Path(world.own["STATEFLOW_TLS_CA"]).read_bytes()
        every = [world.calling(each) for each in given]
        every.append(world.calling_with(grpc.ssl_channel_credentials(ca)))
        every.append(world.calling_with(None))
        for calling in every:
            async with calling:
                for method in ALL:
                    with pytest.raises(Unavailable):
                        await ask(calling, method)

    world.run(run())


def apply(call: int, operator: str = "Op") -> bytes:
    header = replica_pb2.ApplyHeader(operator=operator, source="s", batch=call)
    return replica_pb2.ApplyRequest(call=call, header=header, last=True).SerializeToString()


def test_what_is_over_is_over_at_the_next_call(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Revocation and expiry hold from the next call on, for existing connections and streams, too."""
    admin, data = world.issue("alice", Role.ADMIN), world.issue("gw", Role.DATA)

    async def run() -> None:
        async with world.calling(admin) as calling, world.calling(data) as feed:
            stream = feed.channel.stream_stream(APPLY)()
            await stream.write(apply(1))
            assert await stream.read()
            assert await who_and_author(calling, STATUS) == ("admin/alice", "admin/alice")
            world.certificates.revoke("admin/alice")
            with pytest.raises(NotAllowed, match="the certificate of admin/alice was revoked"):
                await ask(calling, STATUS)
            await stream.write(apply(2))
            assert await stream.read(), "others go on"
            before = world.refusals.counts().get(("Apply", "data"), 0)
            world.certificates.revoke("data/gw")
            await stream.write(apply(3))
            with pytest.raises(grpc.aio.AioRpcError) as ended:
                await stream.read()
            assert ended.value.details() == "not_allowed"
            assert world.refusals.counts()["Apply", "data"] == before + 1, "a message of a stream leaves a trace, too"
        async with world.calling(world.issue("bob", Role.ADMIN)) as calling:
            assert await who_and_author(calling, STATUS) == ("admin/bob", "admin/bob")
            monkeypatch.setattr(world.clock, "ahead_s", 91 * 86_400.0)
            with pytest.raises(NotAllowed, match="the certificate of admin/bob has expired"):
                await ask(calling, STATUS)

    world.run(run())


def test_names_and_operators_are_looked_at(world: World) -> None:
    node = world.issue("edge-0", Role.NODE)
    data = world.certificates.issue("pumps", "data", operators=("Pumps",))
    beat = controller_pb2.HeartbeatRequest

    async def run() -> None:
        async with world.calling(node) as calling:
            heartbeat = CONTROLLER + "Heartbeat"
            await ask(calling, heartbeat, beat(name="edge-0~2"))
            with pytest.raises(NotAllowed, match="may not call Heartbeat for 'cloud-0'"):
                await ask(calling, heartbeat, beat(name="cloud-0"))
        async with world.calling(data) as calling:
            for operator, admitted in (("Pumps", True), ("Tally", False)):
                stream = calling.channel.stream_stream(APPLY)()
                await stream.write(apply(1, operator))
                if admitted:
                    assert await stream.read()
                    stream.cancel()
                    await ask(calling, REPLICA + "Scan", replica_pb2.ScanRequest(operator=operator))
                    continue
                with pytest.raises(grpc.aio.AioRpcError) as refused:
                    await stream.read()
                assert "may not reach the operator 'Tally'" in str(remote_error(refused.value, "there"))
                with pytest.raises(NotAllowed, match="may not reach the operator 'Tally'"):
                    await ask(calling, REPLICA + "Scan", replica_pb2.ScanRequest(operator=operator))
            with pytest.raises(ReleaseMismatch, match="does not know the call"):
                await ask(calling, "/stateflow.rpc.Nothing/Such")

    world.run(run())


def test_who_tries_everything_leaves_a_trace(world: World, caplog: pytest.LogCaptureFixture) -> None:
    async def run() -> dict[str, NotAllowed]:
        async with world.calling(world.issue("mallory", Role.READ)) as calling:
            return (await let_in(calling, "mallory"))[1]

    before = world.refusals.counts()
    refused = world.run(run())
    counts = world.refusals.counts()
    more = {key: count - before.get(key, 0) for key, count in counts.items() if count != before.get(key, 0)}
    calls = [method.rpartition("/")[2] for method in refused]
    assert more == {(call, "read"): calls.count(call) for call in calls}
    said = [record.message for record in caplog.records if "read/mallory" in record.message]
    assert len(said) == 1
    assert said[0].startswith(
        "refused a call of read/mallory at ipv4:127.0.0.1: not_allowed: read/mallory may not call "
    )


def test_a_node_is_the_author_of_what_it_asks_for_and_of_no_report(world: World) -> None:
    replica: Any = {"name": "edge-1", "site": "edge", "address": "edge-1:1"}
    asked: dict[str, Any] = {
        "Migrate": controller_pb2.MigrateRequest(operator="Op", partitions=[1], to="edge-1"),
        "Drain": controller_pb2.DrainRequest(replica="edge-1~2"),
        "Forget": controller_pb2.ForgetRequest(replica="edge-1"),
    }
    reported: dict[str, Any] = {
        "Heartbeat": controller_pb2.HeartbeatRequest(name="edge-1"),
        "Register": controller_pb2.RegisterRequest(replica=replica),
    }

    async def run() -> None:
        async with world.calling(world.issue("edge-1", Role.NODE)) as calling:
            for call, request in asked.items():
                assert await who_and_author(calling, CONTROLLER + call, request) == ("node/edge-1", "node/edge-1")
            for call, request in reported.items():
                assert await who_and_author(calling, CONTROLLER + call, request) == ("node/edge-1", "")

    world.run(run())


def test_a_user_and_the_process_that_calls_for_them_are_the_author(world: World) -> None:
    drain, forget = controller_pb2.DrainRequest(replica="edge-1"), controller_pb2.ForgetRequest(replica="edge-1")
    alice, root = Identity(Role.OPERATE, "alice"), Identity(Role.ADMIN, "root")

    async def run() -> None:
        async with world.calling(world.issue("page", Role.ADMIN)) as calling:
            said = await who_and_author(calling, CONTROLLER + "Drain", drain, alice)
            assert said == ("admin/page", "operate/alice via admin/page")
            said = await who_and_author(calling, CONTROLLER + "Forget", forget, root)
            assert said == ("admin/page", "admin/root via admin/page")
            with pytest.raises(NotAllowed, match="operate/alice may not call Forget") as refused:
                await who_and_author(calling, CONTROLLER + "Forget", forget, alice)
            assert (refused.value.where["who"], refused.value.where["user"]) == ("admin/page", "operate/alice")
            with pytest.raises(NotAllowed, match="admin/page may not call for node/edge-1"):
                await who_and_author(calling, CONTROLLER + "Drain", drain, Identity(Role.NODE, "edge-1"))
            with pytest.raises(NotAllowed, match="the user of the call has no identity"):
                await ask(calling, CONTROLLER + "Drain", drain, ((USER_KEY, "alice"),))
            with pytest.raises(NotAllowed, match="data/pumps may not reach the operator 'Op'"):
                await ask(calling, POSITIONS, OF_OP, ((USER_KEY, Identity(Role.DATA, "pumps", ("Pumps",)).uri),))
        async with world.calling(world.issue("bob", Role.OPERATE)) as calling:
            with pytest.raises(NotAllowed, match="operate/bob may not call for operate/alice"):
                await who_and_author(calling, CONTROLLER + "Drain", drain, alice)

    world.run(run())


def test_in_plain_text_nobody_is_told_apart(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    for which in ("CA", "CERT", "KEY", "CRL"):
        monkeypatch.delenv(f"STATEFLOW_TLS_{which}", raising=False)

    async def run() -> tuple[str, str]:
        server = new_server()
        leading: Any = SimpleNamespace(leads=False, heard_of=lambda *_: None, term=nobody_leads)
        ControllerService(leading).add_to(server)
        address = bind(server, "127.0.0.1:0")
        await server.start()
        async with Calling(address, None) as calling:
            try:
                return await who_and_author(
                    calling, CONTROLLER + "Undeploy", controller_pb2.UndeployRequest(operator="Op")
                )
            finally:
                await server.stop(None)

    assert world.run(run()) == ("", "")
    assert caller() is None
