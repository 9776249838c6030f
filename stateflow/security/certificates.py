"""Certificates: reading them, checking whether they are valid and what their owners may call, tokens, and the TLS files
of a process.

A token is one text that contains a certificate valid for some hours, its key and its authority's certificate. Tokens
are for people and jobs that cannot store files. Servers need no support for tokens: they see an ordinary certificate. A
bearer token is a secret that servers, and readers of their logs, could use again (RFC 6750, 5.1); stateflow sends no
such secret. RFC 8705 binds tokens to certificates for the same reason. The text itself is as secret as a key.

A process reads its TLS files, or its token, again when they are replaced (:class:`TlsFiles`).
"""

from __future__ import annotations

import base64
import contextlib
import functools
import ipaddress
import logging
import os
import stat
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeVar

import msgpack
from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.x509.oid import ExtendedKeyUsageOID

from stateflow.clock import SYSTEM_CLOCK, Clock
from stateflow.errors import BadCertificate, InvalidArgument, NotAllowed
from stateflow.security.roles import Asker, Identity, Role, Rule, check_call, check_delegate, check_request
from stateflow.settings import ConnectionSettings

T = TypeVar("T", bound=x509.ExtensionType)
#: errors that are raised for bytes that are not a certificate, list or key, or of an unknown kind; binascii.Error is a
#: ValueError
UNREADABLE = (
    ValueError,
    TypeError,
    UnsupportedAlgorithm,
    x509.InvalidVersion,
    x509.DuplicateExtension,
    x509.UnsupportedGeneralNameType,
)
ISSUE_ANOTHER = "issue another one: `stateflow certs issue` or `stateflow certs renew`"


# -- Certificates ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Certificate:
    """Contents of a certificate. ``identity`` is None if the certificate names no identity of stateflow's, or several.
    ``serves`` tells whether a server may use it.
    """

    serial: int
    identity: Identity | None
    hosts: tuple[str, ...]
    not_before: datetime
    not_after: datetime
    serves: bool

    def check_time(self, now: datetime, where: object) -> None:
        """Checks that the certificate is valid now. Raises BadCertificate."""
        if now > self.not_after:
            raise BadCertificate(
                f"the certificate expired at {self.not_after:%Y-%m-%d %H:%M:%S} UTC", remedy=ISSUE_ANOTHER, file=where
            )
        if now < self.not_before:
            raise BadCertificate(
                f"the certificate is not valid before {self.not_before:%Y-%m-%d %H:%M:%S} UTC",
                remedy="check the clocks of this machine and of the authority's",
                file=where,
            )


@functools.lru_cache(maxsize=4096)
def certificate_of(pem: bytes) -> Certificate:
    """Returns the first certificate in a PEM text. Raises BadCertificate."""
    return described(read_certificates(pem, "the peer's certificate")[0])


def described(found: x509.Certificate) -> Certificate:
    names = _extension(found, x509.SubjectAlternativeName)
    uses = _extension(found, x509.ExtendedKeyUsage)
    identities = [] if names is None else names.get_values_for_type(x509.UniformResourceIdentifier)
    ours = [identity for identity in map(Identity.of_uri, identities) if identity is not None]
    hosts: list[str] = []
    if names is not None:
        hosts += names.get_values_for_type(x509.DNSName)
        hosts += map(str, names.get_values_for_type(x509.IPAddress))
    return Certificate(
        found.serial_number,
        ours[0] if len(ours) == 1 else None,  # with two, it is unclear which one applies
        tuple(hosts),
        found.not_valid_before_utc,
        found.not_valid_after_utc,
        uses is not None and ExtendedKeyUsageOID.SERVER_AUTH in uses,
    )


def _extension(found: x509.Certificate | x509.CertificateRevocationList, kind: type[T]) -> T | None:
    try:
        return found.extensions.get_extension_for_class(kind).value
    except (x509.ExtensionNotFound, *UNREADABLE):
        return None


def read_certificates(pem: bytes, where: object) -> list[x509.Certificate]:
    """Reads each certificate in a PEM text completely. Raises BadCertificate if one is damaged, or there is none."""
    try:
        found = x509.load_pem_x509_certificates(pem)
        for each in found:  # the library reads parts on access only, and reports errors in them then
            _ = each.public_key(), each.subject, each.issuer, each.extensions
            _ = each.not_valid_before_utc, each.not_valid_after_utc, each.signature_algorithm_parameters
            if each.serial_number <= 0:  # RFC 5280, 4.1.2.2; the library announces that it will refuse it, too
                raise ValueError(f"its serial number is {each.serial_number}")
    except UNREADABLE as error:
        raise BadCertificate(
            f"no valid certificate found: {error}", remedy="provide an undamaged certificate, as PEM", file=where
        ) from error
    return found


