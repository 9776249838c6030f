"""Runs a gateway that cannot reach its cloud for a while: `python outage.py`."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from typing import Any

from gateway import connected, forward
from pumps import Pumps

from stateflow.testing import LocalCluster


def readings(begin: int) -> list[dict[str, Any]]:
    """Returns twenty readings of four pumps, whose pressure falls."""
    return [{"pump": f"P{n % 4}", "bar": 6.0 - n / 100} for n in range(begin, begin + 20)]


def outage(local: LocalCluster, outbox: str) -> Iterator[str]:
    """Causes an outage, and yields lines that say how many outputs arrived before, during and after it."""
    with connected(local.address, outbox) as stream:
        yield f"all is well: {len(list(forward(stream, readings(0))))} of 20"
        local.kill("cloud-0")
        yield f"the cloud is gone: {len(list(forward(stream, readings(20))))} of 20 come from the edge"
        yield f"kept in the outbox: {sum(stream.waiting().parts.values())} batches"
    local.restart("cloud-0")
    with connected(local.address, outbox) as stream:  # a new process would continue in the same way
        stream.flush(timeout_s=60)
        yield f"the cloud is back: {len(stream.forwarded())} outputs of the kept batches"
        last = stream.send([{"pump": f"P{n}", "bar": 9.0} for n in range(4)])
        yield f"readings of each pump: {', '.join(str(row['reading']) for row in last)}"


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as outbox, LocalCluster(sites={"edge": 1, "cloud": 1}) as local:
        local.cluster.deploy(Pumps, partitions=4, failover="manual")  # no replica takes over the cloud's partitions
        for said in outage(local, outbox):
            print(said, flush=True)
