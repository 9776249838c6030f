"""Fixtures that integration tests share."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING
from unittest.mock import patch

import pytest

from tests.integration.mounts import Mount, mounts
from tests.integration.operators import Tally
from tests.integration.trio import CLOCKS, Trio

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

ROOT = Path(__file__).parents[2]
#: these JVMs live for seconds: the second compiler costs them more than it gains
os.environ.setdefault("SPARK_SUBMIT_OPTS", "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC")
#: without it, a key file of the user who runs the tests would be created
os.environ.setdefault("STATEFLOW_CODE_KEY", "of tests and of nothing else")
#: replicas and controllers check their invariants after each change
os.environ.setdefault("STATEFLOW_DEBUG_VALIDATE", "1")
#: the environment before any test changed it
BEGAN_WITH = dict(os.environ)


@pytest.fixture(scope="session")
def spark() -> Iterator[SparkSession]:
    """One Spark session for all tests of a run. Without Java they fail; leave them out with ``-m "not spark"``."""
    from stateflow.spark import local_session

    # Spark's workers import tests from the working directory, which the first test that asks may have changed; and what
    # that test has put into the environment would reach all other tests through the JVM
    with contextlib.chdir(ROOT), patch.dict(os.environ, BEGAN_WITH, clear=True):
        session = local_session(
            "stateflow tests",
            spark__sql__shuffle__partitions="2",
            spark__sql__streaming__numRecentProgressUpdates="1000",
        )
    yield session
    session.stop()


@pytest.fixture
def mount(tmp_path: Path) -> Iterator[Mount]:
    with mounts(tmp_path) as mounted:
        yield mounted


@pytest.fixture
def trio(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Iterator[Trio]:
    """A cluster with three controllers and short leader leases.

    Args:
        request: its parameter is the offset of each process's clock, in seconds; none: all clocks are right.
    """
    monkeypatch.setenv("PYTHONPATH", str(CLOCKS))
    monkeypatch.setenv("STATEFLOW_CONTROLLER_HOLD_S", "2")
    monkeypatch.setenv("STATEFLOW_CONTROLLER_NOTICE_GONE", "false")
    monkeypatch.setenv("STATEFLOW_REPLICA_HEARTBEAT_INTERVAL_S", "0.3")
    off_s: Mapping[str, int] = getattr(request, "param", {})
    with Trio(Tally, off_s=off_s, sites={"cloud": 1, "edge": 1}, partitions=4, data_dir=tmp_path / "c") as trio:
        yield trio
