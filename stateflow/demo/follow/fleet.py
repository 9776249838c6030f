"""Simulates convoys that drive between three edge sites, and the rows that they send. The same seed gives the same
rows."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, count
from random import Random  # noqa: TID251 - the type; callers pass a seeded one
from typing import Any, Final

from stateflow.partitioner import partition_of

#: metres: corners of a triangle whose sides are 20 km long
CORNERS: Final = {"north": (0.0, 11_547.0), "east": (10_000.0, -5_774.0), "west": (-10_000.0, -5_774.0)}
SITES: Final = tuple(CORNERS)
#: number of times that each convoy changes its site; all legs of a convoy take the same time
CHANGES: Final = 2
#: time over which the convoys' changes of site are spread, as a share of a leg
SPREAD: Final = 0.4
TELEMETRY_S: Final = 0.5
READINGS_S: Final = 0.2
#: number of vehicles in one batch of readings
READING: Final = 5
COLUMNS: Final = "seq long, vehicle string, way string, site string, x long, y long, metres long"
TELEMETRY, GATEWAY = "telemetry", "gateway"


@dataclass(frozen=True, slots=True)
class Told:
    """Rows that are sent at the same time. ``site`` is the site nearest to the convoy; empty: the rows are those of all
    convoys."""

    at_s: float
    site: str
    rows: list[dict[str, Any]]


@dataclass(frozen=True, slots=True)
class Change:
    """A change of the site that is nearest to a convoy. A convoy's first site is a change at ``at_s`` 0."""

    at_s: float
    convoy: int
    site: str


@dataclass(frozen=True, slots=True)
class Convoy:
    """A convoy; there is one for each partition.

    Attributes:
        stops: sites in the order in which the convoy drives to them.
        leg_s: seconds for each leg.
        late_s: seconds by which the convoy is behind the fleet's mean; negative: ahead of it.
    """

    number: int
    vehicles: tuple[str, ...]
    stops: tuple[str, ...]
    leg_s: float
    late_s: float

    def place(self, at_s: float) -> tuple[float, float]:
        """Returns the coordinates of the convoy, in metres. When a leg ends, the convoy is halfway between two
        stops."""
        driven = min(max((at_s - self.late_s) / self.leg_s - 0.5, 0.0), len(self.stops) - 1.0)
        stop = min(int(driven), len(self.stops) - 2)
        (x, y), (to_x, to_y) = CORNERS[self.stops[stop]], CORNERS[self.stops[stop + 1]]
        part = driven - stop
        return x + (to_x - x) * part, y + (to_y - y) * part

    def site(self, at_s: float) -> str:
        place = self.place(at_s)
        return min(SITES, key=lambda site: math.dist(CORNERS[site], place))


class Fleet:
    """A fleet of convoys, and all rows that its vehicles send.

    Args:
        convoys: number of convoys.
        vehicles: number of vehicles in each convoy.
        seconds: duration of the drive.
    """

    def __init__(self, chance: Random, convoys: int, vehicles: int, seconds: float) -> None:
        self._chance = chance
        self.seconds = seconds
        leg_s = seconds / (CHANGES + 1)
        names = _names(convoys, vehicles)
        self.convoys = [
            Convoy(
                number,
                names[number],
                tuple(SITES[(number + (-stop if number % 2 else stop)) % len(SITES)] for stop in range(CHANGES + 1)),
                leg_s,
                (number / max(1, convoys - 1) - 0.5) * SPREAD * leg_s,
            )
            for number in range(convoys)
        ]
        self._numbers = count()
        #: rows of all vehicles at each time, for Spark
        self.telemetry = [
            Told(at_s, "", list(chain.from_iterable(self._rows(each, at_s, TELEMETRY) for each in self.convoys)))
            for at_s in _moments(seconds, TELEMETRY_S)
        ]
        #: for each convoy, batches with the rows of some of its vehicles, for the nearest gateway
        self.readings = [list(self._readings(convoy)) for convoy in self.convoys]

    @property
    def rows(self) -> Iterator[dict[str, Any]]:
        """All rows that are sent."""
        return chain.from_iterable(told.rows for told in chain(self.telemetry, *self.readings))

    def changes(self) -> list[Change]:
        """Returns the changes of site that occur in the readings: convoy by convoy, in order of time."""
        found: list[Change] = []
        for convoy, readings in zip(self.convoys, self.readings, strict=True):
            site = convoy.site(0.0)
            found.append(Change(0.0, convoy.number, site))
            for told in readings:
                if told.site != site:
                    site = told.site
                    found.append(Change(told.at_s, convoy.number, site))
        return found

    def _readings(self, convoy: Convoy) -> Iterator[Told]:
        shift = READINGS_S * convoy.number / len(self.convoys)  # so that convoys do not all send at once
        for number, at_s in enumerate(_moments(self.seconds - shift, READINGS_S)):
            first = number * READING % len(convoy.vehicles)
            these = [*convoy.vehicles, *convoy.vehicles][first : first + READING]
            yield Told(at_s + shift, convoy.site(at_s + shift), list(self._rows(convoy, at_s + shift, GATEWAY, these)))

    def _rows(
        self, convoy: Convoy, at_s: float, way: str, vehicles: Sequence[str] | None = None
    ) -> Iterator[dict[str, Any]]:
        (x, y), site = convoy.place(at_s), convoy.site(at_s)
        for vehicle in convoy.vehicles if vehicles is None else vehicles:
            yield {
                "seq": next(self._numbers),
                "vehicle": vehicle,
                "way": way,
                "site": site,
                "x": round(x + self._chance.gauss(0, 200)),
                "y": round(y + self._chance.gauss(0, 200)),
                "metres": self._chance.randint(2, 40),
            }


def _names(convoys: int, vehicles: int) -> list[tuple[str, ...]]:
    """Returns the names of each convoy's vehicles. The vehicles of a convoy share a partition, so their state moves
    together."""
    found: list[list[str]] = [[] for _ in range(convoys)]
    for number in count(1):
        name = f"v{number:03}"
        mine = found[partition_of(name, convoys)]
        if len(mine) < vehicles:
            mine.append(name)
        elif all(len(each) == vehicles for each in found):
            break
    return [tuple(each) for each in found]


def _moments(seconds: float, apart_s: float) -> list[float]:
    return [round(number * apart_s, 6) for number in range(math.ceil(round(seconds / apart_s, 6)))]
