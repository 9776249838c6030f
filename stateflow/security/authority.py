"""A private certificate authority, kept in a directory.

The directory contains the authority's key (``ca.key``), its certificate (``ca.pem``), its revocation list
(``crl.pem``), and each certificate that it has issued (``issued/SERIAL.pem``). A certificate is recorded there before
it is issued, because an unrecorded one could not be revoked.

The directory of a process contains the process's certificate (``cert.pem``) and key (``key.pem``), ``ca.pem`` and
``crl.pem``. Environment variables tell the process where these files are, see :mod:`stateflow.security.plain`.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import stat
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from stateflow.clock import SYSTEM_CLOCK, Clock
from stateflow.durable import listed, write_durably
from stateflow.errors import BadCertificate, InvalidArgument
from stateflow.private import UMASK
from stateflow.security.certificates import (
    UNREADABLE,
    Certificate,
    check_token,
    described,
    encoded_token,
    names_of,
    read_authorities,
    read_certificates,
    revoked_of,
    utc,
)
from stateflow.security.plain import CA, CRL, OWN_CERT, OWN_KEY
from stateflow.security.roles import Identity

KEY, ISSUED, LOCK = "ca.key", "issued", ".lock"
AUTHORITY_DAYS, DAYS, DAYS_MAX = 3650, 90, 825
#: maximum difference assumed between the clocks of two machines
SKEW = timedelta(minutes=5)


@dataclass(frozen=True, slots=True)
class Issued:
    certificate: Certificate
    revoked: bool

    def state(self, now: datetime) -> str:
        if self.revoked:
            return "revoked"
        return "expired" if now > self.certificate.not_after else "valid"


class Authority:
    """A certificate authority. Raises BadCertificate if the directory holds no authority, if its files are damaged, or
    if other users can read the authority's key.
    """

    def __init__(self, directory: Path, clock: Clock = SYSTEM_CLOCK) -> None:
        self._directory, self._clock = directory, clock
        # the directory of a process has the authority's certificate, too, but nothing else of an authority
        is_own = (directory / KEY).exists() or (directory / ISSUED).is_dir()
        if not (is_own and _is_made(directory)):
            raise BadCertificate(
                "no certificate authority found",
                remedy="make one with `stateflow certs init`, or pass its directory with --dir",
                dir=directory,
            )
        self._key = _key_in(directory)
        try:
            self._cert = read_authorities((directory / CA).read_bytes(), directory / CA)[0]
        except (OSError, *UNREADABLE) as error:
            raise _unreadable(directory, error) from error
        if self._cert.public_key() != self._key.public_key():
            raise BadCertificate(
                "the authority's key does not match its certificate",
                remedy="restore both from a backup",
                dir=directory,
            )

    @classmethod
    def init(cls, directory: Path, name: str, clock: Clock = SYSTEM_CLOCK, days: int = AUTHORITY_DAYS) -> Authority:
        """Makes an authority in a directory. An init that was cut off is completed, with the key that it made.

        Raises BadCertificate if the directory contains an authority already.
        """
        if _is_made(directory):
            raise BadCertificate(
                "an authority already exists", remedy="use it, or pass another directory with --dir", dir=directory
            )
        directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        (directory / ISSUED).mkdir(exist_ok=True, mode=0o700)
        if (directory / KEY).exists():
            key = _key_in(directory)
        else:
            key = ec.generate_private_key(ec.SECP256R1())
            write_durably(directory / KEY, _private(key), 0o600)
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        now = utc(clock)
        identifier = x509.SubjectKeyIdentifier.from_public_key(key.public_key())
        cert = (
            _builder(subject, subject, key.public_key(), now, timedelta(days=days))
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .add_extension(_usage(signs_certificates=True), critical=True)
            .add_extension(identifier, critical=False)
            .sign(key, hashes.SHA256())
        )
        write_durably(directory / CRL, _revocation_list(key, cert, now, [], 0), 0o644)
        write_durably(directory / CA, _pem(cert), 0o644)  # last, because an authority that has it is complete
        return cls(directory, clock)

    @classmethod
    def open_or_init(cls, directory: Path, name: str) -> Authority:
        """Returns the authority in a directory, and makes it if there is none, see :meth:`init`. Raises
        BadCertificate."""
        return cls(directory) if _is_made(directory) else cls.init(directory, name)

    # -- issuing ------------------------------------------------------------------------------------------

    def issue(self, identity: Identity, hosts: Sequence[str], out: Path, days: int = DAYS) -> Certificate:
        """Issues a certificate. Writes it into the directory ``out``, with its key, the authority's certificate and the
        revocation list. Raises InvalidArgument, or BadCertificate, also if ``out`` contains a certificate of another
        identity."""
        there = read_own(out)
        if there is not None and there.identity != identity:
            raise BadCertificate(
                f"the directory holds a certificate of {there.identity}",
                remedy="pass another directory with --out",
                dir=out,
            )
        return self._issue(identity, hosts, out, days)

    def renew(self, out: Path, days: int = DAYS) -> Certificate:
        """Issues another certificate, with another key, to the identity whose certificate is in ``out``. Raises
        BadCertificate, also if the present certificate was revoked or another authority issued it."""
        there = read_own(out)
        if there is None or there.identity is None:
            raise BadCertificate(
                "there is no certificate to renew", remedy="issue one with `stateflow certs issue`", dir=out
            )
        with self._alone():  # a revocation meanwhile would not know the new certificate
            if not any(each.certificate.serial == there.serial for each in self.issued()):
                raise BadCertificate(
                    "the certificate was issued by another authority", remedy="pass that authority with --dir", dir=out
                )
            if self.has_revoked(there.serial):
                raise BadCertificate(
                    "the certificate was revoked",
                    remedy="if the reason is gone, issue another one with `stateflow certs issue`",
                    dir=out,
                )
            return self._issue(there.identity, there.hosts, out, days)

    def _issue(self, identity: Identity, hosts: Sequence[str], out: Path, days: int) -> Certificate:
        _check_wanted(identity, hosts, days)
        key, cert = self._signed(identity, hosts, timedelta(days=days))
        write_own(out, _private(key), _pem(cert), self.ca)
        write_durably(out / CRL, (self._directory / CRL).read_bytes(), 0o644)
        return described(cert)

    def certify(self, identity: Identity, hosts: Sequence[str], request: bytes) -> bytes:
        """Issues a certificate, as PEM, for the key of a ``request``, which the requester has made, see
        :func:`own_request`. Names in the request are ignored. Raises BadCertificate, InvalidArgument."""
        _check_wanted(identity, hosts, DAYS)
        try:
            asked = x509.load_pem_x509_csr(request)
            sound, key = asked.is_signature_valid, asked.public_key()
        except UNREADABLE as error:
            raise BadCertificate(f"the request cannot be read: {error}", remedy="send it as PEM") from error
        if not sound or not isinstance(key, ec.EllipticCurvePublicKey):
            raise BadCertificate(
                "the request is not signed with its own elliptic curve key", remedy="sign it with that key"
            )
        return _pem(self._cert_of(identity, hosts, timedelta(days=DAYS), key))

    @property
    def ca(self) -> bytes:
        """The authority's own certificate, as PEM."""
        return (self._directory / CA).read_bytes()

    def token(self, identity: Identity, lifetime: timedelta) -> tuple[str, Certificate]:
        """Issues a token. Returns its text, which is stored nowhere else, and its certificate. Raises InvalidArgument,
        BadCertificate."""
        check_token(identity, lifetime)
        key, cert = self._signed(identity, [], lifetime)
        return encoded_token(self.ca, _pem(cert), _private(key)), described(cert)

    def _signed(
        self, identity: Identity, hosts: Sequence[str], lifetime: timedelta
    ) -> tuple[ec.EllipticCurvePrivateKey, x509.Certificate]:
        key = ec.generate_private_key(ec.SECP256R1())
        return key, self._cert_of(identity, hosts, lifetime, key.public_key())

    def _cert_of(
        self, identity: Identity, hosts: Sequence[str], lifetime: timedelta, key: ec.EllipticCurvePublicKey
    ) -> x509.Certificate:
        now = utc(self._clock)
        end = now + lifetime
        if end > self._cert.not_valid_after_utc:
            raise BadCertificate(
                "the certificate would outlive the authority, which expires on "
                f"{self._cert.not_valid_after_utc:%Y-%m-%d}",
                remedy="ask for a shorter time; or make another authority in another directory, and keep both in the "
                "CA files during the change",
            )
        names = [x509.UniformResourceIdentifier(identity.uri), *map(names_of, hosts)]
        uses = [ExtendedKeyUsageOID.CLIENT_AUTH]
        if identity.role.listens:
            uses.append(ExtendedKeyUsageOID.SERVER_AUTH)
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, str(identity)[:64])])
        issuer_key = x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key())
        cert = (
            _builder(subject, self._cert.subject, key, now, lifetime)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(_usage(signs_certificates=False), critical=True)
            .add_extension(x509.ExtendedKeyUsage(uses), critical=False)
            .add_extension(x509.SubjectAlternativeName(names), critical=False)
            .add_extension(issuer_key, critical=False)
            .sign(self._key, hashes.SHA256())
        )
        # recorded before it is handed out: an unrecorded certificate could not be revoked
        write_durably(self._directory / ISSUED / f"{cert.serial_number:x}.pem", _pem(cert), 0o644)
        return cert

    # -- revoking -----------------------------------------------------------------------------------------

    def revoke(self, who: str) -> list[Certificate]:
        """Revokes certificates. Returns those that this call revoked.

        Args:
            who: ``node/edge-0``, or ``edge-0`` if only one role has that name, or a serial number in hexadecimal.

        Raises BadCertificate if nothing was issued to ``who``, or several roles have that name.
        """
        with self._alone():
            now, issued = utc(self._clock), self.issued()
            found = [each for each in issued if who in _names(each.certificate)]
            roles = sorted({str(each.certificate.identity) for each in found})
            if not found:
                raise BadCertificate(f"no certificate was issued to {who!r}", remedy="see `stateflow certs list`")
            if len(roles) > 1:
                raise BadCertificate(f"{who!r} is ambiguous: {' or '.join(roles)}", remedy="name one of them")
            ended = [each.certificate for each in found if each.state(now) == "valid"]
            serials, number = self._listed()
            serials += [each.serial for each in ended]
            write_durably(self.crl, _revocation_list(self._key, self._cert, now, serials, number), 0o644)
            return ended

    def issued(self) -> list[Issued]:
        (revoked, _), found = self._listed(), list[Issued]()
        for path in listed(self._directory / ISSUED, "*.pem"):
            certificate = described(read_certificates(path.read_bytes(), path)[0])
            found.append(Issued(certificate, certificate.serial in revoked))
        return sorted(found, key=lambda each: (str(each.certificate.identity), each.certificate.not_before))

    def has_revoked(self, serial: int) -> bool:
        """Tells whether the revocation list names this serial number. Raises BadCertificate if it cannot be read."""
        return serial in self._listed()[0]

    @property
    def crl(self) -> Path:
        """Path of the revocation list. When it has changed, copy it to all servers."""
        return self._directory / CRL

    def _listed(self) -> tuple[list[int], int]:
        """Returns the revoked serials, and the number of the list; 0: an earlier version wrote the list without a
        number.
        """
        try:
            found = revoked_of(self.crl.read_bytes(), _pem(self._cert), self.crl)
        except OSError as error:
            raise BadCertificate(
                f"the revocation list cannot be read: {error}", remedy="restore it from a backup", file=self.crl
            ) from error
        return sorted(found.serials), found.number or 0

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        """Keeps other processes and threads from changing the revocation list meanwhile. Raises OSError."""
        with (self._directory / LOCK).open("a") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield


