"""Masks secrets in texts, and restricts private files to their owner.

:func:`masked` masks secrets in URLs before they reach errors, logs, records and replies. Private files are state,
ledgers, checkpoints, and files that contain passwords.
"""

from __future__ import annotations

import logging
import os
import re
import stat
from pathlib import Path

from stateflow.errors import InvalidArgument

log = logging.getLogger(__name__)
#: umask of processes that keep state: their directories get mode 0700, their files 0600
UMASK = 0o077
MASK = "***"
_PASSWORD = re.compile(r"([a-zA-Z][a-zA-Z0-9+.-]*://[^\s/?#@:]*):[^\s/?#]*@")
#: pattern in the names of options and parameters that hold a secret
_SECRET = (
    r"passw(?:or)?d|passphrase|\bpwd|secret|token|api[_.-]?key|access[_.-]?key|private[_.-]?key|credential|signature"
    r"|\bsig\b|jaas"
)
_NAME = re.compile(rf"(?i){_SECRET}")
_PARAMETER = re.compile(rf"(?i)([?&;][^=&;\s#]*(?:{_SECRET})[^=&;\s#]*=)[^&;\s#)\]'\"]*")


# -- Masking of secrets ----------------------------------------------------------------------------------------------


def masked(text: str) -> str:
    """Returns ``text`` with ``***`` for passwords and secret parameters in all of its URLs. User names stay."""
    return _PARAMETER.sub(rf"\1{MASK}", _PASSWORD.sub(rf"\1:{MASK}@", text))


def is_masked(text: str) -> bool:
    """Tells whether a secret was masked in the text."""
    return f":{MASK}@" in text or f"={MASK}" in text


def names_a_secret(name: str) -> bool:
    """Tells whether an option or key of this name holds a secret, so that its value must not be shown."""
    return _NAME.search(name) is not None


# -- Private files ---------------------------------------------------------------------------------------------------


def keep_private(path: Path) -> None:
    """Restricts an existing file or directory to its owner, and logs a warning if other users could read it."""
    mode = stat.S_IMODE(path.stat().st_mode)
    if not mode & UMASK:
        return
    try:
        path.chmod(mode & ~UMASK)
    except OSError as error:
        log.warning("path %s is readable by other users, and its mode cannot be changed: %s", path, error.strerror)
    else:
        log.warning("path %s was readable by other users; now only its owner can read it", path)


def state_directory() -> Path:
    """Returns the directory for a user's own files that outlast a process, without creating it.

    The path does not depend on the current directory. In a service of systemd with ``StateDirectory=``, it is the path
    in the variable STATE_DIRECTORY. Raises InvalidArgument for a user without a home directory.
    """
    service = os.environ.get("STATE_DIRECTORY", "").partition(":")[0]
    if service:
        return Path(service)
    home = os.environ.get("XDG_STATE_HOME", "")
    if Path(home).is_absolute():  # by the XDG specification
        return Path(home) / "stateflow"
    try:
        return Path.home() / ".local" / "state" / "stateflow"
    except RuntimeError:
        raise InvalidArgument(
            "this user has no home directory, and XDG_STATE_HOME is not set",
            remedy="set XDG_STATE_HOME to a directory of this user",
        ) from None


def url_of(text: str) -> str:
    """Returns a URL as given, or reads it from the file after an ``@``, such as ``@/run/secrets/ledger``.

    A file keeps passwords out of the process list. Raises InvalidArgument, without quoting the file, if the file cannot
    be read or does not contain exactly one URL.
    """
    if not text.startswith("@"):
        return text
    path = Path(text[1:])
    try:
        # a path in a URL may contain spaces
        lines = [line.strip() for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or "it is not text"
        raise InvalidArgument(
            f"the file with the URL cannot be read: {why}", remedy="pass @FILE, a file with one URL", file=path
        ) from None
    if len(lines) != 1:
        raise InvalidArgument(
            "the file must contain exactly one URL", remedy="put only the URL into the file, on one line", file=path
        )
    if os.name == "posix" and path.stat().st_mode & stat.S_IROTH:
        log.warning("file %s contains a URL and is readable by every user; restrict it with chmod 600", path)
    return lines[0]
