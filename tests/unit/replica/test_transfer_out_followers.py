"""Nodes that ask a replica with TLS for its partitions: who may copy them, and whose confirmations count."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest

from stateflow.clock import SYSTEM_CLOCK
from stateflow.errors import InvalidArgument, NotAllowed, Unavailable
from stateflow.local.cluster import Certificates
from stateflow.partition.change_feed import SnapshotInfo
from stateflow.partition.control import NamedFollower
from stateflow.replica import transfer_out
from stateflow.replica.peers import SourceReplica
from stateflow.replica.service import ReplicaService
from stateflow.replica.transfer_out import Followers
from stateflow.rpc import replica_pb2_grpc
from stateflow.rpc.secure import CHANNEL_OPTIONS, OPTIONS, server_credentials
from stateflow.rpc.serving import Admission
from stateflow.security.certificates import TlsFiles
from stateflow.settings import ConnectionSettings
from tests.unit.partition.test_replica import P, Two

LONG_S = 3600.0
#: standby s1 and move m1 of node b
TOLD = (NamedFollower(P, "s1", "b", standby=True), NamedFollower(P, "m1", "b"))


@pytest.fixture
def two(tmp_path: Path) -> Iterator[Two]:
    made = Two(tmp_path)
    yield made
    made.nodes["b"].close()  # the service closes the other one


class Source:
    """Replica ``a``, and connections to it with the certificates of nodes."""

    def __init__(self, two: Two, certificates: Certificates) -> None:
        self.two, self.certificates = two, certificates
        self.service = ReplicaService(two.a, None)
        self._stack = contextlib.AsyncExitStack()

    async def __aenter__(self) -> Source:
        own = self.certificates.issue("a", "node", "127.0.0.1")
        own_files = {name.removeprefix("STATEFLOW_").lower(): value for name, value in own.items()}
        files = TlsFiles(ConnectionSettings(**own_files))  # type: ignore[arg-type]
        server = grpc.aio.server(interceptors=[Admission(files)], options=OPTIONS)
        replica_pb2_grpc.add_ReplicaServiceServicer_to_server(self.service, server)
        self.address = f"127.0.0.1:{server.add_secure_port('127.0.0.1:0', server_credentials(files))}"
        await server.start()
        self._stack.push_async_callback(self.service.close)
        self._stack.push_async_callback(server.stop, None)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()

    async def caller(self, node: str) -> SourceReplica:
        """Returns a client that has the certificate of a node."""
        given = self.certificates.issue(node, "node", "127.0.0.1")
        ca, key, cert = (Path(given[f"STATEFLOW_TLS_{which}"]).read_bytes() for which in ("CA", "KEY", "CERT"))
        credentials = grpc.ssl_channel_credentials(ca, key, cert)
        channel = grpc.aio.secure_channel(self.address, credentials, options=CHANNEL_OPTIONS)
        return SourceReplica(await self._stack.enter_async_context(channel), self.address, 30.0)


async def leads(followers: Followers, answer: Callable[[NamedFollower], list[NamedFollower]]) -> None:
    """Answers the replica's questions, as its heartbeats to the leading controller do."""
    while True:
        asked = followers.questions()
        told = {(each.partition, each.move_id): each for each in TOLD}
        named = [told.get(copy, NamedFollower(*copy)) for copy in asked]
        followers.answered(asked, [said for each in named for said in answer(each)])
        await followers.pause(LONG_S)  # only a question ends it


def with_source(
    two: Two,
    tmp_path: Path,
    use: Callable[[Source], Coroutine[Any, Any, None]],
    answer: Callable[[NamedFollower], list[NamedFollower]] | None = lambda named: [named],
) -> None:
    """Runs ``use`` with a controller that gives each answer as ``answer`` turns it; None: no controller answers."""

    async def run() -> None:
        async with Source(two, Certificates(tmp_path / "certificates")) as source:
            controller = asyncio.create_task(leads(source.service._followers, answer)) if answer else None
            try:
                await asyncio.wait_for(use(source), 60)
            finally:
                if controller is not None:
                    controller.cancel()

    asyncio.run(run())


async def first(many: AsyncGenerator[Any]) -> Any:
    async with contextlib.aclosing(many):
        async for each in many:
            return each
    raise AssertionError("nothing came")


def largest(base: SnapshotInfo) -> str:
    return max(base.files, key=lambda file: file.size).name


async def refused_all(caller: SourceReplica, base: SnapshotInfo, why: str) -> None:
    """Checks that a caller may do nothing with another node's copy."""
    with pytest.raises(NotAllowed, match=f"may not call Confirm .*: {why}"):
        await caller.confirm(base.snapshot_id, base.sequence)
    with pytest.raises(NotAllowed, match=f"may not call Follow .*: {why}"):
        await first(caller.follow(base.snapshot_id, base.sequence, 1 << 20))
    with pytest.raises(NotAllowed, match=f"may not call Fetch .*: {why}"):
        await first(caller.fetch(base.snapshot_id, largest(base), 0))