def _is_made(directory: Path) -> bool:
    """Tells whether an authority was made in a directory; an init that was cut off made none."""
    return (directory / CA).exists() or ((directory / KEY).exists() and bool(listed(directory / ISSUED, "*.pem")))


def _key_in(directory: Path) -> ec.EllipticCurvePrivateKey:
    """Returns the key of an authority. Raises BadCertificate, also if other users can read it."""
    path = directory / KEY
    try:
        if os.name == "posix" and stat.S_IMODE(path.stat().st_mode) & UMASK:
            raise BadCertificate(
                "the authority's key is readable by other users", remedy=f"chmod 600 {path}", file=path
            )
        key = serialization.load_pem_private_key(path.read_bytes(), None)
    except (OSError, *UNREADABLE) as error:
        raise _unreadable(directory, error) from error
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise BadCertificate(
            "the authority's key is not an elliptic curve key",
            remedy="make another authority with `stateflow certs init`",
        )
    return key


def _unreadable(directory: Path, error: Exception) -> BadCertificate:
    return BadCertificate(f"the authority cannot be read: {error}", remedy="restore it from a backup", dir=directory)


def _revocation_list(
    key: ec.EllipticCurvePrivateKey, cert: x509.Certificate, now: datetime, serials: Iterable[int], number: int
) -> bytes:
    """Returns the next revocation list, as PEM.

    Args:
        number: number of the present list.
    """
    builder = x509.CertificateRevocationListBuilder(cert.subject, now, cert.not_valid_after_utc)
    for serial in dict.fromkeys(serials):
        builder = builder.add_revoked_certificate(x509.RevokedCertificateBuilder(serial, now).build())
    # at least the present time, so that numbers also rise after a restore from a backup: servers refuse a list with
    # a smaller number
    following = x509.CRLNumber(max(number + 1, int(now.timestamp())))
    signed = builder.add_extension(following, critical=False).sign(key, hashes.SHA256())
    return signed.public_bytes(serialization.Encoding.PEM)


