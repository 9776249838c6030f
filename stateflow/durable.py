"""Writes files that survive a loss of power, lists directories, and names the errors of reading a damaged file.

Path.glob, Path.rglob and os.walk must not list what a decision depends on: they list less, and raise nothing, if a
directory cannot be read (Path.glob since Python 3.12 also when no more files can be opened).
"""

from __future__ import annotations

import errno
import os
from fnmatch import fnmatchcase
from pathlib import Path

#: errors of reading a damaged JSON file: the text is not JSON, is nested too deeply, or lacks the expected fields
MALFORMED = (ValueError, LookupError, TypeError, AttributeError, RecursionError, OverflowError)


def listed(directory: Path, pattern: str = "*") -> list[Path]:
    """Returns the entries of a directory whose names match ``pattern``, sorted; empty: there is no such directory.
    Raises OSError if the directory cannot be read."""
    try:
        return sorted(path for path in directory.iterdir() if fnmatchcase(path.name, pattern))
    except FileNotFoundError:
        return []


def files_below(directory: Path) -> list[Path]:
    """Returns all files below a directory, except those behind links to directories; empty: there is no such
    directory. Raises OSError if one of the directories cannot be read."""
    found: list[Path] = []
    for path in listed(directory):
        if path.is_file():
            found.append(path)
        elif path.is_dir() and not path.is_symlink():
            found += files_below(path)
    return found


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
