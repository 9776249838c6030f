"""Spark without a suitable Java: one line says what to install, and nothing is left running."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from stateflow.errors import JavaMissing
from stateflow.spark import local_session, require_java

REPOSITORY = Path(__file__).resolve().parents[2]
REMEDY = "install a Java runtime, version 17 or newer (Debian/Ubuntu: apt-get install openjdk-17-jre-headless; "


def fake_java(directory: Path, *, says: str, status: int = 0) -> Path:
    """A ``bin/java`` that prints its version as real ones do: on standard error."""
    program = directory / "bin" / "java"
    program.parent.mkdir(parents=True)
    program.write_text(f"#!/bin/sh\ncat >&2 <<'END'\n{says}\nEND\nexit {status}\n")
    program.chmod(0o755)
    return program


@pytest.fixture
def no_java(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A PATH with an empty directory alone, and no JAVA_HOME."""
    empty = tmp_path / "empty"
    empty.mkdir()
    monkeypatch.setenv("PATH", str(empty))
    monkeypatch.delenv("JAVA_HOME", raising=False)
    return empty


def assert_refused(what: str) -> None:
    for attempt in (require_java, lambda: local_session("x")):
        with pytest.raises(JavaMissing) as caught:
            attempt()
        said = str(caught.value)
        assert said.startswith(f"java_missing: {what}")
        assert REMEDY in said
        assert "or set JAVA_HOME to one" in said
        assert "\n" not in said


@pytest.mark.usefixtures("no_java")
def test_no_java_on_the_path() -> None:
    assert_refused("Spark needs Java, which is not on the PATH")


@pytest.mark.parametrize(
    ("says", "version"),
    [
        ('openjdk version "11.0.22" 2024-01-16\nOpenJDK Runtime Environment (build 11.0.22+7)', 11),
        ('java version "1.8.0_401"\nJava(TM) SE Runtime Environment', 8),
        ('openjdk version "16" 2021-03-16', 16),
        ("something else altogether", 0),
    ],
)
def test_a_java_that_is_too_old(no_java: Path, monkeypatch: pytest.MonkeyPatch, says: str, version: int) -> None:
    program = fake_java(no_java, says=says)
    monkeypatch.setenv("PATH", f"{program.parent}{os.pathsep}/usr/bin{os.pathsep}/bin")
    assert_refused(f"Java {version} is too old for Spark 4 (java={program})")


@pytest.mark.parametrize(
    ("says", "version"),
    [
        ('openjdk version "17.0.15" 2025-04-15', 17),
        ('openjdk version "21" 2023-09-19 LTS', 21),
        ('Picked up JAVA_TOOL_OPTIONS: -Dx="1"\nopenjdk version "25-ea" 2025-09-16', 25),
    ],
)
def test_a_java_that_will_do(no_java: Path, monkeypatch: pytest.MonkeyPatch, says: str, version: int) -> None:
    program = fake_java(no_java, says=says)
    monkeypatch.setenv("PATH", f"{program.parent}{os.pathsep}/usr/bin{os.pathsep}/bin")
    assert require_java() == version


def test_java_home_comes_before_the_path(no_java: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    new = fake_java(no_java, says='openjdk version "21"')
    old = fake_java(tmp_path / "old", says='openjdk version "11.0.22"')
    monkeypatch.setenv("PATH", f"{new.parent}{os.pathsep}/usr/bin{os.pathsep}/bin")
    assert require_java() == 21
    monkeypatch.setenv("JAVA_HOME", str(old.parent.parent))
    assert_refused(f"Java 11 is too old for Spark 4 (java={old})")


@pytest.mark.parametrize("kind", ["no directory", "no java in it", "does not run", "fails"])
def test_a_wrong_java_home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, kind: str) -> None:
    home = tmp_path / "home"
    if kind == "no java in it":
        home.mkdir()
    elif kind == "does not run":
        fake_java(home, says="").chmod(0o644)
    elif kind == "fails":
        fake_java(home, says="Error: could not find libjava.so", status=1)
    monkeypatch.setenv("JAVA_HOME", str(home))
    assert_refused(f"{home}/bin/java cannot be run (java_home={home})")


@pytest.mark.processes
def test_the_demo_without_java_says_so_and_starts_nothing(tmp_path: Path) -> None:
    """The demonstration without Java says so and starts nothing.

    Every process of it inherits the mark in its environment, so that a stray one would show.
    """
    (tmp_path / "bin").mkdir()
    mark = f"STATEFLOW_TEST_MARK={tmp_path}"
    environment = {key: value for key, value in os.environ.items() if key != "JAVA_HOME"}
    environment |= {"PATH": str(tmp_path / "bin"), "STATEFLOW_TEST_MARK": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-m", "stateflow", "demo", "--rows", "1000", "--out", str(tmp_path / "out")],
        env=environment,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 1
    assert done.stderr.startswith("java_missing: Spark needs Java, which is not on the PATH: " + REMEDY)
    assert done.stderr.count("\n") == 1
    assert "Traceback" not in done.stdout + done.stderr
    assert marked_processes(mark) == []


def marked_processes(mark: str) -> list[str]:
    """Command lines of processes that have ``mark`` in their environment."""
    found = []
    for directory in Path("/proc").iterdir():
        if directory.name.isdigit():
            try:
                if mark.encode() in (directory / "environ").read_bytes().split(b"\0"):
                    found.append((directory / "cmdline").read_bytes().replace(b"\0", b" ").decode())
            except OSError:  # it ended, or it is not ours to look at
                continue
    return found