def read_own(out: Path) -> Certificate | None:
    """Returns the certificate that was issued into ``out``. None: there is none. Raises BadCertificate."""
    try:
        return described(read_certificates((out / OWN_CERT).read_bytes(), out / OWN_CERT)[0])
    except FileNotFoundError:
        return None
    except OSError as error:
        raise BadCertificate(
            f"the certificate cannot be read: {error}", remedy="check the permissions of its file", dir=out
        ) from error


def write_own(out: Path, key: bytes, cert: bytes, ca: bytes) -> None:
    """Writes PEM files into ``out``, and makes that directory; only the owner can read the key. Raises OSError."""
    out.mkdir(parents=True, exist_ok=True, mode=0o700)
    # a process that reads in between finds a key and a certificate that do not match, and keeps using its former files
    write_durably(out / OWN_KEY, key, 0o600)
    write_durably(out / OWN_CERT, cert, 0o644)
    write_durably(out / CA, ca, 0o644)


def own_request() -> tuple[bytes, bytes]:
    """Returns a new key, and a request for its certificate, both as PEM. The key need not leave this machine."""
    key = ec.generate_private_key(ec.SECP256R1())
    request = x509.CertificateSigningRequestBuilder().subject_name(x509.Name([])).sign(key, hashes.SHA256())
    return _private(key), request.public_bytes(serialization.Encoding.PEM)


