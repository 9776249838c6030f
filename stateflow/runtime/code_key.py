"""Who may have code run: whoever has the key.

Every replica runs an operator that is sent as text or in a bundle, so a controller that accepted any of these would
have replicas run whatever reaches its port. It accepts what has an HMAC (RFC 2104, SHA-256) by its own key. The key is
a file of the user who runs the controller, made by the first client that needs it, so that one machine needs no setup;
or ``STATEFLOW_CODE_KEY``, the same for the controller and for whoever deploys. The key itself is never sent.
"""

from __future__ import annotations

import contextlib
import hmac
import os
import secrets
from dataclasses import replace
from pathlib import Path

from stateflow.errors import CodeRefused, InvalidArgument
from stateflow.private import keep_private, state_directory
from stateflow.settings import CodeSettings
from stateflow.types import OperatorSpec

VARIABLE = "STATEFLOW_CODE_KEY"
#: characters of a key that somebody chose
LENGTH_MIN = 16
_REMEDY = (
    f"deploy it as the user who runs the controller, or give both the same {VARIABLE}; or install the operator where "
    "replicas run and name it package.module:Class"
)


def signed(spec: OperatorSpec) -> OperatorSpec:
    """With the HMAC of its text or bundle, if it has one. Raises InvalidArgument without a place for the key."""
    if not (spec.source or spec.bundle):
        return spec
    return replace(spec, source_mac=_mac(_key(make=True), spec))


def check_signed(spec: OperatorSpec) -> None:
    """Raises CodeRefused for a text or bundle that was not signed with this process's key."""
    if not (spec.source or spec.bundle):
        return
    key = _key(make=False)
    if not key:
        raise CodeRefused(
            "the controller has no key, and takes no code without one", remedy=_REMEDY, operator=spec.name
        )
    if not hmac.compare_digest(_mac(key, spec), spec.source_mac):
        raise CodeRefused("the code was not sent by who has the controller's key", remedy=_REMEDY, operator=spec.name)


def _mac(key: bytes, spec: OperatorSpec) -> str:
    said = f"{spec.bundle}\0{spec.source}" if spec.bundle else spec.source
    return hmac.new(key, said.encode(), "sha256").hexdigest()


def _key(*, make: bool) -> bytes:
    """Empty when there is none and none is to be made."""
    given = CodeSettings().key.get_secret_value()
    if given:
        if len(given) < LENGTH_MIN:
            raise InvalidArgument(f"{VARIABLE} is too short", remedy=f"use {LENGTH_MIN} characters or more")
        return given.encode()
    try:
        path = state_directory() / "code.key"
        if make and not path.exists():
            _make(path)
        with contextlib.suppress(FileNotFoundError):
            return _read(path)
    except (OSError, RuntimeError) as error:
        raise InvalidArgument(f"the key for code has no place: {error}", remedy=f"set {VARIABLE}") from error
    return b""


def _make(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    own = path.with_name(f"{path.name}.{secrets.token_hex(8)}")
    descriptor = os.open(own, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w") as file:
        file.write(secrets.token_hex(32))
    try:
        with contextlib.suppress(FileExistsError):  # another one was as quick: that one's counts
            path.hardlink_to(own)
    finally:
        own.unlink()


def _read(path: Path) -> bytes:
    if path.stat().st_uid != os.geteuid():  # its owner would have code run as somebody else
        raise PermissionError(f"{path} belongs to another user")
    keep_private(path)
    return path.read_bytes()
