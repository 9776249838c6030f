"""Who a data directory is: the file ``REPLICA`` in it, JSON ``{"id", "name"}``.

``id`` is made once and never changes; a copy of the directory has the same. ``name`` is the replica that serves from
it. Earlier versions kept the bare name there: such a file is upgraded where it is.
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
    """``place``: the machine and the file that is locked on it, not kept: two processes of one place cannot both have
    the directory open, those of two places with one ``id`` have copies of it."""

    id: str
    name: str
    place: str = ""


def identify(environment: Environment, root: Path, name: str) -> Identity:
    """The identity of a claimed data directory, made or upgraded if need be. Raises InvalidArgument.

    A directory that holds no operator may be given another name: a replica that was refused under the first one has
    nothing to lose. With state in it, it would be taken for unfinished transfers under another name.
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
    """Durable when it returns."""
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
            f"the file says nothing of whose data directory it is in: {text[:40]!r}",
            remedy="write the replica's name into it, and nothing else, or give the replica another --data-dir",
            path=file,
        ) from error
