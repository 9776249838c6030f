from __future__ import annotations

import dataclasses
import itertools

import pytest

from stateflow.demo.result import (
    BatchRow,
    DemoResult,
    LatencyWindow,
    RequestSample,
    human_bytes,
    lanes,
    latency_windows,
    percentile,
    round_step,
    throughput,
)


def request(at_s: float, total_ms: float = 1.0, rows: int = 10, replica: str = "r0") -> RequestSample:
    return RequestSample(at_s, replica, rows, total_ms)


def test_percentiles_are_nearest_rank() -> None:
    values = list(range(100, 0, -1))
    assert [percentile(values, at) for at in (0, 50, 99, 100)] == [1, 50, 99, 100]
    assert percentile([7.0], 99) == 7.0


def test_latency_windows_are_250_ms_and_skip_idle_time() -> None:
    samples = [request(0.0, 5), request(0.249, 1), request(0.25, 3), request(1.1, 9)]
    assert latency_windows(samples) == [
        LatencyWindow(0.125, 2, 1, 5, 5),
        LatencyWindow(0.375, 1, 3, 3, 3),
        LatencyWindow(1.125, 1, 9, 9, 9),
    ]
    assert latency_windows([]) == []


def test_throughput_counts_every_row_once_by_replica() -> None:
    samples = [request(0.1), request(0.2, replica="r1"), request(1.7, rows=30)]
    rates = throughput(samples, [], width_s=0.5)
    assert rates.at_s == [0.25, 0.75, 1.25, 1.75]
    assert rates.rows_per_s == {"r0": [20, 0, 0, 60], "r1": [20, 0, 0, 0]}


def test_throughput_of_the_query_where_no_request_was_sampled() -> None:
    assert throughput([], [BatchRow(0, 0.4, 50, 100.0)]).rows_per_s == {"query": [100.0]}
    assert throughput([], []).rows_per_s == {}


def test_throughput_keeps_the_sum_of_rows(result: DemoResult) -> None:
    rates = throughput(result.requests, result.batches)
    total = sum(sum(values) for values in rates.rows_per_s.values()) * rates.width_s
    assert total == pytest.approx(sum(sample.rows for sample in result.requests))


def test_steps_are_round() -> None:
    assert [round_step(value) for value in (0, 0.5, 0.6, 1, 1.1, 3, 6, 12)] == [0.5, 0.5, 1, 1, 2, 5, 10, 20]


def test_moves_of_one_lane_do_not_overlap(result: DemoResult) -> None:
    chosen = lanes(result.moves)
    spans = [(move.started_s, move.started_s + move.duration_s) for move in result.moves]
    for lane in set(chosen):
        mine = sorted(span for span, number in zip(spans, chosen, strict=True) if number == lane)
        assert all(earlier[1] <= later[0] for earlier, later in itertools.pairwise(mine))


def test_simultaneous_moves_get_a_lane_each(result: DemoResult) -> None:
    same = [dataclasses.replace(result.moves[0], partition=index) for index in range(4)]
    assert sorted(lanes(same)) == [0, 1, 2, 3]


def test_bytes_for_people() -> None:
    counts = (0, 999, 1_536, 999_999, 5_400_000, 2_000_000_000)
    assert [human_bytes(count) for count in counts] == [
        "0 B",
        "999 B",
        "1.5 kB",
        "1.0 MB",
        "5.4 MB",
        "2.0 GB",
    ]
