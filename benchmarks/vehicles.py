"""Vehicles that report their positions, and the operator that keeps these reports. Replicas import this module.

A region is a group of vehicles that travel together. Each region has one key and one partition. So the state of a
region can be at the edge site that is nearest to its vehicles, and move when another site is nearer. The same seed
gives the same rows.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from stateflow import Operator, state
from stateflow.partitioner import partition_of

#: diameter of the circle on which the sites are
SIDE_KM = 40.0
STEP_S = 1.0
SPEED_KM_S = (0.01, 0.03)


class Vehicles(Operator):
    """Keeps the last position, the mileage and the last message of every vehicle of a region.

    The messages determine the size of the state.
    """

    key = "region"
    output = "region long, vehicle long, readings long, km double"

    last = state.map(int, tuple[float, float])
    mileage = state.map(int, tuple[int, float])
    message = state.map(int, bytes)

    def process(self, row: Any, ctx: Any) -> Iterator[tuple[int, int, int, float]]:
        x, y = self.last.get(row.vehicle, (row.x, row.y))
        n, km = self.mileage.get(row.vehicle, (0, 0.0))
        self.last[row.vehicle] = row.x, row.y
        self.mileage[row.vehicle] = n, km = n + 1, km + math.hypot(row.x - x, row.y - y)
        if row.size:
            self.message[row.vehicle] = random.Random(row.vehicle * 1_000_003 + n).randbytes(row.size)
        yield row.region, row.vehicle, n, km


@dataclass(slots=True)
class Region:
    """Vehicles around a centre, which drives from site to site.

    Attributes:
        x, y: position of the centre, in km.
        to: number of the site to which the centre drives.
        vehicles: offset of each vehicle from the centre, in km.
    """

    number: int
    key: int
    x: float
    y: float
    to: int
    vehicles: list[tuple[float, float]] = field(default_factory=list)


class Fleet:
    """A fleet of regions, which drive between sites.

    Args:
        regions: number of regions.
        vehicles: number of vehicles in each region.
        sites: number of sites.
        speedup: seconds of driving in one step.
    """

    def __init__(self, seed: int, regions: int, vehicles: int, sites: int = 4, speedup: float = 1.0) -> None:
        self._rng = random.Random(seed)
        self._speedup = speedup
        angles = [2 * math.pi * site / sites for site in range(sites)]
        self.sites = [(SIDE_KM / 2 * math.cos(angle), SIDE_KM / 2 * math.sin(angle)) for angle in angles]
        self.regions = [self._region(number, regions, vehicles) for number in range(regions)]

    def _region(self, number: int, regions: int, vehicles: int) -> Region:
        key = next(key for key in range(1_000_000) if partition_of(key, regions) == number)
        x, y = self.sites[number % len(self.sites)]
        offsets = [(self._rng.gauss(0, 0.5), self._rng.gauss(0, 0.5)) for _ in range(vehicles)]
        return Region(number, key, x, y, (number + 1) % len(self.sites), offsets)

    def nearest(self, region: Region) -> int:
        """Returns the number of the site that is nearest to a region."""
        return min(range(len(self.sites)), key=lambda site: math.dist(self.sites[site], (region.x, region.y)))

    def drive(self) -> None:
        """Moves all regions by one step. A region that arrives at its site gets another random site to drive to."""
        for region in self.regions:
            x, y = self.sites[region.to]
            left = math.dist((x, y), (region.x, region.y))
            step = self._rng.uniform(*SPEED_KM_S) * STEP_S * self._speedup
            if left <= step:
                others = [site for site in range(len(self.sites)) if site != region.to]
                region.to = self._rng.choice(others)
            else:
                region.x += (x - region.x) / left * step
                region.y += (y - region.y) / left * step

    def readings(self, region: Region, vehicles: range, size: int) -> list[dict[str, Any]]:
        """Returns a row with the present position of each of these vehicles. ``size`` is the size of a new message in
        bytes; 0: no new message."""
        return [
            {
                "region": region.key,
                "vehicle": region.number * 1_000_000 + vehicle,
                "x": round(region.x + region.vehicles[vehicle][0], 6),
                "y": round(region.y + region.vehicles[vehicle][1], 6),
                "size": size,
            }
            for vehicle in vehicles
        ]
