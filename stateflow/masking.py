"""Masking of secrets in URLs before they reach errors, logs, records and replies."""

from __future__ import annotations

import re

MASK = "***"
_PASSWORD = re.compile(r"([a-zA-Z][a-zA-Z0-9+.-]*://[^\s/?#@:]*):[^\s/?#]*@")
#: in the names of options and parameters that hold a secret
_SECRET = (
    r"passw(?:or)?d|passphrase|\bpwd|secret|token|api[_.-]?key|access[_.-]?key|private[_.-]?key|credential|signature"
    r"|\bsig\b|jaas"
)
_NAME = re.compile(rf"(?i){_SECRET}")
_PARAMETER = re.compile(rf"(?i)([?&;][^=&;\s#]*(?:{_SECRET})[^=&;\s#]*=)[^&;\s#)\]'\"]*")


def masked(text: str) -> str:
    """Returns ``text`` with the passwords and secret parameters of all URLs in it as ``***``; user names stay."""
    return _PARAMETER.sub(rf"\1{MASK}", _PASSWORD.sub(rf"\1:{MASK}@", text))


def is_masked(text: str) -> bool:
    """Tells whether a secret was masked in the text."""
    return f":{MASK}@" in text or f"={MASK}" in text


def names_a_secret(name: str) -> bool:
    """Tells whether the value of an option or key of this name must not be shown."""
    return _NAME.search(name) is not None
