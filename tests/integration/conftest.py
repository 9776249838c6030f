"""What integration tests share."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.integration.mounts import Mount, mounts

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

#: these JVMs live for seconds: the second compiler costs them more than it gains
os.environ.setdefault("SPARK_SUBMIT_OPTS", "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC")
#: else a file of who runs the tests is made
os.environ.setdefault("STATEFLOW_CODE_KEY", "of tests and of nothing else")
#: replicas and controllers look at what always holds, after each change
os.environ.setdefault("STATEFLOW_DEBUG_VALIDATE", "1")


@pytest.fixture(scope="session")
def spark() -> Iterator[SparkSession]:
    """One Spark session for all tests of a run. Without Java they fail; leave them out with ``-m "not spark"``."""
    from stateflow.spark import local_session

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
