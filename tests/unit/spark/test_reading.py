"""``read_state``: the schema that Spark gets, whatever its version takes times without a zone for."""

from __future__ import annotations

from datetime import datetime
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest

from stateflow.client import Cluster
from stateflow.spark import reading


def test_a_naive_time_is_not_a_moment_in_the_sessions_zone(monkeypatch: pytest.MonkeyPatch) -> None:
    table = pa.table({"key": ["a"], "value": [datetime(2024, 6, 1, 12)], "nothing": pa.nulls(1)})
    monkeypatch.setattr(reading, "check_running", lambda _: None)
    monkeypatch.setattr(reading, "address_of", lambda each: each)
    monkeypatch.setattr(Cluster, "read_state", lambda *_: table)
    spark: Any = SimpleNamespace(createDataFrame=lambda given, schema: (given.num_rows, schema.simpleString()))
    found: Any = reading.read_state(spark, operator="Op", state="last", cluster="127.0.0.1:1")
    assert found == (1, "struct<key:string,value:timestamp_ntz,nothing:string>")
