"""Compare two files of results, figure by figure.

If the ranges of two figures overlap, the verdict is "no difference shown". A figure that was measured once has no
range, so its noise is unknown. A figure or an experiment that only one file has is listed. If a record has a failure or
a wrong result, a warning says so, and the exit status is 1.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.results import Spread, faults, newest, read, spreads

NO_DIFFERENCE = "no difference shown"
NOISE_UNKNOWN = "measured once: noise unknown"


@dataclass(frozen=True, slots=True)
class Difference:
    experiment: str
    figure: str
    before: Spread
    after: Spread

    @property
    def ratio(self) -> float | None:
        return self.after.median / self.before.median if self.before.median else None

    @property
    def verdict(self) -> str:
        if self.before.runs < 2 or self.after.runs < 2:
            return NOISE_UNKNOWN
        if self.before.least <= self.after.most and self.after.least <= self.before.most:
            return NO_DIFFERENCE
        return "higher" if self.after.median > self.before.median else "lower"


def differences(before: dict[str, dict[str, Any]], after: dict[str, dict[str, Any]]) -> Iterator[Difference]:
    """Yields the difference of each figure that has a range in both results."""
    for experiment in before.keys() & after.keys():
        old = {spread.path: spread for spread in spreads(before[experiment]["figures"])}
        for spread in spreads(after[experiment]["figures"]):
            if spread.path in old:
                yield Difference(experiment, spread.name, old[spread.path], spread)


def one_sided(before: dict[str, dict[str, Any]], after: dict[str, dict[str, Any]]) -> Iterator[tuple[str, str, bool]]:
    """Yields (experiment, figure, whether it is in ``before``) for each figure that only one of the results has.

    For an experiment that only one of them has, the figure is empty.
    """
    for experiment in sorted(before.keys() | after.keys()):
        if experiment not in before or experiment not in after:
            yield experiment, "", experiment in before
            continue
        old, new = ({spread.name for spread in spreads(records[experiment]["figures"])} for records in (before, after))
        for figure in sorted(old ^ new):
            yield experiment, figure, figure in old


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks compare", description=__doc__)
    parser.add_argument("before", type=Path, metavar="A")
    parser.add_argument("after", type=Path, metavar="B")
    parser.add_argument("--json", action="store_true", help="one JSON object on standard output")
    options = parser.parse_args(arguments)
    before, after = newest(read(options.before)), newest(read(options.after))
    found = sorted(differences(before, after), key=lambda d: (d.experiment, d.figure))
    unlike = _unlike(before, after)
    unsound = [*_unsound(before, options.before), *_unsound(after, options.after)]
    alone = [
        {"experiment": experiment, "figure": figure, "file": str(options.before if is_before else options.after)}
        for experiment, figure, is_before in one_sided(before, after)
    ]
    if options.json:
        said = [asdict(d) | {"ratio": d.ratio, "verdict": d.verdict} for d in found]
        print(json.dumps({"differences": said, "only_in_one": alone, "warnings": [*unsound, *unlike]}))
        return 1 if unsound else 0
    for line in unsound:
        print(f"not sound: {line}")
    for line in unlike:
        print(f"not the same: {line}")
    for each in found:
        change = "" if each.ratio is None else f"×{each.ratio:.2f}"
        print(
            f"{each.experiment:5} {each.figure:50.50} {_range(each.before)} → {_range(each.after)} {change:>7}  ",
            end="",
        )
        print(each.verdict)
    for one in alone:
        print(f"{one['experiment']:5} {one['figure']:50.50} only in {one['file']}")
    return 1 if unsound else 0


def _unsound(records: dict[str, dict[str, Any]], file: Path) -> list[str]:
    """Returns a line for each failure and wrong result in a file's records."""
    return [f"{experiment} in {file}: {line}" for experiment, record in records.items() for line in faults(record)]


def _unlike(before: dict[str, dict[str, Any]], after: dict[str, dict[str, Any]]) -> list[str]:
    """Returns a line for each experiment whose settings differ. The two results of such an experiment are not
    comparable."""
    lines = []
    for experiment in sorted(before.keys() & after.keys()):
        old, new = before[experiment]["settings"], after[experiment]["settings"]
        names = sorted(
            name for name in old.keys() | new.keys() if name != "load_1min_at_end" and old.get(name) != new.get(name)
        )
        if names:
            lines.append(f"{experiment}: settings {', '.join(names)}")
    return lines


def _range(spread: Spread) -> str:
    return f"{spread.median:12,.4g} [{spread.least:,.4g}–{spread.most:,.4g}]"
