"""Checks of ``stateflow doctor``, and their reports of what is not as it should be."""

from __future__ import annotations

from pathlib import Path

import pytest

from stateflow import doctor
from stateflow.doctor import Finding, Verdict
from stateflow.errors import JavaMissing

REPOSITORY = Path(__file__).parents[2]
NOBODY = "127.0.0.1:1"


def test_all_is_looked_at_and_nothing_stays(tmp_path: Path) -> None:
    found = list(doctor.examined(tmp_path / "not" / "yet", NOBODY, {}))
    names = ["Python", "Java, for Spark", "machine", "open files", "room", "disk", "clock"]
    assert [each.what for each in found] == [*names, "environment", "certificate", "cluster"]
    assert all(each.found for each in found)
    assert doctor.worst(found) is Verdict.GOOD
    assert list(tmp_path.iterdir()) == []
    assert found[-1] == Finding("cluster", Verdict.UNKNOWN, f"nothing listens at {NOBODY}")


def test_a_variable_that_nobody_knows_is_named_with_the_nearest() -> None:
    found = doctor.variables({"STATEFLOW_REPLICA_ACKNOWLEGDE": "fsync", "HOME": "/", "STATEFLOW_TRACEBACKS": "1"})
    assert found.verdict is Verdict.BAD
    assert found.found == "unknown: STATEFLOW_REPLICA_ACKNOWLEGDE"
    assert found.remedy == "STATEFLOW_REPLICA_ACKNOWLEGDE: did you mean STATEFLOW_REPLICA_ACKNOWLEDGE?"
    assert doctor.variables({"STATEFLOW_ZZZZ": ""}).remedy == "remove them: nothing reads them"


def test_few_open_files() -> None:
    assert doctor.open_files(1 << 20).verdict is Verdict.GOOD
    few = doctor.open_files(1024)
    assert few.verdict is Verdict.WARNING
    assert "raise the limit (`ulimit -Hn`, LimitNOFILE=): now a replica can have about 58 partitions" in few.remedy


def test_a_place_that_cannot_be_written(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    assert doctor.syncs(tmp_path / "a" / "b").verdict in (Verdict.GOOD, Verdict.WARNING)
    assert doctor.syncs(Path("/proc/1")).verdict is Verdict.BAD
    assert "cannot be written" in doctor.syncs(Path("/proc/1")).found
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "gone").symlink_to("none")
    for place in (file, file / "x", tmp_path / "loop" / "x", tmp_path / "gone"):
        assert (doctor.syncs(place).verdict, doctor.room(place).verdict) == (Verdict.BAD, Verdict.BAD), place


def test_no_java_is_no_more_than_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    def none() -> int:
        raise JavaMissing("there is none", remedy="install one")

    monkeypatch.setattr(doctor, "require_java", none)
    assert doctor.java() == Finding("Java, for Spark", Verdict.WARNING, "there is none", "install one")


def test_how_far_plain_text_goes_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    assert doctor.certificate().found == "none: plain text, on this machine only"
    monkeypatch.setenv("STATEFLOW_INSECURE", "1")
    found = doctor.certificate()
    assert (found.verdict, found.found) == (Verdict.WARNING, "none: plain text, also beyond this machine")


def test_a_certificate_that_cannot_be_read(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert doctor.certificate().verdict is Verdict.GOOD
    monkeypatch.setenv("STATEFLOW_TOKEN", "nonsense")
    found = doctor.certificate()
    assert (found.verdict, found.found.split(":")[0]) == (Verdict.BAD, "the text is not a token")
