"""Options that all channels share."""

from __future__ import annotations

import socket
from importlib.util import find_spec
from pathlib import Path

import grpc
import pytest
from grpc.experimental import ChannelOptions

from stateflow.rpc import clients
from stateflow.rpc.wire import CHANNEL_OPTIONS


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
