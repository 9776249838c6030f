"""Generates the Nexmark stream with the proportions of Apache Beam's generator. The same seed gives the same events.

Among 50 events, 1 is a person, 3 are auctions, and 46 are bids. Half of the bids are for a hot auction, and three
quarters are made by a hot bidder. Three quarters of the auctions are opened by a hot seller. All others spread over the
newest persons and auctions. Events are in order of time, at a fixed distance.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass

PROPORTION = 50
PERSONS, AUCTIONS, BIDS = 1, 3, 46
FIRST_ID = 1_000
FIRST_CATEGORY, CATEGORIES = 10, 5
HOT_AUCTION_SHARE, HOT_BIDDER_SHARE, HOT_SELLER_SHARE = 1 / 2, 3 / 4, 3 / 4
HOT_EVERY = 100  # events of their kind after which the hot auction, seller and bidder change
ACTIVE_PERSONS, IN_FLIGHT_AUCTIONS = 1_000, 100
STEP_US = 100  # 10,000 events in a second of event time
BEGIN_US = 1_436_918_400_000_000  # 2015-07-15, where Beam's begins
STATES = ("AZ", "CA", "ID", "OR", "WA", "WY")
CITIES = (
    "Phoenix",
    "Los Angeles",
    "San Francisco",
    "Boise",
    "Portland",
    "Bend",
    "Redmond",
    "Seattle",
    "Kent",
    "Cheyenne",
)
FIRST_NAMES = ("Peter", "Paul", "Luke", "John", "Saul", "Vicky", "Kate", "Julie", "Sarah", "Deiter", "Walter")
LAST_NAMES = ("Shultz", "Abrams", "Spencer", "White", "Bartels", "Walton", "Smith", "Jones", "Noris")


@dataclass(frozen=True, slots=True)
class Person:
    at_us: int
    id: int
    name: str
    city: str
    state: str


@dataclass(frozen=True, slots=True)
class Auction:
    at_us: int
    id: int
    seller: int
    category: int
    reserve: int  # cents
    expires_us: int


@dataclass(frozen=True, slots=True)
class Bid:
    at_us: int
    auction: int
    bidder: int
    price: int  # cents


Event = Person | Auction | Bid


def events(count: int, seed: int) -> Iterator[Event]:
    rng = random.Random(seed)
    persons = auctions = 0  # how many so far
    for number in range(count):
        at_us = BEGIN_US + number * STEP_US
        place = number % PROPORTION
        if place < PERSONS:
            name = f"{rng.choice(FIRST_NAMES)} {rng.choice(LAST_NAMES)}"
            yield Person(at_us, FIRST_ID + persons, name, rng.choice(CITIES), rng.choice(STATES))
            persons += 1
        elif place < PERSONS + AUCTIONS:
            yield _auction(rng, at_us, auctions, persons)
            auctions += 1
        else:
            hot = rng.random() < HOT_AUCTION_SHARE
            auction = _hot(auctions) if hot else auctions - 1 - rng.randrange(min(auctions, IN_FLIGHT_AUCTIONS))
            bidder = _person(rng, persons, HOT_BIDDER_SHARE, second=True)
            yield Bid(at_us, FIRST_ID + auction, bidder, _price(rng))


def _auction(rng: random.Random, at_us: int, number: int, persons: int) -> Auction:
    # durations that keep about IN_FLIGHT_AUCTIONS auctions open at a time
    horizon_us = IN_FLIGHT_AUCTIONS * PROPORTION // AUCTIONS * STEP_US
    return Auction(
        at_us=at_us,
        id=FIRST_ID + number,
        seller=_person(rng, persons, HOT_SELLER_SHARE, second=False),
        category=FIRST_CATEGORY + rng.randrange(CATEGORIES),
        reserve=_price(rng) // 10,
        expires_us=at_us + 1 + rng.randrange(2 * horizon_us),
    )


def _hot(count: int) -> int:
    """Returns the number of the hot one among ``count`` persons or auctions. Another one becomes hot after each
    ``HOT_EVERY``."""
    return (count - 1) // HOT_EVERY * HOT_EVERY


def _person(rng: random.Random, persons: int, hot_share: float, *, second: bool) -> int:
    """Returns the id of a random person, which is the hot one with probability ``hot_share``.

    ``second`` picks another hot person, so that the hot bidder and the hot seller differ if there are two persons.
    """
    if rng.random() < hot_share:
        return FIRST_ID + min(_hot(persons) + second, persons - 1)
    return FIRST_ID + persons - 1 - rng.randrange(min(persons, ACTIVE_PERSONS))


def _price(rng: random.Random) -> int:
    return round(100 * 10 ** (rng.random() * 6))
