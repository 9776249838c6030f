"""Programs can be started, by fork and exec, while gRPC calls are under way: PySpark starts its JVM so."""

from __future__ import annotations

import subprocess
import sys

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
