"""What an authority's files are called, and by which variables a process is told where its own are."""

from __future__ import annotations

from pathlib import Path

CA, CRL = "ca.pem", "crl.pem"
#: what a process is given
OWN_CERT, OWN_KEY = "cert.pem", "key.pem"
#: who has a certificate is not somebody else by a token, whatever was in its environment
NO_TOKEN = {"STATEFLOW_TOKEN": "", "STATEFLOW_TOKEN_FILE": ""}


def variables_of(out: Path) -> dict[str, str]:
    """The environment of a process whose files are there, as an authority has written them."""
    files = {"CA": CA, "CERT": OWN_CERT, "KEY": OWN_KEY, "CRL": CRL}
    return {f"STATEFLOW_TLS_{which}": str(out / file) for which, file in files.items()}
