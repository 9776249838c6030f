"""M5: pauses of moves over shaped links. Vehicles drive between edge sites, and the state of their regions follows.

Each site is a network namespace with a shaped link. The controller and the senders are outside of the namespaces, half
a round trip away from every site. If the machine cannot shape links, only the plain link is measured, and the record
says why. The pause of a move is compared with ½·RTT + bytes sent in the pause / bandwidth + 10 ms.
"""

from __future__ import annotations

import random
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from benchmarks.load import Latencies, Load, Source, summary
from benchmarks.netns import Link, SpacedCluster, network, probe
from benchmarks.record import Correctness, Record, Target, spread
from benchmarks.vehicles import Fleet, Vehicles
from stateflow.client import MoveReport

SITES = 4
REGIONS = 8
FIXED_MS = 10.0
OPERATOR = "Vehicles"
REPORTING = 20  # vehicles in a batch
INTERVAL_S = 0.05
SPEEDUP = 200.0  # a crossing takes half a minute
LINKS = [Link(rtt, mbit) for rtt in (0.0, 10.0, 40.0, 100.0) for mbit in (1_000.0, 100.0, 20.0)]
LINKS_QUICK = [Link(0.0, 1_000.0), Link(40.0, 100.0), Link(100.0, 20.0)]
PLAIN = Link()


@dataclass(frozen=True, slots=True)
class Size:
    """The size of a run.

    Attributes:
        vehicles: number of vehicles in each region.
        message: bytes of state for each vehicle.
        seconds: duration of the measurement of each link.
    """

    vehicles: int
    message: int
    seconds: float


SIZE, SIZE_QUICK = Size(5_000, 2_000, 60.0), Size(100, 1_000, 6.0)


def run(experiment: str, *, quick: bool, seed: int, only: Sequence[str] | None = None) -> Record:
    size, links = (SIZE_QUICK, LINKS_QUICK) if quick else (SIZE, LINKS)
    why = probe(links[-1])
    nothing = probe(PLAIN)
    if why:
        links = [] if nothing else [PLAIN]
    figures: dict[str, Any] = {"links": {}}
    parts: list[Correctness] = []
    factors: list[float] = []
    for number, link in enumerate(links):
        found, correct = measure(link, size, seed + number)
        figures["links"][str(link)] = found
        parts.append(correct)
        factors += [] if link.plain else found["pause_over_model"]["values"]
        _say(f"  {link}: {len(found['moves'])} moves, pause {found['pause_ms']['median']} ms, {correct.to_json()}")
    worst = max(factors) if factors else None
    return Record(
        experiment=experiment,
        figures=figures,
        targets=[Target("pause / (½·RTT + dirty/bandwidth + 10 ms), worst", worst, 1.5, "at_most")],
        correctness=Correctness.of_all(parts),
        settings={
            "quick": quick,
            "sites": SITES,
            "regions": REGIONS,
            "vehicles_per_region": size.vehicles,
            "bytes_per_vehicle": size.message,
            "seconds_per_link": size.seconds,
            "rows_per_batch": REPORTING,
            "speedup": SPEEDUP,
        },
        seed=seed,
        skipped=f"{'the shaped links' if links else 'all of it'}: {why}" if why else "",
    )


def measure(link: Link, size: Size, seed: int) -> tuple[dict[str, Any], Correctness]:
    fleet = Fleet(seed, REGIONS, size.vehicles, SITES, SPEEDUP)
    carried: dict[str, Any] = {}
    interval_s = INTERVAL_S + link.rtt_ms / 1e3  # a source sends one batch at a time, and must not fall behind
    with rig(link, carried) as local:
        truth = Truth()
        sources = [
            Source(local.stream(OPERATOR, f"region-{r.number}"), _reporter(fleet, r.number, size), interval_s)
            for r in fleet.regions
        ]
        for region, source in zip(fleet.regions, sources, strict=True):  # every vehicle once, with its message
            for start in range(0, size.vehicles, 500):
                part = range(start, min(start + 500, size.vehicles))
                rows = fleet.readings(region, part, size.message)
                truth.apply(rows, source.stream.send(rows))
        load = Load(sources, seed)
        load.truth = truth  # type: ignore[assignment]
        with load:
            moves = list(_follow(fleet, load, local, size.seconds))
        equal = truth.equals(local)
        whole = Latencies()
        for source in sources:
            whole.at_s += source.latencies.at_s
            whole.took_s += source.latencies.took_s
        pauses = [move.pause_ms for move in moves]
        figures = {
            "batches_per_s_and_region": round(1 / interval_s, 1),
            "pause_ms": spread(pauses),
            "pause_over_model": spread([move.pause_ms / model_ms(move, link) for move in moves]),
            "latency_ms": summary(whole.between(load.began_s, load.began_s + size.seconds)),
            "timeline": whole.timeline(load.began_s),
            "moves": [
                {
                    "partition": move.partition,
                    "to": move.target,
                    "pause_ms": move.pause_ms,
                    "model_ms": model_ms(move, link),
                    "predicted_ms": move.predicted_pause_ms,
                    "lag_bytes": move.lag_bytes,
                    "bytes_warm": move.bytes_warm,
                    "bytes_delta": move.bytes_delta,
                }
                for move in moves
            ],
        }
    return figures | {"carried": carried}, Correctness(truth.lost, truth.duplicated, 0, equal)


