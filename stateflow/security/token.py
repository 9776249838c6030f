"""A token: a certificate of some hours with its key and its authority's certificate, as one text.

Tokens are for people and jobs that have no place for files. Servers need no support for them: they see an ordinary
certificate. A bearer token is a secret that servers, and readers of their logs, could use again (RFC 6750, 5.1); no
such secret is sent here. RFC 8705 binds tokens to certificates for the same reason. The text itself is as secret as a
key.
"""

from __future__ import annotations

import base64
from datetime import timedelta
from typing import Final, NamedTuple

import msgpack
from cryptography import x509
from cryptography.hazmat.primitives import serialization

from stateflow.errors import BadCertificate, InvalidArgument
from stateflow.security.identity import Identity, Role
from stateflow.security.reading import UNREADABLE

#: prefix by which scanners for leaked secrets can find tokens
PREFIX: Final = "sftoken1_"
#: length of a text, at most; one of ours has some 1,600 characters
LENGTH_MAX = 64 << 10
SHORTEST, LONGEST = timedelta(minutes=1), timedelta(days=31)
#: roles that tokens may have: members that listen have hosts and stay, and have certificates
ROLES = frozenset({Role.READ, Role.DATA, Role.OPERATE, Role.ADMIN})
_ANOTHER = "issue another one: `stateflow token issue`"


class Parts(NamedTuple):
    """Contents of a token, as PEM."""

    ca: bytes
    cert: bytes
    key: bytes


def check_wanted(identity: Identity, lifetime: timedelta) -> None:
    """Checks that such a token may be issued. Raises InvalidArgument."""
    if identity.role not in ROLES:
        raise InvalidArgument(
            f"a token cannot carry the role {identity.role}", remedy="issue a certificate: `stateflow certs issue`"
        )
    if not SHORTEST <= lifetime <= LONGEST:
        raise InvalidArgument(
            f"a token cannot be valid for {lifetime}", remedy="choose 1m to 31d, or issue a certificate for longer"
        )


def encoded(ca: bytes, cert: bytes, key: bytes) -> str:
    """Returns the text of a token.

    Args:
        ca, cert, key: PEM; ``ca`` may hold several certificates.
    """
    authorities = [_der(each) for each in x509.load_pem_x509_certificates(ca)]
    private = serialization.load_pem_private_key(key, None).private_bytes(
        serialization.Encoding.DER, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    packed = msgpack.packb([authorities, _der(x509.load_pem_x509_certificate(cert)), private])
    return _text(packed)


def _text(packed: bytes) -> str:
    return PREFIX + base64.urlsafe_b64encode(packed).decode().rstrip("=")


def decoded(text: str) -> Parts:
    """Decodes the text of a token. Raises BadCertificate, which reveals nothing of the contents."""
    text = text.strip()
    if not text.startswith(PREFIX) or len(text) > LENGTH_MAX:
        raise BadCertificate(f"not a token: a token begins with {PREFIX}", remedy=_ANOTHER)
    inner = text.removeprefix(PREFIX)
    try:
        packed = base64.b64decode(inner + "=" * (-len(inner) % 4), altchars=b"-_", validate=True)
        if _text(packed) != text:  # RFC 4648, 3.5: spare bits of the last character may hide a change
            raise ValueError("not canonical")
        authorities, cert, key = msgpack.unpackb(packed, max_ext_len=0)
        ca = b"".join(_pem(x509.load_der_x509_certificate(each)) for each in authorities)
        private = serialization.load_der_private_key(key, None)
        made = Parts(
            ca,
            _pem(x509.load_der_x509_certificate(cert)),
            private.private_bytes(
                serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
            ),
        )
    except (*UNREADABLE, msgpack.exceptions.UnpackException):
        # without its cause: a traceback would show parts of the key
        raise BadCertificate("the token is damaged: a part of it is missing or altered", remedy=_ANOTHER) from None
    return made


def _der(cert: x509.Certificate) -> bytes:
    return cert.public_bytes(serialization.Encoding.DER)


def _pem(cert: x509.Certificate) -> bytes:
    return cert.public_bytes(serialization.Encoding.PEM)
