"""Reads an operator's state from the replicas that own its partitions, while the operator runs."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterator
from time import sleep
from typing import Any

from stateflow.durable import MALFORMED
from stateflow.errors import LeaseLost, NotOwner, StateflowError, Unavailable, UnknownState
from stateflow.operator.arrow import read_table
from stateflow.partition.entries import ReadableStates, described, is_exact
from stateflow.partitioner import partition_of
from stateflow.router import backoff
from stateflow.rpc.clients import ReplicaClient
from stateflow.rpc.cluster_client import ClusterClient
from stateflow.state import encode_row_key


class StateReader:
    """Reads the states of one operator. A partition that moves meanwhile is read at its new owner."""

    def __init__(self, client: ClusterClient, operator: str) -> None:
        self._client = client
        self._operator = operator

    def scan(
        self, state: str, key: Any = None, partitions: Collection[int] | None = None, *, whole: bool = True
    ) -> Iterator[bytes]:
        """Yields the entries of a state, see :meth:`.Cluster.scan_state`."""
        if not state or (is_exact(state) and key is None and partitions is None):
            self.states().exact(state, self._operator)
        pages = self._pages(state, key, partitions, whole=whole)
        try:
            first = next(pages, None)
        except UnknownState:  # a replica cannot resolve the plain name of a tag, of which it may have none
            exact = self.states().exact(state, self._operator)
            yield from self._pages(exact, key, partitions, whole=whole)
            return
        if first is not None:
            yield first
            yield from pages

    def states(self) -> ReadableStates:
        """Returns the states that can be read, see :meth:`.Cluster.readable_states`."""
        attributes: dict[str, dict[str, Any]] = {}
        tags: list[dict[str, Any]] = []
        for page in self._pages("", None, None, whole=True):
            try:
                for row in read_table(page).to_pylist():
                    name, state = row["attribute"], described(row["declared"])
                    if name is None:
                        tags.append(state)
                    else:
                        attributes[str(name)] = state
            except MALFORMED as error:
                raise Unavailable(
                    "invalid answer from a replica: its list of states cannot be read",
                    remedy="check what runs at the replicas' addresses, and its version",
                    operator=self._operator,
                ) from error
        return ReadableStates.of(attributes, tags)

    def _pages(self, state: str, key: Any, partitions: Collection[int] | None, *, whole: bool) -> Iterator[bytes]:
        count = self._client.deployment(self._operator).spec.partitions
        left = set(range(count)) if key is None else {partition_of(key, count)}
        if partitions is not None:
            left &= set(partitions)
        keys = [] if key is None else [encode_row_key(key)]
        pauses = backoff()
        while left:
            pause, before = next(pauses), len(left)
            refused: tuple[int, StateflowError] | None = None
            deployed = self._client.deployment(self._operator)
            if deployed.spec.partitions != count:
                raise Unavailable("the operator was deployed anew", remedy="read again", operator=self._operator)
            for partition in sorted(left):
                try:
                    address = deployed.owners[partition].address
                    scan = ReplicaClient(address).scan(self._operator, state, [partition], keys)
                    pages = list(itertools.islice(scan, None if whole else 1))
                except (LeaseLost, NotOwner, Unavailable) as error:  # it has moved, or its owner cannot serve yet
                    refused = refused or (partition, error)
                    continue
                yield from pages
                left.discard(partition)
            if len(left) < before:
                pauses = backoff()  # reading and using the others' entries took its time, which was no wait
            elif pause is None and refused is not None:
                raise deployed.why_unserved().get(refused[0], refused[1]) from None
            if left:
                sleep(pause or 0.0)
