"""The load generator is honest: a stall shows as latency, and lost or repeated outputs are found."""

from __future__ import annotations

import random
import threading
import time
from typing import Any

import pytest

from benchmarks import load as load_module
from benchmarks.load import Backlog, Latencies, Ledger, Load, Offers, OpenLoad, Source, ccdf, summary
from benchmarks.stall import StallWatch
from stateflow.errors import Unavailable

INTERVAL_S, STALL_S = 0.01, 0.3


class Counting:
    """A stream that counts and sums as the operator does. ``fault`` changes a batch's outputs."""

    position = -1

    def __init__(self, fault: Any = lambda number, outputs: outputs) -> None:
        self.state: dict[int, tuple[int, float]] = {}
        self.fault = fault

    def send(self, rows: list[dict[str, Any]], *, sequence: int) -> list[dict[str, Any]]:
        self.position = sequence
        outputs = []
        for row in rows:
            n, total = self.state.get(row["k"], (0, 0.0))
            self.state[row["k"]] = n, total = n + 1, total + row["v"]
            outputs.append({"k": row["k"], "n": n, "total": total})
        return self.fault(sequence, outputs)


def load(stream: Counting, pick: Any, seconds: float = 1.0) -> Load:
    source = Source(stream, pick, INTERVAL_S)  # type: ignore[arg-type]
    with Load([source], seed=1) as running:
        running.wait(seconds)
    return running


def one_row(rng: random.Random) -> list[dict[str, Any]]:
    return [{"k": rng.randrange(3), "v": 0.25}]


def test_a_generator_stalled_on_purpose_shows_as_latency() -> None:
    calls = 0

    def stalling(rng: random.Random) -> list[dict[str, Any]]:
        nonlocal calls
        calls += 1
        if calls == 30:
            time.sleep(STALL_S)
        return one_row(rng)

    took = load(Counting(), stalling).sources[0].latencies.took_s
    assert took[29] >= STALL_S
    # batches that were due during the stall are sent late, and their latency includes the rest of the stall
    behind = [seconds for seconds in took[30:] if seconds > STALL_S / 10]
    assert len(behind) >= 0.5 * STALL_S / INTERVAL_S
    assert sorted(behind, reverse=True)[0] > 0.8 * STALL_S


def test_a_stall_of_the_system_hides_no_records() -> None:
    def slow(number: int, outputs: Any) -> Any:
        if number == 20:
            time.sleep(STALL_S)
        return outputs

    running = load(Counting(slow), one_row)
    late = [seconds for seconds in running.sources[0].latencies.took_s if seconds > STALL_S / 10]
    assert len(late) >= 0.5 * STALL_S / INTERVAL_S


def test_a_process_that_is_held_up_says_so() -> None:
    with StallWatch() as watch:
        time.sleep(0.05)
        began = time.monotonic()
        total = sum(range(20_000_000))  # one call into C, which does not release the interpreter lock
        held = time.monotonic() - began
    found = watch.found()
    assert total > 0
    assert found.count >= 1
    assert 0.02 <= found.longest_s <= held + 0.1
    assert 0 < found.share < 1


@pytest.mark.parametrize(
    ("fault", "lost", "duplicated"),
    [
        (lambda number, outputs: outputs, 0, 0),
        (lambda number, outputs: [] if number == 3 else outputs, 1, 0),
        (lambda number, outputs: outputs * 2 if number == 3 else outputs, 0, 1),
        (lambda number, outputs: [{**outputs[0], "total": -1.0}] if number == 3 else outputs, 1, 1),
    ],
)
def test_a_lost_and_a_duplicated_record_planted_on_purpose_are_found(fault: Any, lost: int, duplicated: int) -> None:
    stream = Counting(fault)
    truth = load(stream, one_row, 0.15).truth
    assert stream.position > 3
    assert (truth.lost, truth.duplicated) == (lost, duplicated)
    assert truth.state == stream.state


def test_a_batch_applied_twice_is_found_in_the_outputs_and_in_the_state() -> None:
    stream, truth = Counting(), Ledger()
    rows = [{"k": 1, "v": 0.5}]
    stream.send(rows, sequence=0)
    truth.apply(rows, stream.send(rows, sequence=0))
    assert (truth.lost, truth.duplicated) == (1, 1)
    assert truth.state != stream.state


def test_latencies_are_read_while_one_is_being_added() -> None:
    latencies = Latencies()
    latencies.add(10.0, 0.5)
    latencies.at_s.append(10.1)  # another thread adds the duration a moment later
    assert latencies.between(10.0, 11.0).tolist() == [500.0]
    assert [window["count"] for window in latencies.timeline(10.0)] == [1]


