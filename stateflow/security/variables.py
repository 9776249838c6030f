"""Names of an authority's files, and the environment variables that tell a process where its own files are."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

# Temporary changes of this process's environment variables.


@contextmanager
def environment(given: Mapping[str, str]) -> Iterator[None]:
    """Sets variables within the block; afterwards they have their former values, or are unset."""
    before = {variable: os.environ.get(variable) for variable in given}
    os.environ.update(given)
    try:
        yield
    finally:
        for variable, value in before.items():
            if value is None:
                os.environ.pop(variable, None)
            else:
                os.environ[variable] = value


CA, CRL = "ca.pem", "crl.pem"
#: files that a process is given
OWN_CERT, OWN_KEY = "cert.pem", "key.pem"
#: a process with a certificate takes no other identity from a token in its environment
NO_TOKEN = {"STATEFLOW_TOKEN": "", "STATEFLOW_TOKEN_FILE": ""}


def variables_of(out: Path) -> dict[str, str]:
    """Returns the environment of a process whose files are in ``out``, as an authority has written them."""
    files = {"CA": CA, "CERT": OWN_CERT, "KEY": OWN_KEY, "CRL": CRL}
    return {f"STATEFLOW_TLS_{which}": str(out / file) for which, file in files.items()}
