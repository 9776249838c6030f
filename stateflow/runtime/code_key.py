"""Authentication of deployed code: only holders of the controller's key can deploy code that replicas run.

Replicas run operators that are sent as text or in a bundle, so a controller that accepted any code would let everyone
who reaches its port run code on the replicas. The controller accepts code with an HMAC (RFC 2104, SHA-256) by its own
key. The key is a file of the user who runs the controller, made by the first client that needs it, so that a single
machine needs no setup; or ``STATEFLOW_CODE_KEY``, with the same value for the controller and for all who deploy. The
key itself is never sent.
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
#: least number of characters of a key in the environment variable
LENGTH_MIN = 16
_REMEDY = (
    f"deploy it as the user who runs the controller, or give both the same {VARIABLE}; or install the operator on the "
    "replicas and name it package.module:Class"
)


def signed(spec: OperatorSpec) -> OperatorSpec:
    """Returns the spec with the HMAC of its text or bundle, unchanged if it has neither. Raises InvalidArgument where
    the key cannot be stored or read."""
    if not (spec.source or spec.bundle):
        return spec
    return replace(spec, source_mac=_mac(_key(make=True), spec))


def check_signed(spec: OperatorSpec) -> None:
    """Checks that a text or bundle was signed with this process's key. Raises CodeRefused."""
    if not (spec.source or spec.bundle):
        return
    key = _key(make=False)
    if not key:
        raise CodeRefused(
            "the controller has no code key, and accepts no code without one", remedy=_REMEDY, operator=spec.name
        )
    if not hmac.compare_digest(_mac(key, spec), spec.source_mac):
        raise CodeRefused("the code is not signed with the controller's key", remedy=_REMEDY, operator=spec.name)


def _mac(key: bytes, spec: OperatorSpec) -> str:
    said = f"{spec.bundle}\0{spec.source}" if spec.bundle else spec.source
    return hmac.new(key, said.encode(), "sha256").hexdigest()


def _key(*, make: bool) -> bytes:
    """Returns the key. Empty: there is none and ``make`` is not set."""
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
        raise InvalidArgument(f"the code key cannot be read or created: {error}", remedy=f"set {VARIABLE}") from error
    return b""


def _make(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    own = path.with_name(f"{path.name}.{secrets.token_hex(8)}")
    descriptor = os.open(own, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w") as file:
        file.write(secrets.token_hex(32))
    try:
        with contextlib.suppress(FileExistsError):  # another process made a key at the same time, and that key counts
            path.hardlink_to(own)
    finally:
        own.unlink()


def _read(path: Path) -> bytes:
    if path.stat().st_uid != os.geteuid():  # its owner could run code as this user
        raise PermissionError(f"{path} belongs to another user")
    keep_private(path)
    return path.read_bytes()