def read_authorities(pem: bytes, where: object) -> list[x509.Certificate]:
    """Reads the certificates of authorities in a PEM text, and checks the signatures of those that signed themselves.
    Raises BadCertificate if one is damaged, or there is none.

    Nothing else notices a changed name or time of an authority until the first connection, whose error names no file.
    """
    found = read_certificates(pem, where)
    for each in found:
        if not (any(_issued(each, by) for by in found) or _has_other_signer(each) or _has_old_hash(each)):
            raise BadCertificate(
                "the signature of an authority's certificate is not valid",
                remedy="provide an undamaged copy of it, as PEM",
                file=where,
            )
    return found


def _has_other_signer(found: x509.Certificate) -> bool:
    """Tells whether a certificate names another key than its own as its signer's. One that names none has signed
    itself (RFC 5280, 4.2.1.1)."""
    signer = _extension(found, x509.AuthorityKeyIdentifier)
    own = _extension(found, x509.SubjectKeyIdentifier)
    identifier = None if signer is None else signer.key_identifier
    return identifier is not None and (own is None or identifier != own.key_identifier)


def _has_old_hash(found: x509.Certificate) -> bool:
    """Tells whether a certificate is signed with a hash that the library no longer verifies, as old roots are."""
    try:
        return isinstance(found.signature_hash_algorithm, hashes.SHA1 | hashes.MD5)
    except UNREADABLE:
        return False


def checked_pair(
    ca: bytes, cert: bytes, key: bytes, now: datetime, where: str, ca_where: str = "the authority's file"
) -> Certificate:
    """Checks that authority, certificate and key belong together, and that the certificate is valid now. Returns the
    certificate's contents. Raises BadCertificate.

    Args:
        ca, cert, key: PEM texts.
        where, ca_where: files of the certificate and of the authority, for errors.
    """
    authorities, chain = read_authorities(ca, ca_where), read_certificates(cert, where)
    try:
        private = serialization.load_pem_private_key(key, None)
    except UNREADABLE as error:
        raise BadCertificate(
            "the private key of the certificate cannot be read",
            remedy="provide it as PEM, without a password",
            file=where,
        ) from error
    if _encoded(private.public_key()) != _encoded(chain[0].public_key()):
        raise BadCertificate(
            "the key does not match the certificate", remedy="use the key that was issued with it", file=where
        )
    for each, issuers in zip(chain, [*([one] for one in chain[1:]), authorities], strict=True):
        if not any(_issued(each, issuer) for issuer in issuers):
            raise BadCertificate(
                "the certificate is from another authority", remedy="use the CA file that it came with", file=where
            )
    found = described(chain[0])
    found.check_time(now, where)
    if found.identity is None:
        raise BadCertificate(
            "the certificate does not name exactly one stateflow identity",
            remedy="issue it with `stateflow certs issue`, or with one URI stateflow://ROLE/NAME among its names",
            file=where,
        )
    return found


def _encoded(public: object) -> bytes:
    encoded: bytes = public.public_bytes(  # type: ignore[attr-defined]
        serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo
    )
    return encoded


def _issued(found: x509.Certificate, by: x509.Certificate) -> bool:
    try:
        found.verify_directly_issued_by(by)
    except (*UNREADABLE, InvalidSignature):
        return False
    return True


@dataclass(frozen=True, slots=True)
class RevocationList:
    """Contents of a revocation list.

    Attributes:
        serials: serial numbers of the revoked certificates.
        signer: public key of the authority that signed the list.
        number: number that grows with each list of the authority; None: the authority does not number its lists.
        next_update: end of the time for which the list is meant, when a newer one is due; None: it has no end.
    """

    serials: frozenset[int] = frozenset()
    signer: bytes = b""
    number: int | None = None
    next_update: datetime | None = None

    def is_older(self, other: RevocationList) -> bool:
        """Tells whether the same authority made this list before ``other``, by their numbers."""
        if self.signer != other.signer or self.number is None or other.number is None:
            return False
        return self.number < other.number


