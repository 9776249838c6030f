"""A client of :mod:`benchmarks.overload`, in a process of its own: ``python -m benchmarks.overload_sender KIND JSON``.

It prints ``ready``, begins when its standard input is written to, and ends when that is closed. At the end a client
that counts answers prints what it sent, and a hostile one whether it was still active.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from typing import Any

from benchmarks.latency import KEYS, picker
from benchmarks.load import Load, OpenLoad, Source, summary
from benchmarks.operators import CountSum
from stateflow.client import Cluster
from stateflow.client.stream import by_partition
from stateflow.errors import StateflowError
from stateflow.partition.positions import Batch
from stateflow.rpc import replica_pb2 as rpb
from stateflow.rpc import replica_pb2_grpc
from stateflow.rpc.apply import requests_of
from stateflow.rpc.secure import CHANNEL_OPTIONS, blocking_channel

OPERATOR = CountSum.__name__
#: rows of a flooding batch, and how many threads flood at a time
FLOOD_ROWS, FLOOD_THREADS = 20_000, 8
#: streams that the client opens and leaves idle
IDLE_STREAMS = 2_000
#: keys of hostile clients begin here
HOSTILE_KEYS = 1 << 40
KEYS_EACH = 1_000_000


def _say(line: str) -> None:
    print(line, flush=True)


def _begins() -> None:
    _say("ready")
    sys.stdin.read(1)


def _says_whether(goes_on: bool) -> None:
    _say(json.dumps({"goes_on": goes_on}))


def count(address: str, told: dict[str, Any]) -> None:
    """Sends paced batches and counts the answers, as a good client.

    ``interval_s`` 0: each is sent when the last is answered.
    """
    sources = _sources(address, told)
    load = Load(sources, int(told["seed"]))
    _begins()
    with load:
        load.wait(told["settle_s"])
        before, began = _sent(sources), time.monotonic()
        sys.stdin.read()
        rate = (_sent(sources) - before) / (time.monotonic() - began)
    _report(load, told, {"batches_per_s": rate})


def offer(address: str, told: dict[str, Any]) -> None:
    """Offers a batch every ``interval_s``, whatever is answered, and sends one per source at a time."""
    load = OpenLoad(_sources(address, told), int(told["seed"]), told["interval_s"], told["room"])
    _begins()
    with load:
        load.wait(told["settle_s"])
        before, began = load.backlog.offers, time.monotonic()
        sys.stdin.read()
        offers, took_s = load.backlog.offers.since(before), time.monotonic() - began
    rates = {"batches_per_s": offers.answered / took_s, "offered_per_s": offers.offered / took_s}
    _report(load, told, {**rates, **asdict(offers)})


def _sources(address: str, told: dict[str, Any]) -> list[Source]:
    """Returns a client's sources, each with keys of its own."""
    cluster, number = Cluster(address), int(told["number"])
    pick = picker(0, told["rows"])

    def pick_of(first: int) -> Callable[[Any], list[dict[str, Any]]]:
        return lambda rng: [{"k": first + row["k"], "v": row["v"]} for row in pick(rng)]

    return [
        Source(
            cluster.stream(OPERATOR, f"count-{number}-{n}"),
            pick_of(number * KEYS_EACH + n * KEYS),
            told["interval_s"],
        )
        for n in range(told["sources"])
    ]


def _report(load: Load, told: dict[str, Any], figures: dict[str, Any]) -> None:
    begin = load.began_s + told["settle_s"]
    took = [each for source in load.sources for each in source.latencies.between(begin, 1e18)]
    wrong = {"lost": load.truth.lost, "duplicated": load.truth.duplicated}
    state = [[key, *found] for key, found in load.truth.state.items()]
    _say(json.dumps({**figures, "latency_ms": summary(took), **wrong, "state": state}))


def _sent(sources: list[Source]) -> int:
    return sum(len(source.latencies.took_s) for source in sources)


def flood(address: str, told: dict[str, Any]) -> None:
    """Sends large batches one after the other, from several threads at a time."""
    rows = [{"k": HOSTILE_KEYS + n, "v": 1.0} for n in range(FLOOD_ROWS)]
    streams = [Cluster(address).stream(OPERATOR, f"flood-{number}") for number in range(FLOOD_THREADS)]
    _begins()

    def send(number: int) -> None:
        while True:
            try:
                streams[number].send(rows)
            except StateflowError as error:
                print(error, file=sys.stderr)

    threads = [threading.Thread(target=send, args=(number,), daemon=True) for number in range(FLOOD_THREADS)]
    for each in threads:
        each.start()
    sys.stdin.read()
    _says_whether(all(each.is_alive() for each in threads))


def deaf(address: str, told: dict[str, Any]) -> None:
    """Sends batch after batch on one stream, and reads no answer."""
    deployed = next(each for each in Cluster(address).status().operators if each.name == OPERATOR)
    spec = Cluster(address).operator(OPERATOR)
    rows = by_partition(spec, None, [{"k": HOSTILE_KEYS + FLOOD_ROWS + n, "v": 1.0} for n in range(2_000)])
    parts = [(partition, deployed.epochs[partition]) for partition in rows]

    def requests() -> Iterator[rpb.ApplyRequest]:
        for number in range(1_000_000):
            for request in requests_of(OPERATOR, Batch("deaf", number, sparse=True), rows, parts, 1 << 20):
                request.call = number + 1
                yield request

    _one_stream(told["replica"], requests())


def halves(address: str, told: dict[str, Any]) -> None:
    """Begins batch after batch, and never sends the rest of one."""

    def requests() -> Iterator[rpb.ApplyRequest]:
        for number in range(1_000_000):
            header = rpb.ApplyHeader(operator=OPERATOR, source=f"half-{number}")
            one: dict[str, Any] = {"partitions": [0], "epochs": [1], "counts": [1]}
            yield rpb.ApplyRequest(call=number + 1, header=header, rows=bytes(500_000), more=True, **one)
            time.sleep(0.005)

    _one_stream(told["replica"], requests())


def _one_stream(replica: str, requests: Iterator[rpb.ApplyRequest]) -> None:
    """Sends on one stream whose answers are never read."""
    stub = replica_pb2_grpc.ReplicaServiceStub(blocking_channel(replica, CHANNEL_OPTIONS))
    _begins()
    held = stub.Apply(requests)
    sys.stdin.read()
    _says_whether(held.is_active())
    held.cancel()


def streams(address: str, told: dict[str, Any]) -> None:
    """Opens ``IDLE_STREAMS`` streams on one connection, and sends nothing."""
    over = threading.Event()

    def nothing() -> Iterator[rpb.ApplyRequest]:
        over.wait()
        yield from ()

    stub = replica_pb2_grpc.ReplicaServiceStub(blocking_channel(told["replica"], CHANNEL_OPTIONS))
    _begins()
    held = [stub.Apply(nothing()) for _ in range(IDLE_STREAMS)]
    sys.stdin.read()
    _says_whether(any(each.is_active() for each in held))
    over.set()
    for each in held:
        each.cancel()


KINDS = {"count": count, "offer": offer, "flood": flood, "deaf": deaf, "halves": halves, "streams": streams}

if __name__ == "__main__":
    given = json.loads(sys.argv[2])
    if sys.argv[1] not in ("count", "offer"):  # it stands for a client on another machine
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    KINDS[sys.argv[1]](given["address"], given)
