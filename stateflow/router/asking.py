"""Asks the owners of all partitions whether they contain a source's batch, or how far the source has come."""

from __future__ import annotations

from collections.abc import Callable
from time import sleep

from stateflow.errors import StateflowError, Unavailable
from stateflow.router.reached import Reached
from stateflow.router.router import Router
from stateflow.rpc.clients import ReplicaClient
from stateflow.runtime.layout import Position


class Asked:
    """Questions to all owners, sent when this is made; :meth:`answers` waits for the answers.

    Args:
        batch: an owner whose partitions all contain the batch before this one answers only that.
        timeout_s: seconds for which a partition may stay without an owner that answers.
    """

    def __init__(self, router: Router, source: str, batch: int, timeout_s: float) -> None:
        self._router = router
        self._source = source
        self._batch = batch
        self._timeout_s = timeout_s
        self._found: dict[int, Reached] = {}
        self._open = set(range(router.spec.partitions))
        self._pending = self._ask()

    def _ask(self) -> list[tuple[list[int], Callable[[], dict[int, Position]]]]:
        by_address: dict[str, list[int]] = {}
        for partition in sorted(self._open):
            by_address.setdefault(self._router.table.routes[partition].address, []).append(partition)
        stall_s = self._router.settings.stall_s
        pending = []
        for address, partitions in by_address.items():
            replica = ReplicaClient(address, stall_s)
            asked = replica.begin_positions(self._router.operator, self._source, partitions, self._batch)
            pending.append((partitions, asked))
        return pending

    def answers(self) -> dict[int, Reached]:
        """Returns partition → position that the source has at least reached.

        Partitions that have seen nothing of the source are left out.

        Waits for partitions that are on the move, and for owners that are away. Raises Unavailable.
        """
        clock = self._router.clock
        settings = self._router.settings
        since, pause = clock.monotonic(), settings.backoff_initial_s / 2
        while (error := self._collect()) is not None:
            waited = clock.monotonic() - since
            if waited > self._timeout_s:
                table = self._router.table
                partition = min(self._open, key=lambda each: (each not in table.unserved, each))
                raise table.no_owner(partition, waited, error)
            sleep(pause)
            pause = min(settings.backoff_max_s, 2 * pause)
            try:
                self._router.refresh()
            except Unavailable:
                pass  # go on with the known owners
            self._pending = self._ask()
        return self._found

    def _collect(self) -> StateflowError | None:
        """Waits for the pending answers. Returns why some partitions have not answered; None: all have."""
        last: StateflowError | None = None
        for partitions, result in self._pending:
            try:
                found = result()
            except StateflowError as error:
                if not error.retryable:
                    raise
                last = error
                continue
            self._open.difference_update(partitions)
            for partition, position in found.items():
                self._found[partition] = Reached(position.batch, position.event_us, position.event_before_us)
        return last
