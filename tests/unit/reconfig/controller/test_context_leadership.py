"""A controller's leadership: when it may decide, and whether a former controller is gone."""

from __future__ import annotations

import dataclasses
import errno
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from reconfig.controller.context import Leadership
from reconfig.controller.members import Members
from reconfig.controller.server import here, is_gone
from stateflow.clock import ManualClock
from stateflow.errors import HoldLost
from stateflow.settings import ControllerSettings


def test_a_hold_counts_from_before_it_was_asked_for() -> None:
    leadership = Leadership(3, 10.0, 10.0)
    leadership.check(9.9)
    with pytest.raises(HoldLost) as lost:
        leadership.check(10.0)
    assert lost.value.where["term"] == 3
    leadership.renewed(5.0)
    leadership.renewed(4.0)  # answers may arrive out of order
    leadership.check(14.9)
    with pytest.raises(HoldLost):
        leadership.check(15.0)
    Leadership().check(1e12)


def test_a_successor_waits_for_what_its_predecessor_may_still_grant() -> None:
    settings = ControllerSettings(lease_s=10.0, lease_margin=0.1, hold_s=5.0)
    clock = ManualClock()
    after_a_crash, after_an_expiry = Members(["a"], settings, clock), Members(["a"], settings, clock, settings.hold_s)
    clock.advance(11.1)
    assert after_a_crash.lapsed("a")
    assert not after_an_expiry.lapsed("a"), "a lease may have been granted 5 s after the hold was taken"
    clock.advance(5.4)
    assert not after_an_expiry.lapsed("a")
    clock.advance(0.2)
    assert after_an_expiry.lapsed("a")


@pytest.mark.skipif(sys.platform != "linux", reason="told by /proc")
def test_a_process_is_gone_only_where_that_is_certain() -> None:
    me = here("a:1")
    assert not is_gone(me)
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as other:
        holder = dataclasses.replace(me, id="other", pid=other.pid, started=_started(other.pid))
        assert not is_gone(holder)
        assert is_gone(dataclasses.replace(holder, started=holder.started + 1)), "another process has its number"
        other.kill()
        os.waitid(os.P_PID, other.pid, os.WEXITED | os.WNOWAIT)
        assert is_gone(holder), "it waits to be buried"
    assert is_gone(holder)
    for unknown in ({"boot": "another"}, {"namespace": "pid:[1]"}, {"boot": ""}, {"namespace": ""}, {"started": 0}):
        assert not is_gone(dataclasses.replace(holder, **unknown)), "elsewhere, or not to be known"


@pytest.mark.skipif(sys.platform != "linux", reason="told by /proc")
@pytest.mark.parametrize(
    ("code", "killing", "gone"),
    [
        (errno.ENOENT, None, False),
        (errno.ENOENT, PermissionError(), False),
        (errno.ENOENT, ProcessLookupError(), True),
        (errno.EMFILE, ProcessLookupError(), False),
        (errno.EACCES, ProcessLookupError(), False),
        (errno.ESRCH, ProcessLookupError(), False),
    ],
)
def test_a_process_that_cannot_be_looked_at_is_not_gone(
    monkeypatch: pytest.MonkeyPatch, code: int, killing: OSError | None, gone: bool
) -> None:
    """A process that cannot be inspected may still run.

    /proc may hide other users' processes (hidepid), or this process may have no file descriptor left.
    """
    other = dataclasses.replace(here("a:1"), id="other", pid=os.getppid())
    read_text = Path.read_text

    def read(path: Path, *arguments: Any, **options: Any) -> str:
        if path == Path(f"/proc/{other.pid}/stat"):
            raise OSError(code, os.strerror(code), str(path))
        return read_text(path, *arguments, **options)

    def kill(pid: int, signal: int) -> None:
        assert (pid, signal) == (other.pid, 0)
        if killing is not None:
            raise killing

    monkeypatch.setattr(Path, "read_text", read)
    monkeypatch.setattr(os, "kill", kill)
    assert is_gone(other) is gone


def _started(pid: int) -> int:
    from reconfig.controller import server

    return server._started(pid) or 0
