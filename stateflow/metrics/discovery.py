"""``/sd``: where figures are served, as Prometheus finds out by asking (its ``http_sd_configs``)."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from stateflow.security.plain import host_of

ANYWHERE = frozenset({"0.0.0.0", "::"})  # noqa: S104 - what others listen at


@dataclass(frozen=True, slots=True)
class Target:
    """``address``: host:port of a ``/metrics``, as it is bound. ``labels``: that its figures are
    given."""

    address: str
    labels: Mapping[str, str]


def answer(targets: Iterable[Target], asked: str) -> bytes:
    """JSON. Args: asked: the host, or host:port, that the asker reached this one at: it reaches there, too, whatever
    listens at all addresses of this machine."""
    found = [{"targets": [_reached(each.address, asked)], "labels": dict(each.labels)} for each in targets]
    return json.dumps(found).encode()


def _reached(address: str, asked: str) -> str:
    if host_of(address) not in ANYWHERE:
        return address
    host, _, port = asked.rpartition(":")
    host = host if host and port.isdecimal() else asked
    return f"{host}:{address.rpartition(':')[2]}"
