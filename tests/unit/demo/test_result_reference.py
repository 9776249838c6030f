from __future__ import annotations

import ast
import dataclasses
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from stateflow.demo import result
from stateflow.demo.flights import load_flights
from stateflow.demo.result import (
    Comparison,
    Expected,
    FinalState,
    compare_outputs,
    compare_state,
    expected,
)


@pytest.fixture(scope="module")
def flights() -> pd.DataFrame:
    return load_flights()


@pytest.fixture(scope="module")
def small(flights: pd.DataFrame) -> Expected:
    return expected(flights.iloc[:3_000])


def naive(flights: pd.DataFrame) -> tuple[list[tuple[Any, ...]], dict[str, FinalState]]:
    state: dict[str, FinalState] = {}
    rows = []
    for row in flights.itertuples():
        key = "unknown" if row.tailnum is pd.NA else row.tailnum
        now = state.get(key, FinalState(0, {}, set()))
        delay = 0.0 if row.arr_delay is pd.NA else row.arr_delay
        delays = now.delay_by_dest | {row.dest: now.delay_by_dest.get(row.dest, 0.0) + delay}
        state[key] = now = FinalState(now.flights + 1, delays, now.carriers | {row.carrier})
        mean = sum(delays.values()) / now.flights
        rows.append((row.seq, key, now.flights, mean, tuple(sorted(now.carriers))))
    return rows, state


def as_delivered(small: Expected) -> pd.DataFrame:
    """Returns the expected rows as a sink would: in another order, and with arrays for the carriers."""
    frame = small.outputs.sample(frac=1, random_state=3)
    return frame.assign(carriers=[np.array(cell, dtype=object) for cell in frame["carriers"]])


def test_the_reference_agrees_with_a_plain_loop(flights: pd.DataFrame, small: Expected) -> None:
    rows, state = naive(flights.iloc[:3_000])
    assert list(small.outputs.itertuples(index=False, name=None)) == rows
    assert small.state == state
    assert "unknown" in state


def test_a_slice_that_does_not_begin_at_zero_and_has_several_carriers_per_key() -> None:
    frame = pd.DataFrame(
        {
            "seq": [7, 8, 9, 10],
            "tailnum": ["N1", None, "N1", "N1"],
            "carrier": ["UA", "B6", "AA", "UA"],
            "dest": ["ORD", "BOS", "ORD", "MIA"],
            "arr_delay": [3.0, np.nan, -5.0, 1.0],
        },
        index=[70, 80, 90, 100],
    )
    got = expected(frame)
    assert list(got.outputs.itertuples(index=False, name=None)) == [
        (7, "N1", 1, 3.0, ("UA",)),
        (8, "unknown", 1, 0.0, ("B6",)),
        (9, "N1", 2, -1.0, ("AA", "UA")),
        (10, "N1", 3, -1.0 / 3, ("AA", "UA")),
    ]
    assert got.state == {
        "N1": FinalState(3, {"ORD": -2.0, "MIA": 1.0}, {"UA", "AA"}),
        "unknown": FinalState(1, {"BOS": 0.0}, {"B6"}),
    }


def test_the_whole_year_is_computed_and_compared_within_ten_seconds(flights: pd.DataFrame) -> None:
    began = time.perf_counter()
    whole = expected(flights)
    assert compare_outputs(whole, whole.outputs).equal
    assert compare_state(whole, whole.state).equal
    assert time.perf_counter() - began < 10
    assert len(whole.state) == 4_044
    assert sum(state.flights for state in whole.state.values()) == len(flights) == len(whole.outputs)
    last = whole.outputs.groupby("tailnum")["flights"].last()
    assert {key: state.flights for key, state in whole.state.items()} == last.to_dict()


