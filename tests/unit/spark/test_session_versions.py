"""Features that an older PySpark lacks are refused by name, before anything is started."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from threading import Event
from types import SimpleNamespace
from typing import Any

import pandas as pd
import pyarrow as pa
import pyspark
import pytest
import yaml

from stateflow.demo.flights import replay
from stateflow.errors import InvalidArgument
from stateflow.spark import register_jetstream
from stateflow.spark.pipeline import load_pipeline, run_pipeline
from stateflow.spark.session import JETSTREAM, REAL_TIME, Feature, arrow_schema, require

OF_STREAMS = "invalid_argument: the JetStream source needs PySpark 4.2 or newer, but this is 4.1.9: "
NEW = SimpleNamespace(version="4.3.0")


@pytest.mark.parametrize(
    ("version", "there"),
    [("4.1.4", False), ("4.2.0", True), ("4.2.0.dev1", True), ("4.10.0-vendor-3", True), ("5.0.0", True), ("", False)],
)
def test_a_version_has_what_came_with_it_or_before(version: str, there: bool) -> None:
    assert Feature("it", (4, 2)).is_in(version) is there


def of_a_file(folder: Path) -> None:
    """Runs a pipeline file whose source is a stream."""
    file = folder / "pipeline.yml"
    source = {"format": "jetstream", "options": {"servers": "nats://127.0.0.1:1", "stream": "S"}}
    step = {"operator": "tests.unit.operators:Count"}
    sink = {"format": "noop", "checkpoint": str(folder / "checkpoint")}
    file.write_text(yaml.safe_dump({"name": "x", "source": source, "operators": [step], "sink": sink}))
    nobody: Any = pytest.fail
    run_pipeline(load_pipeline(file, {}, {}), once=True, stop=Event(), tell=nobody, started=nobody)


def of_the_demo(folder: Path) -> None:
    with replay(pd.DataFrame(), 1, folder, "nats://127.0.0.1:1"):
        pytest.fail("it was not refused")


@pytest.mark.parametrize(
    "asked",
    [lambda _: register_jetstream(NEW), of_a_file, of_the_demo],  # type: ignore[arg-type]
    ids=["source", "file", "demo"],
)
def test_streams_that_this_pyspark_does_not_read(
    asked: Callable[[Path], object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pyspark, "__version__", "4.1.9")
    with pytest.raises(InvalidArgument) as caught:
        asked(tmp_path)
    assert str(caught.value).startswith(f"{OF_STREAMS}pip install 'pyspark==4.2.*'"), caught.value
    assert "\n" not in str(caught.value)


def test_a_server_may_be_older_than_its_client(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pyspark, "__version__", "4.3.0")
    require(REAL_TIME, NEW)  # type: ignore[arg-type]
    server: Any = SimpleNamespace(version="4.1.2")
    with pytest.raises(
        InvalidArgument, match=r"but the session's Spark is 4\.1\.2: run on the Spark server: pip install"
    ):
        require(JETSTREAM, server)


def test_times_are_in_utc_whichever_pyspark_makes_the_schema() -> None:
    from pyspark.sql.types import StructType

    found = arrow_schema(StructType().add("at", "timestamp").add("n", "long"))
    assert found == pa.schema([("at", pa.timestamp("us", "UTC")), ("n", pa.int64())])
