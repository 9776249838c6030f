"""TLS files: refused with a reason when a process starts, ignored when they are wrong later."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from stateflow.clock import SYSTEM_CLOCK, ManualClock
from stateflow.errors import BadCertificate, InvalidArgument
from stateflow.security.authority import Authority
from stateflow.security.certificates import LOOK_S, RevocationList, TlsFiles, read_authorities
from stateflow.security.roles import Identity
from tests.unit.security.test_authority import NODE, settings


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    authority = Authority.init(tmp_path / "authority", "acme")
    authority.issue(NODE, ["h"], tmp_path / "x")
    return authority


def _another_authority(out: Path) -> None:
    other = Authority.init(out.parent / "other", "acme")
    other.issue(Identity.of("read", "r"), [], out.parent / "r")
    shutil.copy(out.parent / "r" / "ca.pem", out / "ca.pem")


def _another_key(out: Path) -> None:
    Authority(out.parent / "authority").issue(NODE, ["h"], out.parent / "y")
    shutil.copy(out.parent / "y" / "key.pem", out / "key.pem")


def _another_list(out: Path) -> None:
    shutil.copy(Authority.init(out.parent / "other", "b").crl, out / "crl.pem")


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (lambda out: (out / "key.pem").chmod(0o604), "is readable by other users.*chmod 600"),
        (lambda out: (out / "key.pem").write_text("no"), "the private key of the certificate cannot be read"),
        (lambda out: (out / "key.pem").unlink(), "STATEFLOW_TLS_KEY cannot be read: No such file"),
        (lambda out: (out / "cert.pem").write_text("no"), "no valid certificate found"),
        (lambda out: (out / "crl.pem").write_text("no"), "no valid revocation list found"),
        (_another_authority, "the certificate is from another authority"),
        (_another_key, "the key does not match the certificate"),
        (_another_list, "the revocation list is from another authority"),
    ],
)
def test_what_cannot_be_used(authority: Authority, tmp_path: Path, spoil: Callable[[Path], None], said: str) -> None:
    spoil(tmp_path / "x")
    with pytest.raises(BadCertificate, match=said):
        TlsFiles(settings(tmp_path / "x"))


#: a root that signed itself with SHA-1, which the library does not verify
OLD_ROOT = b"""-----BEGIN CERTIFICATE-----
MIIBcDCCARigAwIBAgIUCVudmUhnOUQS1yjxykmmaz3BriowCQYHKoZIzj0EATAP
MQ0wCwYDVQQDDARyb290MB4XDTI2MTIwMTE2MTMzMVoXDTI2MTIzMTE2MTMzMVow
DzENMAsGA1UEAwwEcm9vdDBZMBMGByqGSM49AgEGCCqGSM49AwEHA0IABLNl/yCh
fkh5FFENGy2yI7nvAOd1NsX37yA3vGA1Psp51VgA+G8Z/IehHCBGQXx77QbX++lK
bobcWxcsf2fLM7SjUzBRMB0GA1UdDgQWBBRWzXaU2dEHKP1MVTiyh+LUVSsUnzAf
BgNVHSMEGDAWgBRWzXaU2dEHKP1MVTiyh+LUVSsUnzAPBgNVHRMBAf8EBTADAQH/
MAkGByqGSM49BAEDRwAwRAIgSSJC6YofEJ4rIu03zPl8tv/oh2k4btdv93jzqbzp
YKwCIEz9KvPyv2tv4nDCtppQmpuLf3Hdt7ico5g/3499lCfL
-----END CERTIFICATE-----
"""


def test_authorities_of_others(authority: Authority) -> None:
    """An authority whose signer is not there, or whose signature is too old to be verified, is taken as it is."""
    root, between = ec.generate_private_key(ec.SECP256R1()), ec.generate_private_key(ec.SECP256R1())
    now, signer = datetime.now(UTC), x509.AuthorityKeyIdentifier.from_issuer_public_key(root.public_key())

    def signed(by: ec.EllipticCurvePrivateKey, *extensions: x509.ExtensionType) -> bytes:
        name, end = x509.Name([]), now + timedelta(days=1)
        builder = x509.CertificateBuilder(name, name, between.public_key(), 7, now, end)
        for each in extensions:
            builder = builder.add_extension(each, critical=False)
        return builder.sign(by, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)

    assert len(read_authorities(authority.ca + signed(root, signer) + OLD_ROOT, "ca")) == 3
    with pytest.raises(BadCertificate, match=r"the signature of an authority's certificate is not valid \(file=ca\)"):
        read_authorities(authority.ca + signed(root), "ca")


def test_a_group_may_read_the_key_as_in_kubernetes(authority: Authority, tmp_path: Path) -> None:
    (tmp_path / "x" / "key.pem").chmod(0o440)
    TlsFiles(settings(tmp_path / "x"))


@pytest.mark.parametrize(("days", "said"), [(91, "expired at"), (-1, r"not valid before .*clocks")])
def test_times(authority: Authority, tmp_path: Path, days: int, said: str) -> None:
    clock = ManualClock(SYSTEM_CLOCK.now_us() + days * 86_400_000_000)
    with pytest.raises(BadCertificate, match=said):
        TlsFiles(settings(tmp_path / "x"), clock)


def test_files_that_change(authority: Authority, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    out, clock = tmp_path / "x", ManualClock(SYSTEM_CLOCK.now_us())
    files = TlsFiles(settings(out), clock)
    first = files.current()
    old = (out / "key.pem").read_bytes()
    authority.renew(out)
    assert files.current() is first, "nobody looked yet"
    new = (out / "key.pem").read_bytes()
    (out / "key.pem").write_bytes(old)  # as if read between the two writes
    clock.advance(LOOK_S)
    assert files.current() is first
    assert "the former ones stay in use: bad_certificate: the key does not match the certificate" in caplog.text
    (out / "key.pem").write_bytes(new)
    (out / "key.pem").chmod(0o604)
    clock.advance(LOOK_S)
    files.current()
    assert files.current() is first
    clock.advance(LOOK_S)
    assert files.current() is first
    assert caplog.text.count("is readable by other users") == 1, "said once, but read again"
    (out / "key.pem").chmod(0o600)
    clock.advance(LOOK_S)
    second = files.current()
    assert second.number == first.number + 1
    assert second.own.serial != first.own.serial
    (revoked,) = [each for each in authority.revoke("edge-0") if each.serial == first.own.serial]
    shutil.copy(authority.crl, out / "crl.pem")
    clock.advance(LOOK_S)
    third = files.current()
    assert revoked.serial in third.revoked
    assert third.number == second.number, "connections need no others for that"
    (out / "crl.pem").unlink()
    clock.advance(LOOK_S)
    assert files.current() is third, "a list that is lost lets nobody in"


def test_all_three_or_none(monkeypatch: pytest.MonkeyPatch) -> None:
    from stateflow.security.plain import connection_settings, tls_files

    for which in ("CA", "CERT", "KEY", "CRL"):
        monkeypatch.delenv(f"STATEFLOW_TLS_{which}", raising=False)
    assert tls_files() is None
    monkeypatch.setenv("STATEFLOW_TLS_CA", "/x/ca.pem")
    with pytest.raises(
        InvalidArgument, match="TLS is only partly configured: STATEFLOW_TLS_CERT, STATEFLOW_TLS_KEY are not"
    ):
        connection_settings()
    monkeypatch.setenv("STATEFLOW_TLS_CERT", "/x/cert.pem")
    monkeypatch.setenv("STATEFLOW_TLS_KEY", "/x/key.pem")
    assert connection_settings().tls
    with pytest.raises(BadCertificate, match="the file of STATEFLOW_TLS_CA cannot be read"):
        tls_files()
    for which in ("CA", "CERT", "KEY"):
        monkeypatch.delenv(f"STATEFLOW_TLS_{which}")
    monkeypatch.setenv("STATEFLOW_TLS_CRL", "/x/crl.pem")
    with pytest.raises(InvalidArgument, match="partly configured"):
        connection_settings()


def test_it_is_said_before_it_expires_and_again_when_half_of_that_has_passed(
    authority: Authority, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    clock = ManualClock(SYSTEM_CLOCK.now_us())
    files = TlsFiles(settings(tmp_path / "x"), clock)
    said = []
    for day in range(92):
        caplog.clear()
        clock.advance(86_400)
        files.current()
        said += [day + 1 for record in caplog.records if "expires at" in record.message]
    assert said == [83, 87, 89], "7, 3.5 and 1.75 days are left at most; it lasts for 90"
    authority.renew(tmp_path / "x")
    caplog.clear()
    late = ManualClock(SYSTEM_CLOCK.now_us() + 85 * 86_400 * 10**6)
    TlsFiles(settings(tmp_path / "x"), late)
    (record,) = caplog.records
    assert "the certificate of node/edge-0 expires at" in record.message
    assert record.message.endswith("`stateflow certs renew`, and replace the files")


# -- revocation lists -------------------------------------------------------------------------------------------


def revocations(authority: Authority, number: int | None, *serials: int, days: float = 30) -> bytes:
    """Makes a revocation list, as another program with the authority's key would."""
    folder, now = authority.crl.parent, datetime.now(UTC)
    key = serialization.load_pem_private_key((folder / "ca.key").read_bytes(), None)
    assert isinstance(key, ec.EllipticCurvePrivateKey)
    issuer = x509.load_pem_x509_certificate(authority.ca).subject
    builder = x509.CertificateRevocationListBuilder(issuer, now, now + timedelta(days=days))
    for serial in serials:
        builder = builder.add_revoked_certificate(x509.RevokedCertificateBuilder(serial, now).build())
    if number is not None:
        builder = builder.add_extension(x509.CRLNumber(number), critical=False)
    return builder.sign(key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)


