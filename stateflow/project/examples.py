"""The examples that ``stateflow init --example`` writes. Their files are in ``stateflow/examples``, a folder for each,
just as they are written; docs/examples has a page for each."""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from pathlib import Path

import stateflow
from stateflow.errors import InvalidArgument

HERE = Path(stateflow.__file__).parent / "examples"


@dataclass(frozen=True, slots=True)
class Example:
    """An example. ``shows``: what it shows, in a few words. ``uses``: states and other features of operators. ``run``:
    the command to begin with, in the project's directory. ``files``: all files of the folder."""

    name: str
    shows: str
    uses: str
    run: str
    files: tuple[str, ...]

    @property
    def folder(self) -> Path:
        return HERE / self.name


_ONCE = "stateflow run pipeline.yml --once"
EXAMPLES = (
    Example(
        "flights",
        "real flights as a Spark stream, with state for each aircraft",
        "counter, map, set",
        "python replay.py",
        ("README.md", "flights.py", "replay.py", "test_flights.py"),
    ),
    Example(
        "fraud",
        "scores for payments; timers forget old state",
        "map, timers, value, counter",
        _ONCE,
        ("README.md", "fraud.py", "payments.csv", "pipeline.yml", "test_fraud.py"),
    ),
    Example(
        "sessions",
        "visits from clicks, and clicks that arrive too late",
        "session windows, counter, set, side output",
        _ONCE,
        (
            "README.md",
            "clicks-1.csv",
            "clicks-2.csv",
            "clicks-3.csv",
            "pipeline.yml",
            "sessions.py",
            "test_sessions.py",
        ),
    ),
    Example(
        "dedup",
        "each event once, however often it is sent",
        "set with a time to live, counter",
        _ONCE,
        ("README.md", "dedup.py", "events.csv", "pipeline.yml", "test_dedup.py"),
    ),
    Example(
        "enrichment",
        "a join of two streams, whichever row arrives first",
        "value of a record, list",
        "python enrich.py",
        ("README.md", "customers.csv", "enrich.py", "enrichment.py", "orders.csv", "test_enrichment.py"),
    ),
    Example(
        "stages",
        "two operators in a pipeline file, run for each day exactly once",
        "value, map; stages in a ledger",
        "stateflow ledger init --ledger sqlite:///stages.db",
        (
            "README.md",
            "pipeline.yml",
            "sales-2026-03-01.csv",
            "sales-2026-03-02.csv",
            "shops.py",
            "test_shops.py",
        ),
    ),
    Example(
        "vehicles",
        "state that follows a vehicle from site to site",
        "counter, value, list; the locality policy",
        "python drive.py",
        ("README.md", "drive.py", "test_vehicles.py", "vehicles.py"),
    ),
    Example(
        "gateway",
        "an edge gateway without Spark that keeps what it cannot send",
        "counter, value; an outbox",
        "python outage.py",
        ("README.md", "gateway.py", "outage.py", "pumps.py", "readings.jsonl", "test_pumps.py"),
    ),
    Example(
        "notebook",
        "a move in a notebook, with a chart of how long rows waited",
        "counter, value; an operator in a cell",
        "jupyter lab move.ipynb",
        ("README.md", "connect.ipynb", "counting.py", "move.ipynb", "test_counting.py"),
    ),
)


def example_named(name: str) -> Example:
    """Returns the example with this name. Raises InvalidArgument, which suggests a similar name."""
    found = {example.name: example for example in EXAMPLES}
    if name not in found:
        close = difflib.get_close_matches(name, found, 1)
        raise InvalidArgument(
            f"there is no example {name!r}",
            remedy=f"did you mean {close[0]!r}?" if close else f"use one of {', '.join(found)}",
        )
    return found[name]
