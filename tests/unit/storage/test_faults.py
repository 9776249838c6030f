"""Texts of RocksDB's errors: what is full, refused or out of files is neither damaged nor a bug."""

from __future__ import annotations

import re

import pytest

from stateflow.errors import DiskFull, DiskRefused, StateDamaged, StateflowError, TooFewFiles
from stateflow.storage.faults import meaning

OPTIONS = "Invalid argument: Found options incompatible with filesystem: "
FILE = "IO error: While open a file for random read: /x/000009.sst: "


def _raised(text: str) -> Exception:
    """Returns an error that code of the product has raised."""
    with pytest.raises(Exception, match=re.escape(text)) as caught:
        exec("raise Exception(text)", {"text": text, "__name__": "stateflow.storage.store"})
    return caught.value


@pytest.mark.parametrize(
    ("text", "meant"),
    [
        (FILE + "Too many open files", TooFewFiles),
        (FILE + "File too large", DiskFull),
        (FILE + "No space left on device", DiskFull),
        (FILE + "Read-only file system", DiskRefused),
        (FILE + "No such file or directory", StateDamaged),
        (OPTIONS + FILE + "Too many open files", TooFewFiles),
        (OPTIONS + FILE + "No space left on device", DiskFull),
        (OPTIONS + FILE + "Input/output error", type(None)),
        ("Corruption: Can't access /000009.sst: " + FILE + "Too many open files", TooFewFiles),
        ("Corruption: Can't access /000009.sst: " + FILE + "No such file or directory", StateDamaged),
        ("Corruption: block checksum mismatch", StateDamaged),
        ("Invalid argument: Too many open files", type(None)),
    ],
)
def test_what_rocksdb_says_is_told_as_what_happened(text: str, meant: type[StateflowError]) -> None:
    found = meaning(_raised(text))
    assert type(found) is meant
    assert found is None or text in str(found)