def test_an_old_list_does_not_take_the_place_of_a_newer_one(
    authority: Authority, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    out, clock = tmp_path / "x", ManualClock(SYSTEM_CLOCK.now_us())

    def put(number: int | None, *serials: int) -> frozenset[int]:
        """Puts a list in place. Returns the serials that are revoked from then on."""
        (out / "crl.pem").write_bytes(revocations(authority, number, *serials))
        clock.advance(LOOK_S)
        files.current()
        clock.advance(LOOK_S)
        return files.current().revoked

    (out / "crl.pem").write_bytes(revocations(authority, 5, 7))
    files = TlsFiles(settings(out), clock)
    assert put(4) == {7}
    said = [record.message for record in caplog.records if "is refused" in record.message]
    assert said == [
        f"the revocation list {out / 'crl.pem'} is refused: its number 4 is below 5, that of the list in use, "
        "which stays in use"
    ]
    authority.renew(out)
    before = files.current()
    assert put(3) == {7}
    assert files.current().own.serial != before.own.serial, "the certificate beside it is in use"
    assert put(5, 7, 8) == {7, 8}
    assert put(6, 8) == {8}
    assert put(None, 9) == {9}, "a list without a number is neither older nor newer"
    assert put(1, 10) == {10}


def test_lists_of_two_authorities_are_not_compared() -> None:
    old, new = RevocationList(number=1, signer=b"a"), RevocationList(number=2, signer=b"a")
    assert old.is_older(new)
    assert not new.is_older(old)
    assert not old.is_older(replace(new, signer=b"b"))


def test_a_list_that_is_past_its_time_is_said_once_and_stays_in_use(
    authority: Authority, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    out, clock = tmp_path / "x", ManualClock(SYSTEM_CLOCK.now_us())
    (out / "crl.pem").write_bytes(revocations(authority, 5, 7, days=0.5))
    files, said = TlsFiles(settings(out), clock), []
    for day in range(1, 9):
        caplog.clear()
        clock.advance(86_400)
        assert files.current().revoked == {7}
        said += [day for record in caplog.records if "was due for renewal at" in record.message]
        if day == 4:
            (out / "crl.pem").write_bytes(revocations(authority, 6, 7, days=5.5))
    assert said == [1, 6]
