"""Drift: a slope is found despite outliers, and a constant series has none."""

from __future__ import annotations

import os
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks.drift import REPLICAS_DISK, Drift, _bytes, slope
from benchmarks.soak import _flat


def test_a_slope_is_that_of_most() -> None:
    line = [(float(t), 100.0 + 0.5 * t) for t in range(1000)]
    assert slope(line) == pytest.approx(0.5)
    spiked = [(t, value * (9 if t % 10 == 3 else 1)) for t, value in line]
    assert slope(spiked) == pytest.approx(0.5, rel=0.2)
    assert slope([(float(t), 7.0) for t in range(50)]) == 0.0
    assert slope([(1.0, 2.0)]) == 0.0


def test_growth_is_of_the_run_behind_its_beginning(tmp_path: Path) -> None:
    local: Any = SimpleNamespace(processes={}, data_dir=tmp_path)
    drift = Drift(local)
    drift.series["r memory MB"] = [(float(t), 50.0 if t < 20 else 100.0 + t / 10) for t in range(100)]
    (found,) = drift.figures().values()
    assert found["per_hour"] == pytest.approx(360, rel=0.01)
    assert found["grew"] == pytest.approx(0.1 * 79 / found["median"], rel=0.01)
    assert len(found["by_sixth"]) == 6
    assert found["by_sixth"] == sorted(found["by_sixth"])


def test_what_goes_while_it_looks_counts_for_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "f").write_bytes(bytes(1000))
    scan = os.scandir

    def going(path: Any) -> Any:
        if Path(path).name == "b":
            raise FileNotFoundError(path)
        return scan(path)

    monkeypatch.setattr(os, "scandir", going)
    assert _bytes(tmp_path) == 1000


def test_what_keeps_it_from_looking_on_is_said(tmp_path: Path) -> None:
    local: Any = SimpleNamespace(processes={}, data_dir=tmp_path / "missing")
    drift = Drift(local, 0.001)
    with drift:
        drift._thread.join(10)
    assert isinstance(drift.failed, FileNotFoundError)


def test_what_was_not_looked_at_does_not_meet_its_target() -> None:
    grown = {"cloud-0 memory MB": {"grew": 0.0}, REPLICAS_DISK: {"grew": 0.0}, "checkpoints disk MB": {"grew": 0.2}}
    met = {target.name.removeprefix("growth of "): target.met for target in _flat(grown)}
    assert {name for name in met if met[name]} == {"cloud-0 memory MB", REPLICAS_DISK}
    of_controller = {f"controller {what}" for what in ("memory MB", "files", "threads")}
    assert set(met) == grown.keys() | {"cloud-0 files", "cloud-0 threads"} | of_controller


def test_it_looks_at_processes_and_disks(tmp_path: Path) -> None:
    (tmp_path / "edge-0").mkdir()
    (tmp_path / "edge-0" / "f").write_bytes(bytes(10_000))
    local: Any = SimpleNamespace(processes={"edge-0": SimpleNamespace(pid=os.getpid())}, data_dir=tmp_path)
    with Drift(local, 0.01) as drift:
        deadline = time.monotonic() + 10
        while len(drift.series["edge-0 disk MB"]) < 5 and time.monotonic() < deadline:
            time.sleep(0.01)
    found = drift.figures()
    assert set(found) == {"edge-0 memory MB", "edge-0 files", "edge-0 threads", "edge-0 disk MB", REPLICAS_DISK}
    assert found["edge-0 disk MB"]["median"] == found[REPLICAS_DISK]["median"] == 0.01