def revoked_of(pem: bytes, ca: bytes, where: object) -> RevocationList:
    """Returns the contents of a revocation list. Raises BadCertificate if the list cannot be read, or none of the
    authorities in ``ca`` has signed it."""
    try:
        found = x509.load_pem_x509_crl(pem)
        serials = frozenset(each.serial_number for each in found)
        number, next_update = _number_of(found), found.next_update_utc
    except UNREADABLE as error:
        raise BadCertificate(
            "no valid revocation list found", remedy="provide an undamaged list, as PEM", file=where
        ) from error
    for authority in read_certificates(ca, "the authority's file"):
        if _signed(found, authority):
            return RevocationList(serials, _encoded(authority.public_key()), number, next_update)
    raise BadCertificate(
        "the revocation list is from another authority", remedy="use the list of the CA's authority", file=where
    )


def _number_of(found: x509.CertificateRevocationList) -> int | None:
    """Returns the number of a revocation list; None: it has none."""
    number = _extension(found, x509.CRLNumber)
    return None if number is None else number.crl_number


def _signed(found: x509.CertificateRevocationList, by: x509.Certificate) -> bool:
    key = by.public_key()
    try:
        return found.issuer == by.subject and found.is_signature_valid(key)  # type: ignore[arg-type]
    except UNREADABLE:
        return False


def names_of(host: str) -> x509.GeneralName:
    """Converts an address or host name to a certificate's form. Raises BadCertificate."""
    try:
        return x509.IPAddress(ipaddress.ip_address(host.strip("[]")))
    except ValueError:
        pass
    try:
        return x509.DNSName(host)
    except ValueError as error:
        raise BadCertificate(f"{host!r} is not a host name", remedy="use a DNS name or an IP address") from error


# -- Tokens ----------------------------------------------------------------------------------------------------------

#: prefix by which scanners for leaked secrets can find tokens
PREFIX: Final = "sftoken1_"
#: maximum length of a token's text; tokens of stateflow have about 1,600 characters
LENGTH_MAX = 64 << 10
SHORTEST, LONGEST = timedelta(minutes=1), timedelta(days=31)
#: roles that tokens may have; members that listen need certificates, which name their hosts
ROLES = frozenset({Role.READ, Role.QUERY, Role.DATA, Role.OPERATE, Role.ADMIN})
_ANOTHER = "issue another one: `stateflow token issue`"


class Parts(NamedTuple):
    """Contents of a token, as PEM."""

    ca: bytes
    cert: bytes
    key: bytes


def check_token(identity: Identity, lifetime: timedelta) -> None:
    """Checks that a token for an identity may be issued, with this lifetime. Raises InvalidArgument."""
    if identity.role not in ROLES:
        raise InvalidArgument(
            f"a token cannot carry the role {identity.role}", remedy="issue a certificate: `stateflow certs issue`"
        )
    if not SHORTEST <= lifetime <= LONGEST:
        raise InvalidArgument(
            f"a token cannot be valid for {lifetime}", remedy="choose 1m to 31d, or issue a certificate for longer"
        )


def encoded_token(ca: bytes, cert: bytes, key: bytes) -> str:
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


def decoded_token(text: str) -> Parts:
    """Decodes the text of a token. Raises BadCertificate, which reveals nothing of the contents."""
    text = text.strip()
    if not text.startswith(PREFIX) or len(text) > LENGTH_MAX:
        raise BadCertificate(
            f"the text is not a token: a token begins with {PREFIX} and has about 1,600 characters", remedy=_ANOTHER
        )
    inner = text.removeprefix(PREFIX)
    try:
        packed = base64.b64decode(inner + "=" * (-len(inner) % 4), altchars=b"-_", validate=True)
        if _text(packed) != text:  # RFC 4648, 3.5: a change of the last character's spare bits would go unnoticed
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
        # the cause is left out, because its traceback would show parts of the key
        raise BadCertificate("the token is damaged: a part of it is missing or altered", remedy=_ANOTHER) from None
    return made


def _der(cert: x509.Certificate) -> bytes:
    return cert.public_bytes(serialization.Encoding.DER)


def _pem(cert: x509.Certificate) -> bytes:
    return cert.public_bytes(serialization.Encoding.PEM)


# -- TLS files of a process ------------------------------------------------------------------------------------------


log = logging.getLogger(__name__)
#: minimum number of seconds between two checks of the files
LOOK_S = 1.0
#: the first warning is logged this long before the certificate expires, or when a quarter of its lifetime is left if
#: that is less; each further one when half of the remaining time has passed
SOON = timedelta(days=7)
LAST_SAID = timedelta(minutes=1)