def _check_wanted(identity: Identity, hosts: Sequence[str], days: int) -> None:
    """Checks that a certificate with these contents may be issued. Raises BadCertificate, InvalidArgument."""
    if identity.role.listens and not hosts:
        raise BadCertificate(
            f"{identity} is a server, and its certificate must name its hosts",
            remedy="pass --host for each name and address that others use for it",
        )
    if not 0 < days <= DAYS_MAX:
        raise InvalidArgument(f"a validity of {days} days is not allowed", remedy=f"choose 1 to {DAYS_MAX}")


def _names(certificate: Certificate) -> set[str]:
    identity = certificate.identity
    return {f"{certificate.serial:x}", str(identity), "" if identity is None else identity.name}


def _builder(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePublicKey, now: datetime, lifetime: timedelta
) -> x509.CertificateBuilder:
    return x509.CertificateBuilder(issuer, subject, key, x509.random_serial_number(), now - SKEW, now + lifetime)


def _usage(signs_certificates: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs_certificates,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=signs_certificates,
        crl_sign=signs_certificates,
        encipher_only=False,
        decipher_only=False,
    )


def _pem(cert: x509.Certificate) -> bytes:
    return cert.public_bytes(serialization.Encoding.PEM)


def _private(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )


def write_private(path: Path, data: bytes) -> None:
    """Writes a file that only its owner can read. Raises BadCertificate if it cannot be written."""
    try:
        write_durably(path, data, 0o600)
    except OSError as error:
        raise BadCertificate(
            f"the file cannot be written: {error.strerror}",
            remedy="make its directory writable, or name another file",
            file=path,
        ) from error
