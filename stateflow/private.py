"""Protection of private data: masking of secrets in texts, and files that only their owner may read.

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
#: for a process that keeps state: its directories are 0700, its files 0600
UMASK = 0o077
MASK = "***"
_PASSWORD = re.compile(r"([a-zA-Z][a-zA-Z0-9+.-]*://[^\s/?#@:]*):[^\s/?#]*@")
#: in the names of options and parameters that hold a secret
_SECRET = (
    r"passw(?:or)?d|passphrase|\bpwd|secret|token|api[_.-]?key|access[_.-]?key|private[_.-]?key|credential|signature"
    r"|\bsig\b|jaas"
)
_NAME = re.compile(rf"(?i){_SECRET}")
_PARAMETER = re.compile(rf"(?i)([?&;][^=&;\s#]*(?:{_SECRET})[^=&;\s#]*=)[^&;\s#)\]'\"]*")


# -- Masking of secrets ----------------------------------------------------------------------------------------------


def masked(text: str) -> str:
    """Returns ``text`` with the passwords and secret parameters of all URLs in it as ``***``; user names stay."""
    return _PARAMETER.sub(rf"\1{MASK}", _PASSWORD.sub(rf"\1:{MASK}@", text))


def is_masked(text: str) -> bool:
    """Tells whether a secret was masked in the text."""
    return f":{MASK}@" in text or f"={MASK}" in text


def names_a_secret(name: str) -> bool:
    """Tells whether a name is that of a secret, so that the value of such an option or key must not be shown."""
    return _NAME.search(name) is not None


# -- Private files ---------------------------------------------------------------------------------------------------


def keep_private(path: Path) -> None:
    """Restricts an existing file or directory to its owner, and logs a warning if it was not."""
    mode = stat.S_IMODE(path.stat().st_mode)
    if not mode & UMASK:
        return
    try:
        path.chmod(mode & ~UMASK)
    except OSError as error:
        log.warning("%s is readable by other users, and its mode cannot be changed: %s", path, error.strerror)
    else:
        log.warning("%s was readable by other users; now only its owner can read it", path)


def state_directory() -> Path:
    """Returns the directory for a user's own files that outlast a process. It does not depend on the current directory.
    Does not create it.

    A service has its own place: systemd sets STATE_DIRECTORY for ``StateDirectory=``. Raises RuntimeError for a user
    without a home.
    """
    service = os.environ.get("STATE_DIRECTORY", "").partition(":")[0]
    if service:
        return Path(service)
    home = os.environ.get("XDG_STATE_HOME", "")
    base = Path(home) if Path(home).is_absolute() else Path.home() / ".local" / "state"  # by the XDG specification
    return base / "stateflow"


def url_of(text: str) -> str:
    """Returns a URL as given, or read from a file: ``@/run/secrets/ledger``, which keeps passwords out of the process
    list.

    Raises InvalidArgument, without repeating the text of the file.
    """
    if not text.startswith("@"):
        return text
    path = Path(text[1:])
    try:
        lines = path.read_text(encoding="utf-8").split()
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or "it is not text"
        raise InvalidArgument(
            f"the file with the URL cannot be read: {why}", remedy="pass @FILE, a file with one URL", file=path
        ) from None
    if len(lines) != 1:
        raise InvalidArgument(
            "the file must contain exactly one URL", remedy="put only the URL into the file", file=path
        )
    if os.name == "posix" and path.stat().st_mode & stat.S_IROTH:
        log.warning("%s contains a URL and is readable by every user (chmod 600)", path)
    return lines[0]