def test_timeline_summary_and_tail() -> None:
    latencies = Latencies()
    for number in range(1000):
        latencies.add(10.0 + number / 1000, (number + 1) / 1000)
    windows = latencies.timeline(10.0)
    assert [window["at_s"] for window in windows] == [0.0, 0.25, 0.5, 0.75]
    assert [window["count"] for window in windows] == [250] * 4
    assert windows[0]["max"] == 250.0
    whole = summary(latencies.between(10.0, 11.0))
    assert whole["p50"] == pytest.approx(500.5)
    assert whole["p99"] == pytest.approx(990, abs=1)
    tail = ccdf(latencies.between(10.0, 11.0))
    assert tail[0] == (pytest.approx(500.5), 0.5)
    assert tail[-1][1] == 0.001
    assert summary([]) == {}
    assert ccdf([]) == []


def test_batches_wait_at_their_sender_and_those_without_room_are_not_sent() -> None:
    backlog = Backlog(senders=2, room=1)
    for due in (1.0, 2.0, 3.0, 4.0):
        backlog.offer(due)
    assert backlog.offers == Offers(offered=4, waited=2, not_sent=1)
    assert [backlog.take(), backlog.take()] == [1.0, 2.0]
    backlog.offer(5.0)
    assert backlog.offers.not_sent == 2, "both senders are busy and one batch waits"
    backlog.answered()
    assert backlog.take() == 3.0
    backlog.offer(6.0)
    assert backlog.offers == Offers(offered=6, answered=1, waited=4, not_sent=2)
    before = backlog.offers
    backlog.end()
    assert backlog.take() is None
    assert backlog.offers.since(before) == Offers(not_sent=1), "the one that still waited"


def test_an_open_load_offers_on_while_nothing_is_answered() -> None:
    go_on = threading.Event()

    class Held(Counting):
        def send(self, rows: list[dict[str, Any]], *, sequence: int) -> list[dict[str, Any]]:
            assert go_on.wait(30)
            return super().send(rows, sequence=sequence)

    def pick(number: int) -> Any:
        return lambda rng: [{"k": 10 * number + rng.randrange(3), "v": 0.25}]

    sources = [Source(Held(), pick(number), 0.0) for number in range(2)]  # type: ignore[arg-type]
    load = OpenLoad(sources, 1, 0.001, room=3)
    with load:
        while load.backlog.offers.not_sent < 5:
            load.wait(0.001)
        assert load.backlog.offers.answered == 0
        go_on.set()
        while load.backlog.offers.answered < 5:
            load.wait(0.001)
    offers = load.backlog.offers
    assert offers.offered == offers.answered + offers.not_sent
    assert offers.waited >= offers.not_sent - 5, "those that waited at the end had a sender, maybe"
    took = [seconds for source in sources for seconds in source.latencies.took_s]
    assert len(took) == offers.answered
    assert max(took) >= 5 * 0.001, "the first ones were due before those that were not sent"
    assert load.truth.lost == load.truth.duplicated == 0


def test_an_open_load_whose_sender_fails_ends() -> None:
    class Fails(Counting):
        def send(self, rows: list[dict[str, Any]], *, sequence: int) -> list[dict[str, Any]]:
            raise ZeroDivisionError

    load = OpenLoad([Source(Fails(), one_row, 0.0)], 1, 0.001, room=3)  # type: ignore[arg-type]
    with pytest.raises(ZeroDivisionError), load:
        while True:
            load.wait(0.001)


@pytest.mark.parametrize("kind", [Load, lambda sources, seed: OpenLoad(sources, seed, 0.001, room=1)])
def test_a_sender_that_does_not_end_is_an_error(kind: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    begun, go_on = threading.Event(), threading.Event()

    class Hangs(Counting):
        def send(self, rows: list[dict[str, Any]], *, sequence: int) -> list[dict[str, Any]]:
            begun.set()
            assert go_on.wait(30)
            return super().send(rows, sequence=sequence)

    monkeypatch.setattr(load_module, "END_S", 0.0)
    running = kind([Source(Hangs(), one_row, 0.0)], 1)  # type: ignore[arg-type]
    with pytest.raises(TimeoutError, match="senders did not end within 0 s"), running:
        assert begun.wait(30)
    go_on.set()
    for thread in running._threads:
        thread.join(30)


def test_a_batch_without_an_answer_at_the_end_of_a_load_is_an_error() -> None:
    begun = threading.Event()

    class Away(Counting):
        attempts = 0

        def send(self, rows: list[dict[str, Any]], *, sequence: int) -> list[dict[str, Any]]:
            self.attempts += 1
            if self.attempts == 3:
                begun.set()
                assert running._stop.wait(30)
            raise Unavailable("no replica")

    stream = Away()
    running = Load([Source(stream, one_row, 0.0)], 1)  # type: ignore[arg-type]
    with pytest.raises(Unavailable, match="no replica"), running:
        assert begun.wait(30)
    assert stream.attempts == 3, "the load had ended"