def model_ms(move: MoveReport, link: Link) -> float:
    """Returns the predicted pause of a move, in ms.

    The bytes sent in the pause are those that the target still lacked when the source was fenced.
    """
    crossing_ms = move.lag_bytes * 8 / (link.mbit * 1e3) if link.mbit else 0.0
    return link.rtt_ms / 2 + crossing_ms + FIXED_MS


@contextmanager
def rig(link: Link, carried: dict[str, Any]) -> Iterator[SpacedCluster]:
    sites = [f"edge{number}" for number in range(SITES)]
    with (
        tempfile.TemporaryDirectory(prefix="stateflow-m5-") as folder,
        network(sites, link, carried) as spaces,
        SpacedCluster(Vehicles, spaces=spaces, partitions=REGIONS, data_dir=folder, checkpoint_interval_s=0) as local,
    ):
        yield local


def _follow(fleet: Fleet, load: Load, local: SpacedCluster, seconds: float) -> Iterator[MoveReport]:
    """Drives the fleet for ``seconds``. When another site is nearest to a region, moves the region's state there.

    Yields the report of each move. Raises RuntimeError if a move does not complete.
    """
    at = {number: owner.rpartition("-")[0] for number, owner in enumerate(local.cluster.status().operators[0].owners)}
    for _ in range(round(seconds)):
        load.wait(1.0)
        fleet.drive()
        for region in fleet.regions:
            site = f"edge{fleet.nearest(region)}"
            if at[region.number] != site:
                report = local.migrate(OPERATOR, [region.number], site).wait()
                if report.state != "COMPLETED":
                    raise RuntimeError(f"a move did not complete: {report.moves[0].error}")
                at[region.number] = site
                yield report.moves[0]


def _reporter(fleet: Fleet, number: int, size: Size) -> Callable[[random.Random], list[dict[str, Any]]]:
    """Returns a function that returns the readings of some vehicles of a region. The first of them has a new
    message."""

    def pick(rng: random.Random) -> list[dict[str, Any]]:
        first = rng.randrange(max(1, size.vehicles - REPORTING))
        region = fleet.regions[number]
        one, rest = range(first, first + 1), range(first + 1, min(first + REPORTING, size.vehicles))
        return fleet.readings(region, one, size.message) + fleet.readings(region, rest, 0)

    return pick


class Truth:
    """The expected outputs and state of the operator, computed without the framework."""

    def __init__(self) -> None:
        self.last: dict[int, tuple[float, float]] = {}
        self.mileage: dict[int, tuple[int, float]] = {}
        self.lost = self.duplicated = 0

    def apply(self, rows: Sequence[dict[str, Any]], outputs: Sequence[dict[str, Any]] | None) -> None:
        expected = []
        for row in rows:
            here, vehicle = (row["x"], row["y"]), row["vehicle"]
            before = self.last.get(vehicle, here)
            n, km = self.mileage.get(vehicle, (0, 0.0))
            # the square root of squares may differ from hypot in the last digit, which the comparison allows
            way = ((here[0] - before[0]) ** 2 + (here[1] - before[1]) ** 2) ** 0.5
            self.last[vehicle], self.mileage[vehicle] = here, (n + 1, km + way)
            expected.append((vehicle, n + 1))
        given = [] if outputs is None else [(output["vehicle"], output["readings"]) for output in outputs]
        if outputs is not None:
            self.lost += len(set(expected) - set(given))
            self.duplicated += len(given) - len(set(given)) + len(set(given) - set(expected))

    def equals(self, local: SpacedCluster) -> bool:
        read = local.cluster.read_state
        last = {row["map_key"]: tuple(row["value"].values()) for row in read(OPERATOR, "last").to_pylist()}
        found = {row["map_key"]: tuple(row["value"].values()) for row in read(OPERATOR, "mileage").to_pylist()}
        if last != self.last or found.keys() != self.mileage.keys():
            return False
        return all(
            n == found[vehicle][0] and abs(km - found[vehicle][1]) < 1e-6 for vehicle, (n, km) in self.mileage.items()
        )


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
