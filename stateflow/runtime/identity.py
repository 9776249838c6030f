"""Identity of a data directory: the file ``REPLICA`` in it, JSON ``{"id", "name"}``.

``id`` is made once and never changes; a copy of the directory has the same id. ``name`` is the name of the replica that
serves from the directory. Earlier versions stored the bare name; such a file is upgraded in place.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path

from stateflow.errors import InvalidArgument
from stateflow.runtime.environment import Environment
from stateflow.types import NAME

FILE = "REPLICA"


@dataclass(frozen=True, slots=True)
class Identity:
    """Identity of a data directory. ``place``: the machine and the lock file on it, not stored. Two processes with one
    place cannot both have the directory open; two processes with one ``id`` and different places have copies of it."""

    id: str
    name: str
    place: str = ""


def identify(environment: Environment, root: Path, name: str) -> Identity:
    """Returns the identity of a claimed data directory, made or upgraded if necessary. Raises InvalidArgument.

    A directory without operators may get another name, as a replica that was refused under its first name has nothing
    to lose. State in the directory, however, would look like unfinished transfers under another name.
    """
    file = root / FILE
    place = environment.place(root)
    known = _read(file) if file.exists() else None
    if known is None:
        return _keep(environment, root, Identity(environment.new_id(), name, place))
    if known.name != name:
        if (root / "operators").exists():
            raise InvalidArgument(
                f"the data directory belongs to replica {known.name!r}",
                remedy=f"start it with --name {known.name}, or give {name!r} its own --data-dir",
                path=root,
            )
        return _keep(environment, root, Identity(environment.new_id(), name, place))
    if not known.id:
        return _keep(environment, root, Identity(environment.new_id(), name, place))
    return replace(known, place=place)


def _keep(environment: Environment, root: Path, identity: Identity) -> Identity:
    """Writes an identity durably, and returns it."""
    environment.write_durably(root / FILE, json.dumps({"id": identity.id, "name": identity.name}))
    return identity


def _read(file: Path) -> Identity:
    text = file.read_text()
    if NAME.holds(text):
        return Identity("", text)
    try:
        fields = json.loads(text)
        return Identity(str(fields["id"]), str(fields["name"]))
    except (ValueError, LookupError, TypeError) as error:
        raise InvalidArgument(
            f"the file does not name the replica it belongs to: {text[:40]!r}",
            remedy="write only the replica's name into it, or give the replica another --data-dir",
            path=file,
        ) from error
