"""Rates from the counters of replicas: each look is compared with the one before."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stateflow.dashboard import view
from stateflow.dashboard.view import Latency, Rates, percentile
from stateflow.reports import PartitionReport, ReplicaStatistics, RequestReport


def said(rows: int, *requests: RequestReport, partitions: tuple[PartitionReport, ...] = ()) -> ReplicaStatistics:
    return ReplicaStatistics(requests, partitions, rows, 0)


def request(number: int, ms: float, operator: str = "Op") -> RequestReport:
    return RequestReport(number, 1000 * number, operator, 10, ms, 0.0)


def partition(number: int, rows: int, size: int = 0) -> PartitionReport:
    return PartitionReport("Op", number, "SERVING", 1, 1, "", 0.0, rows, size)


@given(st.lists(st.floats(0, 1e6), min_size=1), st.floats(0.01, 1.0))
def test_a_percentile_is_not_below_so_many_of_all(values: list[float], share: float) -> None:
    found = percentile(sorted(values), share)
    assert found in values
    assert sum(value <= found for value in values) >= share * len(values) * (1 - 1e-9)


def test_rows_a_second_need_two_looks_and_a_process_that_began_again_counts_from_zero() -> None:
    made = Rates()
    made.add("a", 10.0, said(1000))
    assert made.rows_per_s("a", 10.0) is None
    made.add("a", 12.0, said(1600))
    assert made.rows_per_s("a", 12.0) == 300.0
    made.add("a", 14.0, said(40))
    assert made.rows_per_s("a", 14.0) == (600 + 40) / 4
    assert made.rows_per_s("a", 14.0 + view.STALE_S + 1) is None


def test_a_rate_is_of_the_last_seconds_and_evens_bursts_out() -> None:
    made = Rates()
    for at_s in range(20):
        made.add("a", float(at_s), said(500 * (at_s // 5)))
    assert made.rows_per_s("a", 19.0) == 100.0
    made.add("a", 40.0, said(500 * 3 + 2100))
    made.add("a", 60.0, said(500 * 3 + 2100))
    assert made.rows_per_s("a", 60.0) == 0.0, "seldom asked, it is of the time between"


def test_what_was_served_before_anybody_looked_is_no_latency_of_now() -> None:
    made = Rates()
    made.add("a", 10.0, said(10, request(7, 900.0)))
    assert made.after("a") == 7
    assert made.latencies(10.0)[""].count == 0
    made.add("a", 11.0, said(30, request(8, 2.0), request(9, 4.0, "Other")))
    assert made.after("a") == 9
    assert (made.latencies(11.0)[""].p50_ms, made.latencies(11.0)[""].p99_ms) == (2.0, 4.0)
    assert made.latencies(11.0)["Other"] == Latency(4.0, 4.0, 1)
    assert made.latencies(11.0)["Nobody"] == Latency(None, None, 0)
    assert made.latencies(11.0 + view.WINDOW_S + 1)[""].count == 0


def test_points_are_in_the_order_of_their_times_when_the_clock_is_set_back() -> None:
    made = Rates()
    for at_us in (1, 2, 5, 9, 4, 6, 6):
        made.tick(at_us, 0.0)
    assert [point.at_us for point in made.points] == [1, 2, 4, 6]


def test_numbers_of_requests_begin_again_with_their_process() -> None:
    made = Rates()
    made.add("a", 10.0, said(500, request(700, 1.0)))
    made.add("a", 11.0, said(5))
    assert made.after("a") == 0
    made.add("a", 12.0, said(6, request(1, 1.0)))
    made.add("a", 13.0, said(6))
    assert made.after("a") == 1, "nothing came, and nothing began again"


def test_the_rate_of_a_partition_is_its_owners() -> None:
    made = Rates()
    for at_s, rows in ((1.0, 0), (2.0, 40)):
        made.add("a", at_s, said(rows, partitions=(partition(0, rows), partition(1, rows))), sizes=False)
    made.add("b", 2.0, said(0, partitions=(partition(1, 0, 77),)), sizes=True)
    assert made.partition_rates("Op", ("a", "b")) == {0: 40.0, 1: 0.0}
    assert (made.bytes_of(("Op", 1)), made.bytes_of(("Op", 0))) == (77, None)


def test_entries_of_a_partition_are_those_that_its_owner_said() -> None:
    made = Rates()
    owned, kept = (
        replace(partition(0, 0), entries=7, state="OWNED"),
        replace(partition(1, 0), entries=9, state="SEALED"),
    )
    made.add("a", 1.0, said(0, partitions=(owned, kept)), sizes=True)
    # from a release that does not report entries
    made.add("b", 1.0, said(0, partitions=(partition(0, 0),)), sizes=True)
    assert (made.entries_of(("Op", 0)), made.entries_of(("Op", 1))) == (7, None)
    fenced = replace(owned, entries=8, state="FENCING")
    made.add("a", 2.0, said(0, partitions=(fenced,)), sizes=True)
    assert made.entries_of(("Op", 0)) == 8, "it is the owner's still"
    made.keep(["a"], [], 1.0)
    assert made.entries_of(("Op", 0)) is None


def test_the_slowest_are_told_for_a_while() -> None:
    made = Rates()
    made.add("a", 0.0, said(0))
    made.add("a", 1.0, said(9, *(request(number, float(number)) for number in range(1, 10))))
    assert [each.total_ms for each in made.slow("Op")] == [9.0, 8.0, 7.0, 6.0, 5.0]
    made.keep(["a"], ["Op"], view.SLOW_S + 2)
    assert made.slow("Op") == []


def test_who_is_gone_is_forgotten() -> None:
    made = Rates()
    for at_s in (1.0, 2.0):
        made.add("a", at_s, said(int(at_s) * 10, partitions=(partition(0, 0, 5),)), sizes=True)
    made.keep([], [], 2.0)
    assert made.rows_per_s("a", 2.0) is None
    assert made.bytes_of(("Op", 0)) is None


def test_time_lines_have_as_many_points_as_are_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    made = Rates()
    assert made.tick(1, 1.0).rows_per_s is None
    made.add("a", 1.0, said(0))
    made.add("a", 2.0, said(10))
    assert made.tick(2, 2.0).rows_per_s == 10.0
    for at in range(view.POINTS):
        made.tick(at, 3.0)
    assert len(made.points) == view.POINTS
