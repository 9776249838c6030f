"""S1: planning time of placement by the ring. S2: planning time of placement policies. Replicas exist only as names.

*S1.* One operator has at most 65,536 partitions, so there are several operators. ``propose`` places new operators.
When a replica joins or leaves, ``rebalance`` decides which partitions move. An optimal plan moves only the share of the
new replica, or the partitions of the replica that left.

*S2.* The loads of partitions are skewed by Zipf's law. A tenth of the partitions get their rows from another site. No
partition has more than half of a replica's share, because a partition cannot be split.
"""

from __future__ import annotations

import math
import random
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.record import Correctness, Record, Target, spread
from reconfig.decisions.placement import Seen, View
from reconfig.decisions.policies import UNEVEN_MAX, PolicyName, decide, uneven
from stateflow.ring import propose, rebalance
from stateflow.types import PartitionId, ReplicaInfo

OPERATORS = 16
SITES = 400
AWAY = 0.1  # share of partitions whose rows come from another site
FULL, QUICK = (10_000, 1_000_000), (10_000, 1_000_000)
Owners = dict[PartitionId, str]


def run(experiment: str, *, quick: bool, seed: int, only: Sequence[str] | None = None) -> Record:
    if experiment == "S2":
        return _run_policies(quick=quick, seed=seed)
    rng = random.Random(seed)
    replicas, partitions = QUICK if quick else FULL
    runs = 2 if quick else 5
    took: dict[str, list[float]] = {"place": [], "even_out": [], "join": [], "leave": []}
    excess: dict[str, list[float]] = {"join": [], "leave": []}
    parts: list[Correctness] = []
    for number in range(runs):
        names = [f"r{rng.randrange(10**9):09}" for _ in range(replicas)]
        infos = [ReplicaInfo(name, "site", "none") for name in dict.fromkeys(names)]
        owners = _timed(took["place"], lambda infos=infos: _place(infos, partitions))
        owners |= _timed(took["even_out"], lambda owners=owners, infos=infos: rebalance(owners, infos))
        parts.append(_checked(owners, infos, partitions))
        for change in ("join", "leave"):
            if change == "join":
                after = [*infos, ReplicaInfo(f"new-{number}", "site", "none")]
                least = partitions // len(after)
            else:
                gone = rng.choice(infos)
                after = [info for info in infos if info is not gone]
                least = sum(owner == gone.name for owner in owners.values())
            moves = _timed(took[change], lambda owners=owners, after=after: rebalance(owners, after))
            excess[change].append(len(moves) / least)
            parts.append(_checked(owners | moves, after, partitions))
        print(f"  run {number + 1}: " + ", ".join(f"{k} {v[-1]:.2f} s" for k, v in took.items()), file=sys.stderr)
    return Record(
        experiment=experiment,
        figures={
            "seconds": {name: spread(values) for name, values in took.items()},
            "moved_over_least": {name: spread(values) for name, values in excess.items()},
            "moved_share_least": 1 / (replicas + 1),
        },
        targets=[
            Target("seconds to place everything, worst", max(took["place"]), 10.0, "at_most"),
            Target("seconds to plan a join, worst", max(took["join"]), 10.0, "at_most"),
            Target("seconds to plan a leave, worst", max(took["leave"]), 10.0, "at_most"),
            Target("partitions moved by a join / the least, worst", max(excess["join"]), 1.1, "at_most"),
            Target("partitions moved by a leave / the least, worst", max(excess["leave"]), 1.1, "at_most"),
        ],
        correctness=Correctness.of_all(parts),
        settings={"quick": quick, "replicas": replicas, "partitions": partitions, "operators": OPERATORS, "runs": runs},
        seed=seed,
    )


