"""Sends readings of pumps from standard input, one JSON object per line, and prints the operator's outputs.

    python gateway.py ctl:7070 < readings.jsonl

Rows for replicas that cannot be reached are kept in `outbox/`, and sent when the replicas can be reached again. The
rows of each pump are applied in order, and each exactly once. The program needs stateflow, but neither Spark nor Java.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any

from stateflow import Cluster
from stateflow.client import ForwardingClient

READINGS = "pump string, bar double"


def connected(controller: str, outbox: str = "outbox") -> ForwardingClient:
    """Connects to the cluster. The client starts even while no controller answers, if an earlier run used the same
    outbox."""
    return Cluster(controller).forwarding("Pumps", "gateway-7", outbox=outbox, schema=READINGS, patience_s=0.5)


def forward(stream: ForwardingClient, readings: Iterable[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Sends readings, and yields the outputs as soon as they arrive. The outputs of rows that had to wait are yielded
    after those of a later batch."""
    waiting = iter(readings)
    while batch := list(islice(waiting, 10)):
        yield from stream.send(batch)
        yield from stream.forwarded()


if __name__ == "__main__":
    with connected(sys.argv[1]) as stream:
        for row in forward(stream, map(json.loads, sys.stdin)):
            print(json.dumps(row), flush=True)
        if waiting := stream.waiting():
            print(f"kept in outbox/, for the next run: {sum(waiting.parts.values())} batches", file=sys.stderr)
