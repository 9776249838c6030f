"""What somebody writes who asks a cluster for something, on the command line and on the live page alike, and what is
called for it."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from typing import Any

from stateflow.client.cluster import Cluster
from stateflow.client.commands import Migration
from stateflow.errors import InvalidArgument, UnknownPartition
from stateflow.moves import MoveOptions
from stateflow.reports import Placement

#: batches that the controller runs, as the ledger's board names them: ``sweep/…``
CONTROLLERS = ("reconfiguration", "roll", "sweep", "restores")


def partition_numbers(text: str, count: int) -> list[int]:
    """``3, 5-9`` or ``all``, of ``count``: each once, sorted. Raises InvalidArgument, UnknownPartition."""
    found: set[int] = set()
    for word in re.split(r"\s*,\s*|\s+", text.strip()):
        match = re.fullmatch(r"(\d{1,9})(?:-(\d{1,9}))?", word)
        first, last = (int(match[1]), int(match[2] or match[1])) if match else (1, 0)
        if word == "all":
            found.update(range(count))
        elif first > last:
            raise InvalidArgument(f"{word!r} is no partition", remedy="write numbers, ranges like 5-9, or all")
        elif last >= count:
            raise UnknownPartition(f"there is no partition {last}", remedy=f"use 0 to {count - 1}")
        else:
            found.update(range(first, last + 1))
    return sorted(found)


def keys_meant(text: str) -> Iterator[Any]:
    """What somebody wrote for a key may stand for: itself, else what it is as JSON."""
    yield text
    try:
        value = json.loads(text)
    except ValueError:
        return
    yield tuple(value) if isinstance(value, list) else value


def by_share(policies: Sequence[str]) -> bool:
    """Each replica has its weight's share then: a rebalance, which is another command than a placement."""
    return list(policies) in ([], ["ring"])


def would_redistribute(cluster: Cluster, policies: Sequence[str], operator: str) -> Placement:
    """What :func:`redistribute` would move. Nothing is."""
    return cluster.would_rebalance(operator) if by_share(policies) else cluster.propose(*policies, operator=operator)


def redistribute(cluster: Cluster, policies: Sequence[str], operator: str, options: MoveOptions) -> list[Migration]:
    """Partitions go to where these policies want them; of all operators where none is named."""
    if by_share(policies):
        return cluster.rebalance(operator, options)
    return cluster.place(*policies, operator=operator, options=options)


def runner_of(batch: str) -> tuple[str, str]:
    """One of CONTROLLERS, and its id there; or ``""`` and its name, of whoever works by the ledger's board."""
    kind, _, id_ = batch.partition("/")
    return (kind, id_) if id_ and kind in CONTROLLERS else ("", batch)


def call_off(cluster: Cluster, kind: str, id_: str) -> str:
    """A batch of the controller, as :func:`runner_of` has it. Returns what becomes of it."""
    match kind:
        case "reconfiguration":
            cluster.cancel(id_)
            return "what is not behind its fence is rolled back"
        case "restores":
            cluster.cancel_restore(id_)
            return "what has not begun of it does not"
        case _:
            return cluster.sweep(id_).cancel().state
