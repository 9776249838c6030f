"""Note of the checkpoint store that a replica uses, written to its data directory at the first use. With the note, the
replica does not mistake a missing mount for a new store."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

from stateflow.checkpoint import CheckpointStore, Known
from stateflow.errors import InvalidArgument
from stateflow.runtime.environment import Environment

NOTE = "CHECKPOINTS"


def remember(environment: Environment, data_dir: Path, store: CheckpointStore) -> None:
    """Checks that ``store`` is the noted one, or notes it. Raises InvalidArgument for a note that cannot be read."""
    note = data_dir / NOTE

    def keep(known: Known) -> None:
        environment.write_durably(note, json.dumps(asdict(known)))

    store.remember(_read(note), keep, note)


def _read(note: Path) -> Known | None:
    if not note.exists():
        return None
    try:
        return Known(**json.loads(note.read_text()))
    except (ValueError, TypeError) as error:
        raise InvalidArgument(
            "the record of the checkpoint store in use cannot be read",
            remedy="check that the store is mounted, then remove the record",
            path=note,
        ) from error
