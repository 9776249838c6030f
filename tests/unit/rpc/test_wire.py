"""Options that all channels share, and how positions and views of sources cross the wire."""

from __future__ import annotations

import socket
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import grpc
import pytest
from grpc.experimental import ChannelOptions

from stateflow.errors import DecodeError, InvalidArgument, Unavailable
from stateflow.partition.change_feed import SnapshotInfo
from stateflow.partition.layout import Position, Session
from stateflow.partition.positions import SourceView
from stateflow.reports import AgentReport
from stateflow.rpc import clients, faults, wire
from stateflow.rpc import common_pb2 as pb
from stateflow.rpc import controller_pb2 as cpb
from stateflow.rpc import replica_pb2 as rpb
from stateflow.rpc.secure import CHANNEL_OPTIONS
from stateflow.rpc.wire import answered, message_of, positions_of, positions_to_pb, value_of
from stateflow.status import Deployment


@pytest.fixture(scope="module")
def core() -> bytes:
    """Reads the binary of gRPC's core, which contains every option it knows as a string."""
    spec = find_spec("grpc._cython.cygrpc")
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).read_bytes()


@pytest.mark.parametrize("option", [name for name, _ in CHANNEL_OPTIONS])
def test_every_option_is_one_that_grpc_knows(option: str, core: bytes) -> None:
    """Every option is known to gRPC, which silently ignores any other."""
    assert b"\0" + option.encode() + b"\0" in core


def test_an_option_that_does_not_exist_would_be_found(core: bytes) -> None:
    assert b"\0grpc.http2.min_recv_ping_interval_without_data_ms\0" not in core


def test_what_clients_set_besides_is_an_option_of_grpc_for_python() -> None:
    besides = [name for name, _ in clients._OPTIONS if name not in dict(CHANNEL_OPTIONS)]
    assert besides == [ChannelOptions.SingleThreadedUnaryStream]


# -- how far a source has come --------------------------------------------------------------------------------


def test_a_channel_that_nobody_uses_leaves_the_port_of_who_is_gone_alone() -> None:
    """An idle channel does not try the port of a process that is gone: another program may listen there by then."""
    assert "grpc.client_idle_timeout_ms" in dict(CHANNEL_OPTIONS)
    with socket.create_server(("127.0.0.1", 0)) as gone:
        port = gone.getsockname()[1]
    options = [*(dict(CHANNEL_OPTIONS) | {"grpc.client_idle_timeout_ms": 1_000}).items()]
    with grpc.insecure_channel(f"127.0.0.1:{port}", options=options) as channel:
        with pytest.raises(grpc.RpcError):
            channel.unary_unary("/any/Method")(b"", timeout=0.5)
        with socket.create_server(("127.0.0.1", port)) as another:
            another.settimeout(1.5)  # longer than the longest back-off
            with pytest.raises(TimeoutError):
                for _ in range(20):  # until the channel is idle
                    another.accept()[0].close()


def test_positions_cross_by_partition() -> None:
    found = {
        0: Position(4),
        3: Position(-1, event_us=0, event_before_us=-7, known=b"k", client="me"),
        5: Position(0, event_us=9),
    }
    assert positions_of(positions_to_pb(found)) == found
    assert positions_of(positions_to_pb({})) == {}


@pytest.mark.parametrize("newest_us", [None, 0, 70])
def test_one_position_is_that_of_all_that_were_asked(newest_us: int | None) -> None:
    said = positions_to_pb(Position(5, event_us=newest_us))
    assert positions_of(said, [0, 1], 6) == dict.fromkeys((0, 1), Position(5, event_us=newest_us))


@pytest.mark.parametrize(
    "view",
    [
        SourceView("s", 4, 77, 12, -3, False, Session(9, "")),
        SourceView("s", -1, 0, 0, None, True, None),
        SourceView("s", 0, 1, 1, 0),
    ],
)
def test_a_view_of_a_source_crosses(view: SourceView) -> None:
    assert value_of(SourceView, message_of(rpb.SourceView, view, partition=3)) == view


def test_who_a_client_is_stays_with_the_partition() -> None:
    view = SourceView("s", 4, 77, 12, session=Session(9, "a-secret"))
    assert value_of(SourceView, message_of(rpb.SourceView, view, partition=3)).session == Session(9, "")


@dataclass(frozen=True)
class Extended(Session):
    """A value with a field that its message lacks."""

    mood: str = ""


