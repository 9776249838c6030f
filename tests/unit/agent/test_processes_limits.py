"""Memory limits of replicas: by control groups, which a directory stands for here, or by resource limits."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from stateflow.agent.agent import memory_bytes
from stateflow.agent.processes import OVERHEAD_BYTES, Cgroups, Rlimits, limits, own_group


def group(tmp_path: Path, controllers: str) -> Path:
    (tmp_path / "cgroup.controllers").write_text(controllers)
    (tmp_path / "cgroup.subtree_control").write_text("")
    return tmp_path


def test_a_group_for_each_replica_where_memory_can_be_handed_on(tmp_path: Path) -> None:
    root = group(tmp_path, "cpu memory pids")
    chosen = limits(root)
    assert isinstance(chosen, Cgroups)
    assert (root / "agent" / "cgroup.procs").read_text() == str(os.getpid())
    assert (root / "cgroup.subtree_control").read_text() == "+memory"
    chosen.apply("gw-0", 77, 5 << 30, workers=2)
    found = {file.name: file.read_text() for file in (root / "replica-gw-0").iterdir()}
    assert found == {"memory.max": str(5 << 30), "memory.swap.max": "0", "cgroup.procs": "77"}
    chosen.apply("gw-0", 78, 0, workers=1)
    assert (root / "replica-gw-0" / "memory.max").read_text() == "max", "what a former one had is no limit of this one"


@pytest.mark.parametrize("controllers", ["cpu pids", None])
def test_limits_of_processes_where_it_cannot(controllers: str | None, tmp_path: Path) -> None:
    assert isinstance(limits(None if controllers is None else group(tmp_path, controllers)), Rlimits)
    assert not (tmp_path / "agent").exists()


def test_a_group_with_other_processes_in_it_is_left_as_it_was(tmp_path: Path) -> None:
    root = group(tmp_path, "memory")
    (root / "cgroup.subtree_control").unlink()
    # a directory cannot be written, as the file cannot while a process is in the group
    (root / "cgroup.subtree_control").mkdir()
    assert isinstance(limits(root), Rlimits)
    assert (root / "cgroup.procs").read_text() == str(os.getpid()), "back where it was"


def test_where_the_own_group_is(tmp_path: Path) -> None:
    (tmp_path / "cgroup").write_text("4:memory:/x\n0::/system.slice/agent.service\n")
    (tmp_path / "mountinfo").write_text(
        "30 23 0:26 / /proc rw - proc proc rw\n35 24 0:30 / /sys/fs/cgroup rw,nosuid shared:9 - cgroup2 cgroup2 rw\n"
    )
    assert own_group(tmp_path) == Path("/sys/fs/cgroup/system.slice/agent.service")
    (tmp_path / "mountinfo").write_text("30 23 0:26 / /proc rw - proc proc rw\n")
    assert own_group(tmp_path) is None


def test_memory_is_the_least_limit_of_the_groups_it_is_in(tmp_path: Path) -> None:
    """The agent moves into a group of its own, which has no limit: it used to offer the machine's whole memory."""
    inner = tmp_path / "slice" / "service" / "agent"
    inner.mkdir(parents=True)
    whole = memory_bytes(None)
    for group, allowed in ((inner, "max"), (inner.parent, str(1 << 20)), (inner.parent.parent, str(2 << 20))):
        (group / "memory.max").write_text(allowed)
    assert memory_bytes(inner) == 1 << 20
    (inner.parent / "memory.max").write_text("max")
    assert memory_bytes(inner) == 2 << 20
    (inner.parent.parent / "memory.max").unlink()
    assert memory_bytes(inner) == whole > 2 << 20


@pytest.mark.skipif(sys.platform != "linux", reason="limits of other processes are Linux's")
def test_a_process_and_its_children_are_limited() -> None:
    process = subprocess.Popen(["sleep", "60"])
    try:
        Rlimits().apply("gw-0", process.pid, sys.maxsize, workers=1)  # its agent used to end with an OverflowError
        assert resource.prlimit(process.pid, resource.RLIMIT_DATA) == (sys.maxsize, sys.maxsize)
        Rlimits().apply("gw-0", process.pid, 4 << 30, workers=2)
        limit = (2 << 30) + OVERHEAD_BYTES
        assert resource.prlimit(process.pid, resource.RLIMIT_DATA) == (limit, limit)
        Rlimits().apply("gw-0", process.pid, 0, workers=1)
        assert resource.prlimit(process.pid, resource.RLIMIT_DATA) == (limit, limit), "none was asked for"
    finally:
        process.kill()
        process.wait()
