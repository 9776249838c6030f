"""Links between sites: their measured round trips and bandwidths, and which to measure next. Times are monotonic
seconds. No I/O.

Round trips are measured where they may decide something: between the sites that rows come from, and the sites where
their partitions are, or would be better. With 400 sites, these are few of 160,000 pairs. Bandwidths are taken from
moves.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Mapping

from reconfig.view import ORIGIN_ROWS_MIN, Pair, View

#: seconds after which a pair is measured again
RTT_ASKED_S = 60.0
#: seconds for which a measured round trip counts, so that one measurement may fail
RTT_KEPT_S = 150.0
#: the most pairs looked at, those that matter most
PAIRS_MAX = 2048
#: the most pairs asked for in one look, and the most asked of one site
ASKED_MAX = 256
ASKED_OF_SITE_MAX = 32
#: a link's bandwidth is that of the fastest of its last moves, as moves side by side get only a part of it each
MOVES_KEPT = 8
MOVES_KEPT_S = 3600.0


class Links:
    def __init__(self) -> None:
        self._asked_at: dict[Pair, float] = {}
        self._rtts: dict[Pair, tuple[float, float]] = {}  # (measured at, milliseconds)
        self._moves: dict[Pair, deque[tuple[float, float]]] = {}  # by (from, to): (ended at, bytes a second)

    def moved(self, now_s: float, source: str, target: str, bytes_per_s: float) -> None:
        """Notes the bandwidth that a move has shown.

        Args:
            source, target: sites.
            bytes_per_s: 0: too few bytes crossed to tell.
        """
        if source != target and bytes_per_s > 0:
            self._moves.setdefault((source, target), deque(maxlen=MOVES_KEPT)).append((now_s, bytes_per_s))

    def bytes_per_s(self, now_s: float) -> dict[Pair, float]:
        """Returns bandwidths by (from, to)."""
        found = {pair: [rate for at, rate in moves if now_s - at < MOVES_KEPT_S] for pair, moves in self._moves.items()}
        return {pair: max(rates) for pair, rates in found.items() if rates}

    def due(self, now_s: float, wanted: Iterable[Pair]) -> dict[str, list[str]]:
        """Returns, for each site to ask now, the other sites to which it should measure round trips. The pairs count as
        asked, whether the site answers or not."""
        self._asked_at = {pair: at for pair, at in self._asked_at.items() if now_s - at < RTT_ASKED_S}
        self._rtts = {pair: seen for pair, seen in self._rtts.items() if now_s - seen[0] < RTT_KEPT_S}
        found: dict[str, list[str]] = {}
        count = 0
        for pair in wanted:
            if count >= ASKED_MAX:
                break
            others = found.setdefault(pair[0], [])
            if pair not in self._asked_at and len(others) < ASKED_OF_SITE_MAX:
                self._asked_at[pair] = now_s
                others.append(pair[1])
                count += 1
        return {site: others for site, others in found.items() if others}

    def measured(self, now_s: float, site: str, rtts_ms: Mapping[str, float]) -> None:
        """Notes round trips that a site has measured.

        Args:
            rtts_ms: round trips by other site; a site that did not answer is missing.
        """
        for other, rtt_ms in rtts_ms.items():
            self._rtts[site, other] = now_s, rtt_ms

    def rtts_ms(self, now_s: float) -> dict[Pair, float]:
        """Returns round trips by pair of sites, each pair once, in either order."""
        return {pair: rtt_ms for pair, (at, rtt_ms) in self._rtts.items() if now_s - at < RTT_KEPT_S}


def pairs_that_matter(view: View) -> list[Pair]:
    """Returns the pairs of sites whose round trips may decide a move, those with most rows first. Both sites have
    replicas, and each pair comes once. Rows come from the first site of a pair."""
    sites_of = {info.name: info.site for info in view.replicas}
    there, able = set(sites_of.values()), {info.site for info in view.takers()}
    groups: Counter[tuple[tuple[str, ...], tuple[str, ...], str]] = Counter()
    for partition, seen in view.seen.items():
        here = sites_of.get(view.owners.get(partition, ""))
        if here is None or not seen.origins or (len(seen.origins) == 1 and here in seen.origins):
            continue  # most partitions, once placement has settled
        rows = sum(seen.origins.values())
        if rows >= ORIGIN_ROWS_MIN:
            confined = tuple(view.confined.get(partition.operator, ()))
            groups[confined, tuple(sorted(seen.origins)), here] += round(rows) + 1
    pairs: dict[Pair, None] = {}
    for (confined, origins, here), _ in groups.most_common():
        known = [site for site in origins if site in there]
        others = [here, *known]
        able_here = sorted(able.intersection(confined) if confined else able)
        if len(origins) > 1 or not set(origins).intersection(able_here):  # a site between them may be nearest
            others += able_here
        for origin in known:
            for other in others:
                if origin != other and (other, origin) not in pairs:
                    pairs[origin, other] = None
        if len(pairs) >= PAIRS_MAX:
            break
    return list(pairs)[:PAIRS_MAX]