def _run_policies(*, quick: bool, seed: int) -> Record:
    rng = random.Random(seed)
    took: dict[str, list[float]] = {"load": [], "locality": [], "ring": []}
    before: list[float] = []
    after: list[float] = []
    shares: dict[str, list[float]] = {name: [] for name in took}
    parts: list[Correctness] = []
    replicas, partitions = FULL
    for _ in range(1 if quick else 5):
        view, away = _skewed(rng, replicas, partitions)
        before.append(uneven(view))
        for name, times in took.items():
            wishes = _timed(times, lambda view=view, name=name: decide([PolicyName(name)], view))
            shares[name].append(len(wishes) / partitions)
            moved = view.after(wishes)
            if name == "load":
                after.append(uneven(moved))
            known = {info.name: info.site for info in view.replicas}
            right = name != "locality" or away == {wish.partition: known[wish.target] for wish in wishes}
            lost = sum(owner not in known for owner in moved.owners.values())
            parts.append(Correctness(lost, len(moved.owners) - partitions, 0, right))
    return Record(
        experiment="S2",
        figures={
            "seconds": {name: spread(values) for name, values in took.items()},
            "moved_share": {name: spread(values) for name, values in shares.items()},
            "most_over_share_before": spread(before),
            "most_over_share_after_load": spread(after),
        },
        targets=[
            Target("seconds to plan, worst policy", max(map(max, took.values())), 10.0, "at_most"),
            Target("most rows over a replica's share, after load", max(after), UNEVEN_MAX, "at_most"),
        ],
        correctness=Correctness.of_all(parts),
        settings={"quick": quick, "replicas": replicas, "partitions": partitions, "sites": SITES},
        seed=seed,
    )


def _skewed(rng: random.Random, replicas: int, partitions: int) -> tuple[View, dict[PartitionId, str]]:
    """Returns (view with skewed loads, partition → site of its rows, for partitions with rows from another site)."""
    infos = [ReplicaInfo(f"r{number}", f"s{number % SITES}", "none") for number in range(replicas)]
    ids = [PartitionId(f"operator-{n % OPERATORS}", n // OPERATORS) for n in range(partitions)]
    # weights of 1/rank; ranks begin where the first partition has half a replica's share
    first = next(rank for rank in range(1, partitions) if rank * math.log(1 + partitions / rank) >= 2 * replicas)
    ranks = list(range(first, first + partitions))
    rng.shuffle(ranks)
    owners: Owners = {}
    seen: dict[PartitionId, Seen] = {}
    away: dict[PartitionId, str] = {}
    for number, (partition, rank) in enumerate(zip(ids, ranks, strict=True)):
        info, rows = infos[number % replicas], 1e6 / rank
        owners[partition] = info.name
        origin = f"s{rng.randrange(SITES)}" if rng.random() < AWAY else info.site
        if origin != info.site:
            away[partition] = origin
        seen[partition] = Seen(int(1e9 / rank), rows, 100 * rows, {origin: rows})
    return View(owners, infos, seen), away


def _place(infos: Sequence[ReplicaInfo], partitions: int) -> Owners:
    owners: Owners = {}
    for number in range(OPERATORS):
        name = f"operator-{number}"
        placed = propose(name, range(partitions // OPERATORS), infos)
        owners.update((PartitionId(name, partition), owner) for partition, owner in placed.items())
    return owners


def _timed(into: list[float], work: Any) -> Any:
    began = time.perf_counter()
    result = work()
    into.append(time.perf_counter() - began)
    return result


def _checked(owners: Mapping[PartitionId, str], infos: Sequence[ReplicaInfo], partitions: int) -> Correctness:
    """Checks that every partition has an existing owner, and that every replica has its share, rounded up or down."""
    known = {info.name for info in infos}
    counts = Counter(owners.values())
    least, most = partitions // len(infos), -(-partitions // len(infos))
    even = all(least <= counts[name] <= most for name in known)
    lost = partitions - sum(owner in known for owner in owners.values())
    return Correctness(lost, len(owners) - partitions if len(owners) > partitions else 0, 0, even)