@dataclass(frozen=True, slots=True)
class Material:
    """Contents of the TLS files. ``number`` grows with every change of the authority, the certificate or the key."""

    number: int
    ca: bytes
    cert: bytes
    key: bytes
    own: Certificate
    crl: RevocationList

    @property
    def revoked(self) -> frozenset[int]:
        """Serial numbers of the revoked certificates."""
        return self.crl.serials


def utc(clock: Clock) -> datetime:
    return datetime.fromtimestamp(clock.now_us() / 1e6, UTC)


class TlsFiles:
    """The TLS files of a process, or its token, which contains them. Changed files are used once they are valid; until
    then the former contents stay in use, because a certificate and its key are replaced one after the other.

    Raises BadCertificate if the files are not valid at the start.
    """

    def __init__(self, settings: ConnectionSettings, clock: Clock = SYSTEM_CLOCK) -> None:
        self._settings, self._clock = settings, clock
        paths = [settings.tls_ca, settings.tls_cert, settings.tls_key, settings.tls_crl, settings.token_file]
        self._paths = [path for path in paths if path]
        self._lock = threading.Lock()
        self._looked_at = clock.monotonic()
        self._seen = self._signature()
        self._unaccepted = ""  # error of the files that are there instead of those in use; empty: there are none
        self._material = self._read(0, RevocationList())
        self._said: tuple[int, timedelta] | None = None  # serial number, and time left at the last warning
        self._overdue: datetime | None = None  # end of the revocation list that was warned of
        self._say()

    def current(self) -> Material:
        """Returns the contents in use. The call is cheap and thread-safe."""
        if self._clock.monotonic() - self._looked_at >= LOOK_S:
            with self._lock:
                self._look()
        return self._material

    def _look(self) -> None:
        self._looked_at = self._clock.monotonic()
        seen = self._signature()
        if seen != self._seen:
            self._take(seen)
        self._say()

    def _take(self, seen: list[tuple[int, int, int] | None]) -> None:
        self._seen = seen
        try:
            found = self._read(self._material.number, self._material.crl)
        except BadCertificate as error:
            if str(error) != self._unaccepted:
                log.warning("changed TLS files are not valid, the former ones stay in use: %s", error)
            # read again at the next look: permissions and time may make them valid, which their signature does not show
            self._seen, self._unaccepted = [], str(error)
            return
        self._unaccepted = ""
        if found != self._material:
            log.info("changed TLS files are in use: %s until %s", found.own.identity, found.own.not_after)
            self._material = found

    def _say(self) -> None:
        """Warns when the certificate is about to expire, and once when the revocation list is overdue."""
        now, end = utc(self._clock), self._material.crl.next_update
        if end is not None and end < now and end != self._overdue:
            self._overdue = end
            log.warning(
                "the revocation list %s was due for renewal at %s UTC, and stays in use without certificates that were "
                "revoked since: copy the authority's present list over it",
                self._settings.tls_crl,
                f"{end:%Y-%m-%d %H:%M}",
            )
        own = self._material.own
        left = own.not_after - now
        due = min(SOON, (own.not_after - own.not_before) / 4)
        if self._said is not None and self._said[0] == own.serial:
            due = self._said[1] / 2
        if not LAST_SAID <= left <= due:
            return
        self._said = own.serial, left
        log.warning(
            "the certificate of %s expires at %s UTC, in %s: %s",
            own.identity,
            f"{own.not_after:%Y-%m-%d %H:%M}",
            timedelta(seconds=round(left.total_seconds())),
            "issue another token" if self._settings.by_token else "run `stateflow certs renew`, and replace the files",
        )

    def _signature(self) -> list[tuple[int, int, int] | None]:
        found: list[tuple[int, int, int] | None] = []
        for path in self._paths:
            try:
                status = os.stat(path)  # noqa: PTH116 - of four files a second
                found.append((status.st_ino, status.st_mtime_ns, status.st_size))
            except OSError:
                found.append(None)
        return found

    def _read(self, number: int, crl: RevocationList) -> Material:
        """Reads the files.

        Args:
            number: :attr:`Material.number` of the contents in use so far; 0: none are in use yet.
            crl: revocation list in use so far; empty: there is none.
        """
        settings = self._settings
        where = settings.tls_cert or settings.token_file or "STATEFLOW_TOKEN"
        if settings.by_token:
            ca, cert, key = decoded_token(self.token())
        else:
            ca, cert = _bytes(settings.tls_ca, "TLS_CA"), _bytes(settings.tls_cert, "TLS_CERT")
            _check_private(settings.tls_key)
            key = _bytes(settings.tls_key, "TLS_KEY")
        own = checked_pair(ca, cert, key, utc(self._clock), where, settings.tls_ca or where)
        if settings.tls_crl:
            crl = _newer(revoked_of(_bytes(settings.tls_crl, "TLS_CRL"), ca, settings.tls_crl), crl, settings.tls_crl)
        before = getattr(self, "_material", None)
        changed = before is None or (before.ca, before.cert, before.key) != (ca, cert, key)
        return Material(number + changed, ca, cert, key, own, crl)

    def token(self) -> str:
        """Returns the text of the present token; empty: the settings name none. Raises BadCertificate."""
        settings = self._settings
        if not settings.token_file:
            return settings.token.get_secret_value()
        _check_private(settings.token_file)
        return _bytes(settings.token_file, "TOKEN_FILE").decode("ascii", "replace")


