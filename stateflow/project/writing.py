"""Writes the projects of ``stateflow init``: a small default project that runs at once, or an example.

``stateflow init --example`` writes one of ``EXAMPLES``. Each example has a folder in ``stateflow/examples``, whose
files are copied, and a page in docs/examples.
"""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import stateflow
from stateflow.errors import InvalidArgument
from stateflow.types import check_name

# -- Examples --------------------------------------------------------------------------------------------------------

EXAMPLES_DIR = Path(stateflow.__file__).parent / "examples"


@dataclass(frozen=True, slots=True)
class Example:
    """An example project.

    Attributes:
        shows: what the example shows, in a few words.
        uses: states and other features of operators that the example uses.
        run: the first command to run in the project's directory.
        files: names of all files in the example's folder.
    """

    name: str
    shows: str
    uses: str
    run: str
    files: tuple[str, ...]

    @property
    def folder(self) -> Path:
        return EXAMPLES_DIR / self.name


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
        "an edge gateway without Spark that keeps rows that it cannot send",
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


# -- Writing ---------------------------------------------------------------------------------------------------------

#: files of the default project; ``NAME`` in their text is replaced by the project's name
FILES = ("README.md", "ops.py", "pipeline.yml", "readings.csv", "test_ops.py")
HERE = Path(__file__).parent / "files"


def write_project(folder: Path, example: Example | None = None) -> list[Path]:
    """Writes a project into a new or an empty directory. The project gets the directory's name.

    Args:
        example: the example to write; None: the default project.

    Raises InvalidArgument if the directory is not empty, cannot be written, or has a name that a project cannot have.
    """
    name = folder.resolve().name
    check_name("project", name)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise InvalidArgument("the path is not an empty directory", remedy="pass a new directory", path=folder)
    source, files = (HERE, FILES) if example is None else (example.folder, example.files)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        return _copied(source, files, folder, name)
    except OSError as error:
        raise InvalidArgument(
            f"the directory cannot be written: {error.strerror}", remedy="pass a writable directory", path=folder
        ) from error


def _copied(source: Path, files: Sequence[str], folder: Path, name: str) -> list[Path]:
    written = []
    for file in files:
        written.append(folder / file)
        text = (source / file).read_text(encoding="utf-8")
        written[-1].write_text(text.replace("NAME", name), encoding="utf-8")
    return written
