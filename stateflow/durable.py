"""What outlives a loss of power."""

from __future__ import annotations

import os
from pathlib import Path


def sync(path: Path) -> None:
    """The contents of a file, or the entries of a directory, are there after a loss of power from here on. Raises
    OSError."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_durably(path: Path, content: str | bytes, mode: int | None = None) -> None:
    """All of it, or what was there before; the former, power loss or not, once this returns. Raises OSError.

    Args: mode: the file's, which is nobody else's for no moment; None: as the umask has it."""
    temporary = path.with_name(f".{path.name}.new")
    temporary.unlink(missing_ok=True)
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
    with os.fdopen(os.open(temporary, flags, 0o666 if mode is None else mode), "wb") as file:
        if mode is not None:
            temporary.chmod(mode)  # whatever the umask takes off
        file.write(content if isinstance(content, bytes) else content.encode())
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
    sync(path.parent)
