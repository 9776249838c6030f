"""What stands in the directory of a program's own cluster of who runs it."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from stateflow.settings import EmbeddedSettings

FILE = "embedded.json"


def said_in(place: Path) -> dict[str, Any]:
    """``replicas``: as many as it has; ``pid``, ``program`` and ``address``: who ran it last. Empty: nothing."""
    try:
        found = json.loads((place / FILE).read_text())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def running_in(directory: str | Path | None = None) -> str | None:
    """Where the controller listens of the cluster that a program runs there now; None: nobody does.

    Args: directory: as :func:`~stateflow.local.embedded.embedded` has it."""
    said = said_in(Path(directory if directory is not None else EmbeddedSettings().directory).expanduser())
    try:
        os.kill(int(said["pid"]), 0)
        return str(said["address"])
    except (KeyError, ValueError, TypeError, OSError):
        return None
