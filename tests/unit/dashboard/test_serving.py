"""Addresses where the page may be served."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from stateflow.dashboard import Dashboard, DashboardOptions
from stateflow.dashboard.connections import Listener
from stateflow.errors import InsecureRefused, InvalidArgument, PortInUse


def test_plain_text_stays_on_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InsecureRefused, match=r"plain text on 0\.0\.0\.0"):
        Dashboard(DashboardOptions("127.0.0.1:1", "0.0.0.0:0"))
    monkeypatch.setenv("STATEFLOW_INSECURE", "1")
    page = Dashboard(DashboardOptions("127.0.0.1:1", "0.0.0.0:0"))
    page.close()


@pytest.mark.parametrize("listen", ["7071", "127.0.0.1:x", ":7071", "127.0.0.1:70000"])
def test_what_is_no_address(listen: str) -> None:
    with pytest.raises(InvalidArgument, match="is not an address"):
        Dashboard(DashboardOptions("127.0.0.1:1", listen))


def test_a_port_that_is_taken_is_said_before_anything_runs() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(PortInUse):
        Dashboard(DashboardOptions("127.0.0.1:1", f"127.0.0.1:{taken.getsockname()[1]}"))


def test_the_number_of_its_connections_is_a_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STATEFLOW_SERVER_PAGE_CONNECTIONS_MAX", "5")
    page = Dashboard(DashboardOptions("127.0.0.1:1"))
    assert isinstance(page._listener, Listener)
    assert page._listener._connections_max == 5
    page.close()


def test_a_certificate_and_its_key_belong_together() -> None:
    with pytest.raises(InvalidArgument, match="or its key is missing"):
        Dashboard(DashboardOptions("127.0.0.1:1", cert=Path("page.pem")))
