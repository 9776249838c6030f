"""Reads and writes the file of kept results, which has one JSON object a line, oldest first."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from benchmarks.record import REPOSITORY, Record, is_sound

DIRECTORY = REPOSITORY / "bench-out"
RESULTS = DIRECTORY / "results.jsonl"


def keep(name: str, record: Record, file: Path = RESULTS) -> None:
    """Appends a record to a file, with the name of its benchmark and the present time."""
    file.parent.mkdir(parents=True, exist_ok=True)
    line = {"benchmark": name, "at": datetime.now(UTC).isoformat(timespec="seconds"), **record.to_json()}
    with file.open("a") as out:
        out.write(json.dumps(line, allow_nan=False) + "\n")


def read(file: Path) -> list[dict[str, Any]]:
    """Returns all records of a file, oldest first. Raises SystemExit with an error line if the file is missing."""
    if not file.is_file():
        raise SystemExit(f"no_results: {file} does not exist: run `python -m benchmarks NAME --keep` first")
    lines = [line for line in file.read_text().splitlines() if line.strip()]
    return [json.loads(line) for line in lines]


def newest(records: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Returns experiment → its last record, sorted by experiment."""
    return dict(sorted({record["experiment"]: record for record in records}.items()))


def faults(record: Mapping[str, Any]) -> list[str]:
    """Returns a line for each failure of a kept record, and one if its results are wrong or were not checked."""
    found = record["correctness"]
    nothing_ran = "skipped" in record and all(value is None for value in found.values())
    return [*record["failures"], *([] if nothing_ran or is_sound(found) else [correctness_of(record)])]


def correctness_of(record: Mapping[str, Any]) -> str:
    """Returns the correctness of a kept record as text."""
    found = record["correctness"]
    counts = {name: "unknown" if found[name] is None else found[name] for name in ("lost", "duplicated", "late")}
    counts |= dict.fromkeys(counts.keys() & set(found.get("inapplicable", ())), "not applicable")
    state = {True: "state equal", False: "STATE DIFFERENT", None: "state not compared"}[found["state_equal"]]
    return ", ".join([*(f"{name} {count}" for name, count in counts.items()), state])


@dataclass(frozen=True, slots=True)
class Spread:
    """A figure that was measured several times. ``path`` has the keys that lead to it in the record's figures."""

    path: tuple[str, ...]
    median: float
    least: float
    most: float
    runs: int

    @property
    def name(self) -> str:
        return " · ".join(self.path)


def spreads(figures: Mapping[str, Any], path: tuple[str, ...] = ()) -> Iterator[Spread]:
    """Yields each part of ``figures`` that :func:`benchmarks.record.spread` returned and that has values."""
    if {"median", "min", "max"} <= figures.keys():
        if figures["median"] is not None:
            runs = len(figures.get("values") or ()) or 1
            yield Spread(path, figures["median"], figures["min"], figures["max"], runs)
        return
    for name, value in figures.items():
        if isinstance(value, Mapping):
            yield from spreads(value, (*path, str(name)))


def series(figures: Any, key: str, path: tuple[str, ...] = ()) -> Iterator[tuple[str, list[Any]]]:
    """Yields (name of its place, list) for each non-empty list in ``figures`` whose key begins with ``key``.

    Such lists are the ``timeline`` and the ``ccdf`` of a load.
    """
    if isinstance(figures, Mapping):
        for name, value in figures.items():
            if str(name).startswith(key) and isinstance(value, list) and value:
                yield " · ".join(path) or str(name), value
            else:
                yield from series(value, key, (*path, str(name)))
    elif isinstance(figures, list):
        for number, value in enumerate(figures):
            if isinstance(value, Mapping):
                kind = str(value.get("strategy", ""))
                name = f"{kind}, run {number + 1}" if kind and kind not in path else f"run {number + 1}"
                yield from series(value, key, (*path, name))
