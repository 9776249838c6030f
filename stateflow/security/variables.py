"""Names of an authority's files, and the environment variables that tell a process where its own files are."""

from __future__ import annotations

from pathlib import Path

CA, CRL = "ca.pem", "crl.pem"
#: files that a process is given
OWN_CERT, OWN_KEY = "cert.pem", "key.pem"
#: a process with a certificate takes no other identity from a token in its environment
NO_TOKEN = {"STATEFLOW_TOKEN": "", "STATEFLOW_TOKEN_FILE": ""}


def variables_of(out: Path) -> dict[str, str]:
    """Returns the environment of a process whose files are in ``out``, as an authority has written them."""
    files = {"CA": CA, "CERT": OWN_CERT, "KEY": OWN_KEY, "CRL": CRL}
    return {f"STATEFLOW_TLS_{which}": str(out / file) for which, file in files.items()}
