"""A vehicle drives from site to site, and its state follows it: `python drive.py`."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from vehicles import Trips

from stateflow import Cluster, StreamClient
from stateflow.testing import LocalCluster

VEHICLE = "V1"
ROUTE = ("north", "south")


def drive(cluster: Cluster) -> Iterator[str]:
    """Drives the route, and yields a line for each move and each site.

    At each site, a gateway sends readings until the vehicle's state has arrived there, too.
    """
    for site in ROUTE:
        over = threading.Event()
        with cluster.stream("Trips", source=f"gateway-{site}", site=site) as gateway, ThreadPoolExecutor(1) as beside:
            telling = beside.submit(tell, gateway, site, over)
            try:
                while not (moves := cluster.place("locality", operator="Trips")):
                    pass  # it takes some seconds until the cluster has measured which site sends the rows
                for move in moves:
                    for each in move.wait().moves:
                        yield f"{each.source} → {each.target}: {each.state}, pause {each.pause_ms:.1f} ms"
            finally:
                over.set()
            sent, last = telling.result()
            yield f"{sent} readings from {site}; the state has {last['readings']}, from {', '.join(last['sites'])}"


def tell(gateway: StreamClient, site: str, over: threading.Event) -> tuple[int, dict[str, Any]]:
    """Sends readings until ``over`` is set. Returns (number of readings, output of the last reading)."""
    sent = 0
    while True:
        (out,) = gateway.send([{"vehicle": VEHICLE, "site": site, "km": 0.5}])
        sent += 1
        if over.wait(0.02):
            return sent, out


if __name__ == "__main__":
    with LocalCluster(Trips, sites={"cloud": 1, "north": 1, "south": 1}, partitions=4, deploy_to=("cloud",)) as local:
        for said in drive(local.cluster):
            print(said, flush=True)
