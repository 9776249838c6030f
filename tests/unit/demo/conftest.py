"""A made-up run that looks like a real one, for all that is drawn."""

from __future__ import annotations

import random

import pytest

from stateflow.demo.result import BatchRow, DemoResult, Incident, MoveRow, RequestSample

REPLICAS = ("cloud-0", "edge-1-0", "edge-2-0")
DURATION_S = 48.0
KILLED_S, RESTARTED_S = 31.2, 33.1


def example_moves(dice: random.Random) -> list[MoveRow]:
    moves = []
    for index in range(24):
        edge = REPLICAS[1 + index % 2]
        source, target = (REPLICAS[0], edge) if index < 14 else (edge, REPLICAS[0])
        started_s = 4 + index * 1.65 + dice.random()
        duration_s = dice.uniform(0.6, 2.2)
        predicted_ms = dice.uniform(6, 14)
        returning = index >= 14
        failed = index == 17
        moves.append(
            MoveRow(
                partition=index % 16,
                source=source,
                target=target,
                started_s=started_s,
                pause_at_s=started_s + duration_s * 0.93,
                duration_s=duration_s,
                bytes_warm=0 if returning else int(dice.lognormvariate(13.4, 0.4)),
                bytes_reused=int(dice.lognormvariate(13.4, 0.4)) if returning else 0,
                bytes_delta=int(dice.lognormvariate(8.6, 0.7)),
                rounds=dice.randint(1, 4),
                predicted_pause_ms=predicted_ms,
                pause_ms=0.0 if failed else predicted_ms * dice.lognormvariate(-0.05, 0.25),
                state="ABORTED" if failed else "COMPLETED",
                error="unavailable: the target was killed (replica=edge-2-0)" if failed else "",
            )
        )
    return moves


def example_result(*, sound: bool = True) -> DemoResult:
    dice = random.Random(7)
    moves = example_moves(dice)
    batches, requests = [], []
    at_s, number = 0.0, 0
    while at_s < DURATION_S:
        down = KILLED_S <= at_s < RESTARTED_S
        duration_s = 2.3 if down else dice.lognormvariate(-0.75, 0.15) + (1.2 if number == 0 else 0)
        batches.append(BatchRow(number, at_s, 3508, duration_s * 1000))
        for chunk in range(16):
            moment = at_s + duration_s * (0.3 + 0.6 * chunk / 16)
            moving = any(abs(move.pause_at_s - moment) < 0.02 for move in moves)
            held_ms = dice.uniform(4, 12) if moving else 0.0
            total_ms = dice.lognormvariate(1.6, 0.45) + held_ms + (dice.uniform(300, 1900) if down else 0)
            replica = REPLICAS[chunk % (1 + min(2, int(at_s / 9)))]
            requests.append(RequestSample(moment, replica, 219, total_ms))
        at_s += duration_s
        number += 1
    return DemoResult(
        rows=336_776,
        keys=4_044,
        rows_per_s=336_776 / at_s,
        duration_s=at_s,
        batches=batches,
        requests=requests,
        moves=moves,
        incidents=[Incident(KILLED_S, "SIGKILL", "edge-2-0"), Incident(RESTARTED_S, "restart", "edge-2-0")],
        state_equal=sound,
        output_equal=sound,
        state_keys=4_044,
        output_rows=336_776,
        differences=[] if sound else ["key 'N1': flights: expected 3, got 4", "seq 7: <b>carriers</b>"],
        settings={"partitions": 16, "sites": {"cloud": 1, "edge-1": 1, "edge-2": 1}, "max_pause_ms": 50},
        versions={"python": "3.11.2", "pyspark": "4.3.0", "stateflow": "0.1.0"},
    )


@pytest.fixture
def result() -> DemoResult:
    return example_result()


@pytest.fixture
def unsound_result() -> DemoResult:
    return example_result(sound=False)