def _newer(found: RevocationList, used: RevocationList, where: str) -> RevocationList:
    """Returns the list to use: the one that was found, unless the one in use is newer. Otherwise a person who puts an
    old list in place would make revoked certificates valid again.
    """
    if not found.is_older(used):
        return found
    log.warning(
        "the revocation list %s is refused: its number %d is below %d, that of the list in use, which stays in use",
        where,
        found.number,
        used.number,
    )
    return used


def _bytes(path: str, which: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise BadCertificate(
            f"the file of STATEFLOW_{which} cannot be read: {error.strerror}",
            remedy="correct the path in the environment or the settings file",
            file=path,
        ) from error


def _check_private(path: str) -> None:
    """Checks that others cannot read a file. Its group may read it, because Kubernetes hands secrets to a process in
    that way. Raises BadCertificate."""
    try:
        mode = stat.S_IMODE(Path(path).stat().st_mode)
    except OSError:
        return  # reported when it is read
    if os.name == "posix" and mode & stat.S_IRWXO:
        raise BadCertificate("the key or token is readable by other users", remedy=f"chmod 600 {path}", file=path)


# -- Callers ---------------------------------------------------------------------------------------------------------


class Caller:
    """The owner of a certificate, as the caller of this process. The certificate may be revoked or expire while the
    call runs.

    Args:
        method: the call, as the table of roles names it.
        pem: the certificate that the caller has shown.
        user: the user for whom it calls, whose rights count, too; None: it calls for itself.

    Raises BadCertificate, and NotAllowed if the certificate names no identity, or if the identity or the user may not
    make the call.
    """

    def __init__(self, files: TlsFiles, clock: Clock, method: str, pem: bytes, user: Identity | None = None) -> None:
        self._files, self._clock, self._method = files, clock, method
        self._certificate = certificate_of(pem)
        identity = self._certificate.identity
        if identity is None:
            raise NotAllowed(
                "the certificate has no stateflow identity",
                remedy="issue one with `stateflow certs issue`",
                call=method.rpartition("/")[2],
            )
        self.identity = identity
        self._ends_us = self._certificate.not_after.timestamp() * 1e6
        self.rule: Rule = check_call(method, identity)
        self.asker = Asker(identity, user)
        if user is not None:
            check_delegate(method, identity, user)
            with self._for_user():
                check_call(method, user)

    def check(self, request: Any = None) -> None:
        """Checks that the certificate is still valid, and that it allows a request. Raises NotAllowed.

        Args:
            request: the request; None: no request has arrived yet, and only the certificate is checked.
        """
        if self._certificate.serial in self._files.current().revoked:
            raise self._refused("was revoked")
        if self._clock.now_us() > self._ends_us:
            raise self._refused("has expired")
        if request is not None:
            check_request(self.rule, self._method, self.identity, request)
            if (user := self.asker.user) is not None:
                with self._for_user():
                    check_request(self.rule, self._method, user, request)

    @contextlib.contextmanager
    def _for_user(self) -> Iterator[None]:
        """Names the caller, which has to answer for its user, in a refusal of the user."""
        try:
            yield
        except NotAllowed as error:
            where = {**error.where, "who": self.identity, "user": self.asker.user}
            raise NotAllowed(error.what, remedy=error.remedy, **where) from error

    def _refused(self, why: str) -> NotAllowed:
        return NotAllowed(
            f"the certificate of {self.identity} {why}",
            remedy="use another certificate: `stateflow certs issue` or `renew`",
            call=self._method.rpartition("/")[2],
            who=self.identity,
            serial=f"{self._certificate.serial:x}",
        )
