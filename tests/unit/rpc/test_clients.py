"""Blocking clients: among threads and children of a process, and while a controller is not there yet."""

from __future__ import annotations

import socket
import subprocess
import sys
from concurrent import futures
from typing import Any

import grpc
import pytest

from stateflow.errors import Unavailable
from stateflow.rpc import clients, controller_pb2_grpc
from stateflow.rpc import controller_pb2 as cpb
from stateflow.rpc.clients import ControllerClient

#: PySpark starts its JVM by fork and exec
SCRIPT = """
import os, signal, subprocess, threading
from stateflow.errors import StateflowError
from stateflow.rpc import controller_pb2 as cpb
from stateflow.rpc.clients import ControllerClient

def call():
    while True:
        try:
            ControllerClient("127.0.0.1:1").call("Status", cpb.StatusRequest(), 5)
        except StateflowError:
            pass

for _ in range(3):
    threading.Thread(target=call, daemon=True).start()
ignore = lambda: signal.signal(signal.SIGINT, signal.SIG_IGN)
ended = [subprocess.Popen(["true"], preexec_fn=ignore).wait(30) for _ in range(300)]
print([code for code in ended if code])
os._exit(0)
"""


def test_children_live_while_calls_are_under_way() -> None:
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.strip() == "[]"


class Late(controller_pb2_grpc.ControllerServiceServicer):
    def Status(self, request: Any, context: Any) -> cpb.StatusReply:
        return cpb.StatusReply()

    def ListReconfigurations(self, request: Any, context: Any) -> Any:
        yield cpb.ReconfigurationList()


@pytest.mark.parametrize("several", [False, True])
@pytest.mark.parametrize("method", ["call", "stream"])
def test_a_controller_that_is_being_started_is_waited_for(
    method: str, several: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        listen = f"127.0.0.1:{free.getsockname()[1]}"
    address = f"{listen},127.0.0.1:1" if several else listen
    server = grpc.server(futures.ThreadPoolExecutor(2))
    controller_pb2_grpc.add_ControllerServiceServicer_to_server(Late(), server)
    asked = 0

    def later(_: float) -> None:
        nonlocal asked
        asked += 1
        if asked == 3:
            server.add_insecure_port(listen)
            server.start()

    monkeypatch.setattr(clients, "sleep", later)
    monkeypatch.setattr(clients, "TOLD_AFTER_S", 0.0)
    client = ControllerClient(address, connect_timeout_s=30)
    try:
        if method == "call":
            assert client.call("Status", cpb.StatusRequest()) == cpb.StatusReply()
        else:
            assert list(client.stream("ListReconfigurations", cpb.ListRequest())) == [cpb.ReconfigurationList()]
    finally:
        server.stop(None)
    assert asked >= 3
    assert [each.getMessage() for each in caplog.records] == [f"waiting for the controller at {address}"]


@pytest.mark.parametrize("method", ["call", "stream"])
def test_one_that_does_not_come_is_not_waited_for_for_ever(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0

    def later(seconds: float) -> None:
        nonlocal now
        now += seconds

    monkeypatch.setattr(clients, "sleep", later)
    monkeypatch.setattr(clients.SYSTEM_CLOCK, "monotonic", lambda: now)
    client = ControllerClient("127.0.0.1:1", connect_timeout_s=5)
    with pytest.raises(Unavailable, match=r"no answer from the controller at 127.0.0.1:1: .*check that it runs"):
        client.call("Status", cpb.StatusRequest()) if method == "call" else next(
            client.stream("ListReconfigurations", cpb.ListRequest())
        )
    assert 5 <= now < 5 + 2 * clients.ASKED_AGAIN_S
