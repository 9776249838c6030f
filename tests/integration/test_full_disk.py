"""A disk that is full or read-only, at start and later: a replica says one line, and goes on when there is room."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from pathlib import Path

import pytest

from stateflow.errors import StateflowError
from stateflow.testing import LocalCluster
from tests.integration.disk_faults import DiskFaults, needs_compiler
from tests.integration.mounts import Mount
from tests.integration.operators import Tally
from tests.integration.support import Model, eventually, outputs, read, rows_of

pytestmark = [pytest.mark.processes, pytest.mark.alone]
SIZE = 24 << 20


def fill(disk: Path) -> Path:
    ballast = disk / "ballast"
    with ballast.open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(bytes(1 << 16))
    return ballast


def said(data_dir: Path) -> str:
    """Returns the line that a replica which cannot start ends with."""
    arguments = ["replica", "--site", "s", "--name", "r", "--data-dir", str(data_dir), "--controller", "127.0.0.1:1"]
    done = subprocess.run(
        [sys.executable, "-m", "stateflow", *arguments], capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    return line


def test_a_full_disk_at_start_is_one_line(mount: Mount) -> None:
    disk = mount("full", 1 << 20)
    fill(disk)
    line = said(disk / "data")
    assert line.startswith("disk_full: the disk is full: No space left on device"), line
    assert "bug in stateflow" not in line


def test_a_disk_that_may_not_be_written_is_one_line(mount: Mount) -> None:
    disk = mount("read-only", 1 << 20)
    subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
    line = said(disk / "data")
    assert line.startswith("invalid_argument: the data directory cannot be used: Read-only file system"), line


@pytest.mark.parametrize("acknowledge", ["wal", "fsync"])
def test_a_disk_that_fills_up_loses_nothing_and_serves_again_when_there_is_room(
    mount: Mount, monkeypatch: pytest.MonkeyPatch, acknowledge: str
) -> None:
    monkeypatch.setenv("STATEFLOW_REPLICA_ACKNOWLEDGE", acknowledge)
    disk = mount("small")
    local = LocalCluster(Tally, sites={"cloud": 1}, partitions=2, data_dir=disk / "cluster", checkpoint_interval_s=0)
    model = Model()
    with local:
        stream = local.stream("Tally", source="s")
        rows = [{"k": f"k{number}" * 50, "v": number} for number in range(200)]
        assert outputs(stream.send(rows)) == model.apply(rows)
        ballast = fill(disk)
        with pytest.raises(StateflowError) as caught:
            while True:
                produced = stream.send(rows)
                assert outputs(produced) == model.apply(rows)
        assert caught.value.code == "disk_full", caught.value
        assert "bug in stateflow" not in str(caught.value)
        ballast.unlink()
        # the batch that failed is sent again as it was: the client cannot know whether it was written
        again = eventually(lambda: stream.send(rows), "it takes batches again")
        assert outputs(again) == model.apply(rows)
        ballast = fill(disk)
        local.kill("cloud-0")  # what it has written stays, no matter what it could not write
        ballast.unlink()
        local.restart("cloud-0")
        counted = eventually(lambda: read(local.cluster, "Tally", "n"), "it is back")
        assert {key: n for (key, _), n in counted.items()} == model.n
        assert "Traceback" not in (local.data_dir / "cloud-0.log").read_text()


@needs_compiler
@pytest.mark.parametrize("acknowledge", ["wal", "fsync"])
def test_a_disk_that_becomes_read_only_loses_nothing_and_serves_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, acknowledge: str
) -> None:
    """A file system remounts itself read-only under open files, as after an error, and is mended."""
    (tmp_path / "faults").mkdir()
    disk, model = DiskFaults(tmp_path / "faults"), Model()
    monkeypatch.setenv("STATEFLOW_REPLICA_ACKNOWLEDGE", acknowledge)
    for name, value in disk.environment.items():
        monkeypatch.setenv(name, value)
    with LocalCluster(
        Tally, sites={"cloud": 1}, partitions=2, data_dir=tmp_path / "cluster", checkpoint_interval_s=0
    ) as local:
        stream, rows = local.stream("Tally", source="s"), rows_of("k", 0)
        assert outputs(stream.send(rows)) == model.apply(rows)
        with disk.read_only(local.processes["cloud-0"].pid, local.data_dir / "cloud-0"):
            with pytest.raises(StateflowError) as caught:
                stream.send(rows)
            assert caught.value.code == "disk_refused", caught.value
            assert "bug in stateflow" not in str(caught.value)
        again = eventually(lambda: stream.send(rows), "it takes batches again")
        assert outputs(again) == model.apply(rows)
        model.check(local.cluster)
        local.kill("cloud-0")
        local.restart("cloud-0")
        eventually(lambda: model.check(local.cluster) is None, "it is back with what was acknowledged")
