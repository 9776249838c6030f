"""Writes files that survive a loss of power, and names the errors that reading a damaged file raises."""

from __future__ import annotations

import errno
import os
from pathlib import Path

#: errors of reading a damaged JSON file: the text is not JSON, is nested too deeply, or lacks the expected fields
MALFORMED = (ValueError, LookupError, TypeError, AttributeError, RecursionError, OverflowError)


def sync(path: Path) -> None:
    """Makes the contents of a file, or the entries of a directory, survive a loss of power. Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_durably(path: Path, content: str | bytes, mode: int | None = None) -> None:
    """Replaces a file atomically: at any time, the file has either the old contents or the new ones.

    Once this function has returned, the file keeps the new contents. Both promises hold even if power is lost. Raises
    OSError, and FileExistsError for a device or pipe, which would be replaced, too.

    Args:
        mode: permissions of the file, also while it is being written; None: permissions by the umask.
    """
    if path.exists() and not (path.is_file() or path.is_dir()):
        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(path))
    temporary = path.with_name(f".{path.name}.new")
    temporary.unlink(missing_ok=True)
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
    with os.fdopen(os.open(temporary, flags, 0o666 if mode is None else mode), "wb") as file:
        if mode is not None:
            temporary.chmod(mode)  # independent of the umask
        file.write(content if isinstance(content, bytes) else content.encode())
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
    sync(path.parent)