def test_a_field_that_the_message_lacks_is_refused_and_not_dropped() -> None:
    with pytest.raises(
        TypeError, match=r"Extended\.mood would be lost: stateflow\.rpc\.SourceSession has no field 'mood'"
    ):
        message_of(rpb.SourceSession, Extended(1, "a", mood="good"))


def test_a_field_that_is_listed_as_not_sent_may_be_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(wire._APART, (Extended, rpb.SourceSession), "mood")
    wire._sending.cache_clear()
    assert message_of(rpb.SourceSession, Extended(1, "a", mood="good")).id == "a"
    wire._sending.cache_clear()


@pytest.mark.parametrize(("kind", "message"), wire._SHAPES, ids=lambda each: each.__name__)
def test_the_conversion_of_every_registered_type_can_be_built(kind: type, message: type) -> None:
    wire._reading(kind, message)
    if kind is not AgentReport:  # only read: controllers send another value
        wire._sending(kind, message)


# -- answers that no member of the cluster gives -------------------------------------------------------------


def test_an_answer_that_cannot_be_parsed_is_none() -> None:
    """gRPC's asynchronous calls return None for it, which used to end in an AttributeError."""
    with pytest.raises(Unavailable, match="invalid answer from there:1: it cannot be parsed: check what runs there"):
        answered(None, "there:1")


@pytest.mark.parametrize(
    ("code", "where", "said"),
    [
        ("moved", {}, "invalid error: moved with owner=None"),
        ("moved", {"owner": "../x", "address": "a:1", "epoch": "1"}, "moved with owner='../x'"),
        ("moved", {"owner": "b", "address": "unix:/run/x", "epoch": "1"}, "moved with address='unix:/run/x'"),
        ("moved", {"owner": "b", "address": "a:1", "epoch": "x"}, "moved with epoch='x'"),
        ("moved", {"owner": "b", "address": "a:1", "epoch": "9" * 5000}, "moved with epoch='999"),
        ("source_taken", {}, "source_taken with generation_us=None"),
        ("source_taken", {"generation_us": str(1 << 62)}, "source_taken with generation_us='4611686018427387904'"),
        ("not_leading", {"leader": "a\nb"}, "not_leading with leader="),
    ],
    ids=str,
)
def test_an_error_without_the_facts_that_its_reader_needs_is_none(code: str, where: dict[str, str], said: str) -> None:
    error = faults.error_of(pb.Fault(code=code, what="w", where=where))
    assert type(error) is Unavailable
    assert said in str(error)


@pytest.mark.parametrize(
    ("code", "where"),
    [
        ("moved", {"owner": "b", "address": "b:1", "epoch": "7"}),
        ("source_taken", {"generation_us": "1700000000000000"}),
        ("not_leading", {}),
        ("not_leading", {"leader": "[::1]:7070"}),
        ("not_owner", {"owner": "../x"}),
    ],
    ids=str,
)
def test_an_error_with_its_facts_is_what_it_says(code: str, where: dict[str, str]) -> None:
    error = faults.error_of(pb.Fault(code=code, what="w", where=where))
    assert (error.code, error.where) == (code, where)


@pytest.mark.parametrize(
    ("owners", "epochs", "replicas"),
    [([], [], 1), ([0, 0], [1], 1), ([0], [1, 1], 1), ([0, 1], [1, 1], 1), ([0, 0], [1, 1], 0)],
)
def test_a_deployment_names_an_owner_of_each_partition(owners: list[int], epochs: list[int], replicas: int) -> None:
    spec = pb.OperatorSpec(name="Op", partitions=2)
    known = [pb.Replica(name="a", address="a:1")] * replicas
    message = cpb.Deployment(spec=spec, replicas=known, owners=owners, epochs=epochs)
    with pytest.raises(
        InvalidArgument, match=r"does not name an owner and an epoch for each partition \(operator=Op\)"
    ):
        value_of(Deployment, message)
    with pytest.raises(DecodeError, match="a stored deployment cannot be read"):
        clients.unpacked_deployment(message.SerializeToString())


def test_a_base_that_no_disk_holds_is_refused() -> None:
    """The sum of its sizes used to be too large for the progress that a target reports."""
    files = [rpb.BaseFile(name=f"{number}.sst", size=1 << 48, digest="0" * 32) for number in range(1 << 15)]
    reply = rpb.SnapshotReply(snapshot_id="s", files=files)
    with pytest.raises(InvalidArgument, match="a base has too many bytes"):
        value_of(SnapshotInfo, reply)