def test_the_reference_imports_nothing_of_the_framework() -> None:
    tree = ast.parse(Path(result.__file__).read_text())
    names = [alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names]
    names += [node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    assert names
    assert not [name for name in names if name.split(".")[0] in {"stateflow", "reconfig"}]


def test_equal_outputs_are_equal_in_any_order_and_any_kind_of_sequence(small: Expected) -> None:
    assert compare_outputs(small, as_delivered(small)) == Comparison(True, 3_000, 0, 0, 0, [])


def set_cell(frame: pd.DataFrame, seq: int, column: str, value: Any) -> pd.DataFrame:
    changed = frame.copy()
    changed[column] = [
        value if number == seq else cell for number, cell in zip(frame["seq"], frame[column], strict=True)
    ]
    return changed


@pytest.mark.parametrize(
    ("column", "value"),
    [
        ("tailnum", "N0"),
        ("tailnum", None),
        ("tailnum", pd.NA),
        ("flights", 999),
        ("flights", None),
        ("mean_delay", float("nan")),
        ("mean_delay", 12.000000000001),
        ("carriers", np.array(["AA", "ZZ"], dtype=object)),
        ("carriers", np.array([], dtype=object)),
        ("carriers", None),
        ("carriers", "UA"),
    ],
)
def test_one_wrong_cell_is_found_and_named(small: Expected, column: str, value: Any) -> None:
    got = compare_outputs(small, set_cell(as_delivered(small), 1_234, column, value))
    assert (got.equal, got.different, got.missing, got.extra, got.compared) == (False, 1, 0, 0, 3_000)
    assert len(got.differences) == 1
    assert got.differences[0].startswith(f"seq 1234: {column}: expected ")


def test_the_last_bit_of_a_mean_counts(small: Expected) -> None:
    frame = as_delivered(small)
    near = np.nextafter(float(small.outputs["mean_delay"].iloc[5]), np.inf)
    assert compare_outputs(small, set_cell(frame, 5, "mean_delay", near)).different == 1


def test_a_duplicated_row_is_found(small: Expected) -> None:
    frame = as_delivered(small)
    got = compare_outputs(small, pd.concat([frame, frame[frame["seq"] == 17]]))
    assert (got.equal, got.extra, got.missing, got.different) == (False, 1, 0, 0)
    assert got.differences == ["seq 17: duplicated"]


def test_a_lost_row_and_an_unexpected_row_are_found(small: Expected) -> None:
    frame = as_delivered(small)
    got = compare_outputs(small, frame[frame["seq"] != 17])
    assert (got.equal, got.missing, got.extra, got.compared) == (False, 1, 0, 2_999)
    assert got.differences == ["seq 17: expected, absent"]
    stray = frame[frame["seq"] == 17].assign(seq=5_000)
    got = compare_outputs(small, pd.concat([frame, stray]))
    assert (got.equal, got.missing, got.extra) == (False, 0, 1)
    assert got.differences == ["seq 5000: not expected, present"]


def test_an_empty_output_and_a_missing_column_are_differences(small: Expected) -> None:
    nothing = compare_outputs(small, as_delivered(small).iloc[:0])
    assert (nothing.equal, nothing.missing, nothing.compared) == (False, 3_000, 0)
    assert len(nothing.differences) == 10
    narrow = compare_outputs(small, as_delivered(small).drop(columns="carriers"))
    assert not narrow.equal
    assert narrow.differences == ["column 'carriers': absent from the output"]


def test_equal_state(small: Expected) -> None:
    assert compare_state(small, dict(small.state)) == Comparison(True, len(small.state), 0, 0, 0, [])


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda s: dataclasses.replace(s, flights=s.flights + 1), "flights: expected"),
        (
            lambda s: dataclasses.replace(s, delay_by_dest=s.delay_by_dest | {"XXX": 0.0}),
            "delay_by_dest['XXX']: expected nothing, got 0.0",
        ),
        (
            lambda s: dataclasses.replace(s, delay_by_dest=dict(list(s.delay_by_dest.items())[1:])),
            "got nothing",
        ),
        (
            lambda s: dataclasses.replace(s, delay_by_dest=dict.fromkeys(s.delay_by_dest, float("nan"))),
            "got nan",
        ),
        (lambda s: dataclasses.replace(s, carriers=s.carriers | {"ZZ"}), "carriers: expected"),
        (lambda s: dataclasses.replace(s, carriers=set()), "carriers: expected"),
    ],
)
def test_one_wrong_entry_of_one_key_is_found_and_named(
    small: Expected, change: Callable[[FinalState], FinalState], says: str
) -> None:
    key = "N14228"
    got = compare_state(small, small.state | {key: change(small.state[key])})
    assert (got.equal, got.different, got.missing, got.extra) == (False, 1, 0, 0)
    assert says in got.differences[0]
    assert got.differences[0].startswith(f"key '{key}': ")


def test_a_lost_key_and_an_extra_key_are_found(small: Expected) -> None:
    fewer = {key: state for key, state in small.state.items() if key != "N14228"}
    got = compare_state(small, fewer)
    assert (got.equal, got.missing, got.compared) == (False, 1, len(small.state) - 1)
    got = compare_state(small, small.state | {"N?": FinalState(0, {}, set())})
    assert (got.equal, got.extra, got.compared) == (False, 1, len(small.state))
    assert got.differences == ["key 'N?': not expected, present"]


def test_no_more_than_ten_differences_are_spelled_out(small: Expected) -> None:
    got = compare_state(small, {})
    assert got.missing == len(small.state) > 10
    assert len(got.differences) == 10


def test_more_carriers_than_bits_are_refused() -> None:
    count = 63
    frame = pd.DataFrame({"seq": range(count), "tailnum": "N1", "dest": "BOS", "arr_delay": 0.0})
    with pytest.raises(ValueError, match="63 carriers"):
        expected(frame.assign(carrier=[f"C{index}" for index in range(count)]))
    most = expected(frame.iloc[:62].assign(carrier=[f"C{index:02}" for index in range(62)]))
    assert len(most.state["N1"].carriers) == 62
    assert len(most.outputs["carriers"].iloc[-1]) == 62
