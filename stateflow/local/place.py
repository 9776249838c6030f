"""Reads, from the directory of an embedded cluster, which program runs the cluster."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from stateflow.settings import EmbeddedSettings

FILE = "embedded.json"


def said_in(place: Path) -> dict[str, Any]:
    """Returns what a directory says of its cluster; empty: nothing.

    ``replicas``: their number. ``pid``, ``program``: program that ran the cluster last. ``address``: address of its
    controller.
    """
    try:
        found = json.loads((place / FILE).read_text())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def running_in(directory: str | Path | None = None) -> str | None:
    """Returns the address of the controller that a program runs in a directory now; None: no program does.

    Args:
        directory: see :func:`~stateflow.local.embedded.embedded`.
    """
    said = said_in(Path(directory if directory is not None else EmbeddedSettings().directory).expanduser())
    try:
        os.kill(int(said["pid"]), 0)
        return str(said["address"])
    except (KeyError, ValueError, TypeError, OSError):
        return None
