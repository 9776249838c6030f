"""Disks, ledgers and code of each release, kept for ever: a release works with what the one before it left.

========================  ==========================================================================================
``<release>.tar.gz``      a cluster that was killed at work, with its state as JSON
``<release>-more.tar.gz`` the same with a commit log that is ahead of its databases, an outbox, code in a bundle, and
                          checkpoints that are compressed and encrypted
``<release>-code.tar.gz`` the release itself, for tests whose processes are of two releases; its README names the commit
========================  ==========================================================================================

When a release is published, ``python -m tests.formats`` makes the first two with its code, and ``python -m
tests.formats --code COMMIT`` the third. With ``--of RELEASE`` the first two are made by the code in that release's
archive.
"""

from __future__ import annotations

import tarfile
from pathlib import Path

FORMATS = Path(__file__).parent
TESTS = FORMATS.parent
#: all releases, oldest first; the last one is this one
RELEASES = ("0.1.0", "0.2.0")
BEFORE = RELEASES[-2]
#: what processes of an older release import beside its code: operators are the user's, and stay when releases change
_OPERATORS = (
    "__init__.py",
    *(f"formats/{name}.py" for name in ("__init__", "__main__", "everything")),
    *(f"integration/{name}.py" for name in ("__init__", "operators")),
)


def archive(release: str, kind: str = "") -> Path:
    """Returns the path of an archive. ``kind``: ``more``, ``code``, or empty."""
    return FORMATS / f"{release}{kind and '-'}{kind}.tar.gz"


def unpack(packed: Path, folder: Path) -> None:
    """Unpacks an archive, for this user only."""
    with tarfile.open(packed) as opened:
        opened.extractall(folder, filter="data")
    for path in folder.rglob("*"):
        path.chmod(0o700 if path.is_dir() else 0o600)


def unpack_code(release: str, folder: Path) -> Path:
    """Unpacks the code of a release, adds today's operators, and returns the folder, which then is an import path."""
    unpack(archive(release, "code"), folder)
    for name in _OPERATORS:
        (folder / "tests" / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / "tests" / name).write_bytes((TESTS / name).read_bytes())
    return folder
