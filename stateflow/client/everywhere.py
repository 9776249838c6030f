"""Asks all partitions of an operator about a source.

Partitions on the move, or without an owner, are asked again until they answer.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from time import sleep
from typing import TypeVar

from stateflow.errors import LeaseLost, NotOwner, StandbyMissing, Unavailable
from stateflow.router import Router, backoff
from stateflow.rpc.clients import ReplicaClient
from stateflow.runtime.layout import Position, Session

T = TypeVar("T")


def positions(router: Router, source: str) -> dict[int, int]:
    """Returns partition → the last batch of ``source`` it contains; partitions that have seen none are left out."""
    return {partition: position.batch for partition, position in look(router, source).items()}


def look(router: Router, source: str) -> dict[int, Position]:
    """Returns the position of a source, by partition."""
    return _everywhere(router, lambda replica, asked: replica.positions(router.operator, source, asked))


def open_source(router: Router, source: str, session: Session, settled: int | None = None) -> dict[int, Position]:
    """Makes all partitions refuse older clients of the source from now on, and returns its position, by partition.

    Args:
        settled: see :meth:`~stateflow.rpc.clients.ReplicaClient.open_source`.

    Raises SourceTaken, SourceRetired.
    """
    return _everywhere(
        router,
        lambda replica, asked: replica.open_source(router.operator, source, asked, session, settled=settled),
    )


def outputs(router: Router, source: str, after: int) -> dict[int, list[tuple[int, bytes]]]:
    """Returns the kept outputs of a source, partition → (batch, output) of batches behind ``after``, in order."""

    def ask(replica: ReplicaClient, asked: list[int]) -> dict[int, list[tuple[int, bytes]]]:
        found: dict[int, list[tuple[int, bytes]]] = {}
        for partition, batch, output in replica.outputs(router.operator, source, asked, after):
            found.setdefault(partition, []).append((batch, output))
        return found

    return _everywhere(router, ask)


def asked_of_moving(router: Router, partition: int, ask: Callable[[], T]) -> T:
    """Asks the owner of a partition until one may answer, and returns its answer. Raises Unavailable."""
    for pause in backoff(router.settings.unavailable_timeout_s, router.clock):
        try:
            return ask()
        except (LeaseLost, NotOwner, StandbyMissing, Unavailable):
            if pause is None:
                if (why := router.table.unserved.get(partition)) is not None:
                    raise why from None
                raise
            sleep(pause)
            with suppress(Unavailable):  # go on with the known owners
                router.refresh()
    raise AssertionError


def _everywhere(router: Router, ask: Callable[[ReplicaClient, list[int]], dict[int, T]]) -> dict[int, T]:
    """Collects what the owners answer for their partitions."""
    found: dict[int, T] = {}
    by_address: dict[str, list[int]] = {}
    for partition, route in enumerate(router.table.routes):
        by_address.setdefault(route.address, []).append(partition)

    def of(partitions: list[int]) -> dict[int, T]:
        return ask(ReplicaClient(router.table.routes[partitions[0]].address), partitions)

    for partitions in by_address.values():
        try:
            found |= of(partitions)
        except (LeaseLost, NotOwner, StandbyMissing, Unavailable):  # some are moving, or their owner was away
            for partition in partitions:
                found |= asked_of_moving(router, partition, lambda partition=partition: of([partition]))  # type: ignore[misc]
    return found
