"""The ``load`` policy: evens out load among nodes by few moves. Sans-io.

It is greedy: from the node with most over its share to those with least, each time the largest partition that fits.
Graham's bound for largest-first (SIAM J. Appl. Math. 17, 1969) holds if partitions are small compared with a node.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, bisect_right, insort
from collections.abc import Callable, Iterator, Mapping, Sequence

from reconfig.capacity import Space
from reconfig.view import Left, View, Wish
from stateflow.types import PartitionId, node_of

#: the most that a node may have, as a multiple of its weight's share
UNEVEN_MAX = 1.2
#: rows a second and bytes of an average node, below which it does not matter which node has more
ROWS_THAT_MATTER = 10.0
BYTES_THAT_MATTER = 16 << 20
#: how many takers are looked at for one partition, those with least; and how many partitions, in ``_places``
_LOOKED_AT = 4
#: if the taker would exceed UNEVEN_MAX, it must end so much of its share below what the giver had
_WORTH_IT = 0.05


class Nodes:
    """Rows, bytes and partitions of nodes and their workers, kept up to date as moves are proposed."""

    def __init__(self, view: View) -> None:
        self.view = view
        self.space = Space(view.room)
        takers = view.takers()
        self.workers: dict[str, list[str]] = {}
        self.sites: dict[str, str] = {}
        self.weights: dict[str, float] = {}
        for info in sorted(takers, key=lambda info: info.name):
            node = node_of(info.name)
            self.workers.setdefault(node, []).append(info.name)
            self.sites[node] = info.site
            self.weights[node] = self.weights.get(node, 0.0) + info.weight
        self.rows = dict.fromkeys(self.weights, 0.0)
        self.bytes = dict.fromkeys(self.weights, 0.0)
        self.counts: dict[str, tuple[float, int]] = {}  # rows and partitions of a worker
        for partition, owner in view.owners.items():
            self._add(partition, owner, 1)

    def _add(self, partition: PartitionId, owner: str, sign: int) -> None:
        node, seen = node_of(owner), self.view.of(partition)
        if node in self.weights:
            self.rows[node] += sign * seen.rows
            self.bytes[node] += sign * seen.size
            rows, count = self.counts.get(owner, (0.0, 0))
            self.counts[owner] = rows + sign * seen.rows, count + sign

    def move(self, partition: PartitionId, target: str, source: str | None = None) -> None:
        self._add(partition, self.view.owners[partition] if source is None else source, -1)
        self._add(partition, target, 1)
        if self.view.room:
            self.space.take(target, self.view.takes(partition, target))

    def worker(self, node: str, partition: PartitionId) -> str | None:
        """Returns the node's worker with least, of those with room for the partition. None: no worker has room."""
        able = [name for name in self.workers[node] if self.has_room(name, partition)] if self.view.room else None
        if able == []:
            return None
        return min(able or self.workers[node], key=lambda name: (*self.counts.get(name, (0.0, 0)), name))

    def has_room(self, replica: str, partition: PartitionId) -> bool:
        return self.space.holds(replica, self.view.takes(partition, replica))


class Share:
    """Nodes' amounts of one measure (rows a second, or bytes) over their fair shares. ``of``: the measure of a
    partition."""

    def __init__(
        self, have: dict[str, float], weights: Mapping[str, float], of: Callable[[PartitionId], float]
    ) -> None:
        whole = sum(weights.values())
        total = sum(have.values())
        self.have, self.of = have, of
        self.fair = {node: total * weight / whole for node, weight in weights.items()}

    def uneven(self, node: str, more: float = 0.0) -> float:
        """Returns what a node has, or would have with ``more``, over its fair share. 1.0: exactly its share."""
        return (self.have[node] + more) / self.fair[node]


def by_load(view: View, left: Left | None = None) -> tuple[list[Wish], View]:
    nodes = Nodes(view)
    if len(nodes.weights) < 2:
        return [], view
    matters = {"rows": ROWS_THAT_MATTER, "bytes": float(BYTES_THAT_MATTER)}
    shares = {
        "rows": Share(nodes.rows, nodes.weights, lambda partition: view.of(partition).rows),
        "bytes": Share(nodes.bytes, nodes.weights, lambda partition: float(view.of(partition).size)),
    }
    count = len(nodes.weights)
    shares = {name: share for name, share in shares.items() if sum(share.have.values()) / count >= matters[name]}
    if not shares:
        return [], view
    return _Evening(view, nodes, shares, left or Left()).run(), view


_Entry = tuple[float, str, int]  # a partition's measure, operator and number


def _places(partitions: Sequence[_Entry], too_much: float, room: float) -> Iterator[int]:
    """Yields indices of the partitions that are worth a try, in this order: the smallest that are enough and fit; the
    largest of the others that fit; the smallest that does not fit, which may be better there all the same.

    Args:
        partitions: partitions of the giver, ascending by the measure.
        too_much: what the giver has beyond the most that it may have.
        room: what the taker may still get.
    """
    fits = bisect_right(partitions, room, key=lambda each: each[0])
    enough = bisect_left(partitions, too_much, key=lambda each: each[0])
    if enough < fits:
        yield from range(enough, min(enough + _LOOKED_AT, fits))
    for place in range(min(fits, enough) - 1, max(-1, min(fits, enough) - 1 - _LOOKED_AT), -1):
        if partitions[place][0] > 0:
            yield place
    if fits < len(partitions):
        yield fits


