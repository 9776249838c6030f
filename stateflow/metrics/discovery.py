"""``/sd``: the addresses at which metrics are served, for Prometheus to discover (its ``http_sd_configs``)."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from stateflow.security.plain import host_of

ANYWHERE = frozenset({"0.0.0.0", "::"})  # noqa: S104 - compared with the addresses of others


@dataclass(frozen=True, slots=True)
class Target:
    """One ``/metrics`` page. ``address``: host:port as it is bound. ``labels``: labels to add to its metrics."""

    address: str
    labels: Mapping[str, str]


def answer(targets: Iterable[Target], asked: str) -> bytes:
    """Returns the targets as JSON.

    Args:
        asked: host or host:port at which the caller reached this process. It replaces the host of targets that listen
            at all addresses of this machine, because the caller can reach those there, too.
    """
    found = [{"targets": [_reached(each.address, asked)], "labels": dict(each.labels)} for each in targets]
    return json.dumps(found).encode()


def _reached(address: str, asked: str) -> str:
    if host_of(address) not in ANYWHERE:
        return address
    host, _, port = asked.rpartition(":")
    host = host if host and port.isdecimal() else asked
    return f"{host}:{address.rpartition(':')[2]}"
