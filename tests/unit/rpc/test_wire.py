"""What every channel shares."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest
from grpc.experimental import ChannelOptions

from stateflow.rpc import clients
from stateflow.rpc.wire import OPTIONS


@pytest.fixture(scope="module")
def core() -> bytes:
    """The program of gRPC's core: every option it knows is a string in it."""
    spec = find_spec("grpc._cython.cygrpc")
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).read_bytes()


@pytest.mark.parametrize("option", [name for name, _ in OPTIONS])
def test_every_option_is_one_that_grpc_knows(option: str, core: bytes) -> None:
    """One that it does not know has no effect, and nobody says so."""
    assert b"\0" + option.encode() + b"\0" in core


def test_an_option_that_does_not_exist_would_be_found(core: bytes) -> None:
    assert b"\0grpc.http2.min_recv_ping_interval_without_data_ms\0" not in core


def test_what_clients_set_besides_is_an_option_of_grpc_for_python() -> None:
    besides = [name for name, _ in clients._OPTIONS if name not in dict(OPTIONS)]
    assert besides == [ChannelOptions.SingleThreadedUnaryStream]