class _Evening:
    def __init__(self, view: View, nodes: Nodes, shares: Mapping[str, Share], left: Left) -> None:
        self._view, self._nodes, self._shares, self._left = view, nodes, shares, left
        self._owners: dict[PartitionId, str] = {}  # proposed owners, if they differ from the view's
        self._reasons: dict[PartitionId, str] = {}
        #: by giving node and measure: the node's partitions, ascending by the measure
        self._sorted: dict[tuple[str, str], list[_Entry]] = {}
        self._theirs: dict[str, list[PartitionId]] = {}
        giving = {node for node in nodes.weights if self._most(node)[0] > UNEVEN_MAX}
        for partition, owner in view.owners.items():
            if (node := node_of(owner)) in giving:
                self._theirs.setdefault(node, []).append(partition)

    def _most(self, node: str) -> tuple[float, str]:
        return max((share.uneven(node), name) for name, share in self._shares.items())

    def run(self) -> list[Wish]:
        nodes = self._nodes.weights
        self._takers = [(self._most(node)[0], node) for node in nodes]
        heapq.heapify(self._takers)
        givers = [(-self._most(node)[0], node) for node in self._theirs]
        heapq.heapify(givers)
        while givers:
            said, node = heapq.heappop(givers)
            uneven, name = self._most(node)
            if -said != uneven:
                heapq.heappush(givers, (-uneven, node))
            elif uneven > UNEVEN_MAX and self._give(node, name, uneven):
                heapq.heappush(givers, (-self._most(node)[0], node))
        return [
            Wish(partition, self._view.owners[partition], target, self._reasons[partition])
            for partition, target in self._owners.items()
        ]

    def _give(self, node: str, name: str, uneven: float) -> bool:
        """Moves one partition away from ``node``, so that neither node is as uneven as ``node`` was. Returns False if
        no partition does that."""
        share, partitions = self._shares[name], self._by(node, name)
        too_much = share.have[node] - UNEVEN_MAX * share.fair[node]
        looked_at = self._least()
        try:
            for _, taker in looked_at:
                if taker == node:
                    continue
                room = UNEVEN_MAX * share.fair[taker] - share.have[taker]
                for place in _places(partitions, too_much, room):
                    _, operator, number = partitions[place]
                    if self._is_better(partition := PartitionId(operator, number), node, taker):
                        self._take(partition, node, taker, name, uneven)
                        return True
        finally:
            for _, taker in looked_at:
                heapq.heappush(self._takers, (self._most(taker)[0], taker))
        return False

    def _least(self) -> list[tuple[float, str]]:
        """Takes the nodes with least out of the heap, whose entries may be out of date: those are put back anew."""
        found: list[tuple[float, str]] = []
        while self._takers and len(found) < _LOOKED_AT:
            said, node = heapq.heappop(self._takers)
            now = self._most(node)[0]
            if said != now:
                heapq.heappush(self._takers, (now, node))
            else:
                found.append((said, node))
        return found

    def _is_better(self, partition: PartitionId, node: str, taker: str) -> bool:
        view, nodes = self._view, self._nodes
        if not view.may_be_at(partition, nodes.sites[taker]) or not all(
            share.uneven(taker, share.of(partition)) <= max(share.uneven(node) - _WORTH_IT, UNEVEN_MAX)
            for share in self._shares.values()
        ):
            return False
        if view.room and nodes.worker(taker, partition) is None:
            self._left.note(partition, f"{taker} has no room for it")
            return False
        if why := view.bytes_per_s and view.too_long(partition, nodes.sites[node], nodes.sites[taker]):
            self._left.note(partition, why)
            return False
        return True

    def _take(self, partition: PartitionId, node: str, taker: str, name: str, uneven: float) -> None:
        source = self._owners.get(partition, self._view.owners[partition])
        target = self._nodes.worker(taker, partition)
        assert target is not None  # _is_better has checked for room
        self._nodes.move(partition, target, source)
        for each in self._shares:
            if (node, each) in self._sorted:
                self._sorted[node, each].remove(self._entry(partition, each))
            if (taker, each) in self._sorted:
                insort(self._sorted[taker, each], self._entry(partition, each))
        if taker in self._theirs:
            self._theirs[taker].append(partition)
        self._theirs[node].remove(partition)
        self._owners[partition] = target
        self._reasons[partition] = f"{node} has {uneven:.2f} times its share of {name}"

    def _by(self, node: str, name: str) -> list[_Entry]:
        key = node, name
        if key not in self._sorted:
            self._sorted[key] = sorted(self._entry(partition, name) for partition in self._theirs[node])
        return self._sorted[key]

    def _entry(self, partition: PartitionId, name: str) -> _Entry:
        return self._shares[name].of(partition), partition.operator, partition.partition
