"""Computes the reference results of Nexmark Q3, Q4, Q5 and Q8 from the whole list of events, in plain Python.

The module shares no code with the operators. The function of each query returns a Counter of output rows as tuples.
Times are in microseconds.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import Any

from benchmarks.nexmark_events import Auction, Bid, Event, Person


def q3(events: Sequence[Event]) -> Counter[Any]:
    local = {e.id: e for e in events if isinstance(e, Person) and e.state in ("OR", "ID", "CA")}
    return Counter(
        (e.seller, local[e.seller].name, local[e.seller].city, local[e.seller].state, e.id)
        for e in events
        if isinstance(e, Auction) and e.category == 10 and e.seller in local
    )


def q3_waiting(events: Sequence[Event]) -> Counter[Any]:
    """Returns (seller, auction) for each auction that Q3 keeps because its seller is not local."""
    local = {e.id for e in events if isinstance(e, Person) and e.state in ("OR", "ID", "CA")}
    return Counter(
        (e.seller, e.id) for e in events if isinstance(e, Auction) and e.category == 10 and e.seller not in local
    )


def q4(events: Sequence[Event]) -> Counter[Any]:
    """Returns (auction, category, price) for every auction that was sold."""
    auctions = {e.id: e for e in events if isinstance(e, Auction)}
    best: dict[int, int] = {}
    for bid in events:
        if isinstance(bid, Bid):
            auction = auctions[bid.auction]
            if bid.price >= auction.reserve and bid.at_us < auction.expires_us:
                best[bid.auction] = max(best.get(bid.auction, 0), bid.price)
    return Counter((id_, auctions[id_].category, price) for id_, price in best.items())


def q4_averages(events: Sequence[Event]) -> dict[int, tuple[int, int]]:
    """Returns category → (number of auctions that were sold, sum of their prices)."""
    found: dict[int, tuple[int, int]] = {}
    for (_, category, price), times in q4(events).items():
        n, total = found.get(category, (0, 0))
        found[category] = n + times, total + price * times
    return found


def q4_emitted(closed: Sequence[tuple[int, int]]) -> Counter[Any]:
    """Returns (category, number of closed auctions, average of their prices) after each auction of its category.

    Args:
        closed: (category, price) of each closed auction, in the order in which they closed.
    """
    counts: Counter[int] = Counter()
    sums: Counter[int] = Counter()
    emitted: Counter[Any] = Counter()
    for category, price in closed:
        counts[category] += 1
        sums[category] += price
        emitted[category, counts[category], sums[category] / counts[category]] += 1
    return emitted


def q5(events: Sequence[Event], size_us: int, every_us: int) -> Counter[Any]:
    """Returns (end of the window, auction, bids) for the auctions with the most bids in each window."""
    windows: dict[int, Counter[int]] = defaultdict(Counter)
    for bid in events:
        if isinstance(bid, Bid):
            start = bid.at_us // every_us * every_us
            while start > bid.at_us - size_us:
                windows[start + size_us][bid.auction] += 1
                start -= every_us
    return Counter(
        (end, auction, bids)
        for end, counts in windows.items()
        for auction, bids in counts.items()
        if bids == max(counts.values())
    )


def q8(events: Sequence[Event], size_us: int) -> Counter[Any]:
    """Returns (person, name, start of the window, auctions opened in the window) for each new user."""
    opened = Counter((e.seller, e.at_us // size_us) for e in events if isinstance(e, Auction))
    return Counter(
        (e.id, e.name, e.at_us // size_us * size_us, opened[e.id, e.at_us // size_us])
        for e in events
        if isinstance(e, Person) and opened[e.id, e.at_us // size_us]
    )