def test_a_standby_that_the_controller_named_is_believed(two: Two, tmp_path: Path) -> None:
    async def use(source: Source) -> None:
        b = await source.caller("b")
        base = await b.snapshot(P, "s1", standby=True)
        assert await first(b.fetch(base.snapshot_id, largest(base), 0))
        two.send(two.a, 1)
        with pytest.raises(InvalidArgument, match="was sent only those up to 0"):
            await b.confirm(base.snapshot_id, 1)
        with pytest.raises(InvalidArgument, match="was sent only those up to 0"):
            await first(b.follow(base.snapshot_id, 1, 1 << 20))
        assert not two.a.sender.confirmed(P, 1)
        assert len((await first(b.follow(base.snapshot_id, 0, 1 << 20))).change_sets) == 1
        await b.confirm(base.snapshot_id, 1)
        assert two.a.sender.confirmed(P, 1)

    with_source(two, tmp_path, use)


def test_a_stranger_copies_nothing_and_confirms_nothing(two: Two, tmp_path: Path) -> None:
    async def use(source: Source) -> None:
        b, mallory = await source.caller("b"), await source.caller("mallory")
        base = await b.snapshot(P, "s1", standby=True)
        for standby in (True, False):
            with pytest.raises(NotAllowed, match="node/mallory may not call Snapshot for this copy: it is for b"):
                await mallory.snapshot(P, "s1", standby=standby)
            with pytest.raises(NotAllowed, match="this copy: the controller has no such move"):
                await mallory.snapshot(P, "made-up", standby=standby)
        with pytest.raises(NotAllowed, match="the controller has no such move"):
            await b.snapshot(P, "made-up", standby=True)
        await refused_all(mallory, base, "it is for b")
        assert list(two.a._registry.local(P).logs) == ["s1"], "nothing is kept for strangers"
        await b.confirm(base.snapshot_id, base.sequence)

    with_source(two, tmp_path, use)


def test_the_target_of_a_move_is_no_standby(two: Two, tmp_path: Path) -> None:
    async def use(source: Source) -> None:
        b = await source.caller("b")
        with pytest.raises(NotAllowed, match="node/b may not call Snapshot as a standby: the controller named b as"):
            await b.snapshot(P, "m1", standby=True)
        base = await b.snapshot(P, "m1")
        await b.confirm(base.snapshot_id, base.sequence)
        assert not two.a.sender.confirmed(P, base.sequence)

    with_source(two, tmp_path, use)


def test_many_questions_have_one_answer_each(two: Two, tmp_path: Path) -> None:
    async def use(source: Source) -> None:
        b, mallory = await source.caller("b"), await source.caller("mallory")
        asked = [b.snapshot(P, "m1"), b.snapshot(P, "s1", standby=True), mallory.snapshot(P, "m1")]
        *bases, refused = await asyncio.gather(*asked, return_exceptions=True)
        assert {"m1", "s1"} == {base.snapshot_id.split("-")[2] for base in bases if isinstance(base, SnapshotInfo)}
        assert isinstance(refused, NotAllowed)

    with_source(two, tmp_path, use)


def test_with_a_controller_of_the_previous_release_a_copy_belongs_to_its_caller(two: Two, tmp_path: Path) -> None:
    async def use(source: Source) -> None:
        b, mallory = await source.caller("b"), await source.caller("mallory")
        base = await b.snapshot(P, "s1", standby=True)
        await refused_all(mallory, base, "it is for b")
        await b.confirm(base.snapshot_id, base.sequence)

    with_source(two, tmp_path, use, lambda _: [])


def test_a_sealed_partition_waits_for_no_controller(two: Two, tmp_path: Path) -> None:
    async def use(source: Source) -> None:
        assert two.a.sender.fence(P, "m1", 2, two.b.info, cold=True)
        b, mallory = await source.caller("b"), await source.caller("mallory")
        with pytest.raises(NotAllowed, match="it is for b"):
            await mallory.snapshot(P, "m1")
        assert await b.snapshot(P, "m1")

    with_source(two, tmp_path, use, None)


def test_while_no_controller_answers_it_is_said_and_may_be_tried_again(
    two: Two, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transfer_out, "ASK_TIMEOUT_S", 0.01)

    async def use(source: Source) -> None:
        b = await source.caller("b")
        with pytest.raises(Unavailable, match="no controller has said") as caught:
            await b.snapshot(P, "s1", standby=True)
        assert caught.value.retryable
        assert source.service._followers.questions() == [], "no question is kept without its caller"

    with_source(two, tmp_path, use, None)


def test_questions_are_bounded_and_asked_in_their_order(two: Two, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfer_out, "ASKED_MAX", 2)

    async def run() -> None:
        followers = Followers(two.a, SYSTEM_CLOCK)
        asking = [asyncio.create_task(followers._named(P, move)) for move in ("x", "y", "x", "z")]
        await asyncio.sleep(0)
        assert followers.questions() == [(P, "x"), (P, "y")]
        followers.answered([(P, "x"), (P, "y")], [NamedFollower(P, "y", "b")])
        assert [await asking[n] for n in (0, 1, 2)] == [None, NamedFollower(P, "y", "b"), None]
        assert followers.questions() == [(P, "z")]
        assert not asking[3].done(), "nothing was said of it"
        followers.answered([(P, "z")], [])
        assert await asking[3] is None

    asyncio.run(run())
    two.a.close()
