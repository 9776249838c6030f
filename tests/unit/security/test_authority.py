"""A user's own certificate authority: what it writes, what it refuses, and that each file is whole and private."""

from __future__ import annotations

import base64
import contextlib
import fcntl
import re
import shutil
import stat
import threading
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import serialization
from hypothesis import assume, given
from hypothesis import strategies as st

from stateflow.clock import SYSTEM_CLOCK, ManualClock
from stateflow.durable import write_durably
from stateflow.errors import BadCertificate, InvalidArgument
from stateflow.security.authority import Authority, own_request, read_own, write_own
from stateflow.security.certificates import UNREADABLE, TlsFiles, revoked_of
from stateflow.security.roles import Identity
from stateflow.settings import ConnectionSettings

NODE = Identity.of("node", "edge-0")


@pytest.fixture
def synced(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Collects the directories that are synced."""
    found: list[Path] = []
    monkeypatch.setattr("stateflow.durable.sync", found.append)
    return found


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority.init(tmp_path / "authority", "acme")


def settings(out: Path, **other: str) -> ConnectionSettings:
    files = {"tls_ca": "ca.pem", "tls_cert": "cert.pem", "tls_key": "key.pem", "tls_crl": "crl.pem"}
    return ConnectionSettings(**({name: str(out / file) for name, file in files.items()} | other))  # type: ignore[arg-type]


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_what_is_issued_can_be_used(authority: Authority, tmp_path: Path) -> None:
    out = tmp_path / "edge-0"
    issued = authority.issue(NODE, ["edge-0.lan", "127.0.0.1", "::1"], out)
    assert (issued.identity, set(issued.hosts), issued.serves) == (NODE, {"edge-0.lan", "127.0.0.1", "::1"}, True)
    assert timedelta(days=89) < issued.not_after - issued.not_before < timedelta(days=91)
    assert TlsFiles(settings(out)).current().own == issued == read_own(out)
    assert mode(out / "key.pem") == mode(tmp_path / "authority" / "ca.key") == 0o600
    assert mode(tmp_path / "authority") == mode(out) == 0o700
    client = authority.issue(Identity.of("data", "gw", ("Pumps",)), [], tmp_path / "gw")
    assert not client.serves, "a client's certificate is no server's"


def test_a_key_that_is_made_elsewhere_stays_there(authority: Authority, tmp_path: Path) -> None:
    key, request = own_request()
    cert = authority.certify(NODE, ["127.0.0.1"], request)
    write_own(tmp_path / "own", key, cert, authority.ca)
    own = TlsFiles(settings(tmp_path / "own", tls_crl="")).current().own
    assert (own.identity, own.hosts) == (NODE, ("127.0.0.1",))
    assert mode(tmp_path / "own") == 0o700
    assert mode(tmp_path / "own" / "key.pem") == 0o600
    assert [each.certificate for each in authority.issued()] == [own], "it can be revoked"
    with pytest.raises(BadCertificate, match="its certificate must name its hosts"):
        authority.certify(NODE, [], request)
    for damaged in (b"", b"nothing", request[:-60], authority.ca):
        with pytest.raises(BadCertificate):
            authority.certify(NODE, ["127.0.0.1"], damaged)


def test_renewing_and_revoking(authority: Authority, tmp_path: Path) -> None:
    out = tmp_path / "edge-0"
    first = authority.issue(NODE, ["edge-0.lan"], out)
    key = (out / "key.pem").read_bytes()
    second = authority.renew(out)
    assert (second.identity, second.hosts) == (first.identity, first.hosts)
    assert second.serial != first.serial
    assert (out / "key.pem").read_bytes() != key
    assert {(each.certificate.serial, each.revoked) for each in authority.issued()} == {
        (first.serial, False),
        (second.serial, False),
    }
    assert {each.serial for each in authority.revoke("node/edge-0")} == {first.serial, second.serial}
    assert authority.revoke("edge-0") == [], "they were already"
    ca = (out / "ca.pem").read_bytes()
    assert revoked_of(authority.crl.read_bytes(), ca, "").serials == {first.serial, second.serial}
    with pytest.raises(BadCertificate, match="the certificate was revoked"):
        authority.renew(out)
    authority.issue(NODE, ["edge-0.lan"], out)
    third = read_own(out)
    assert third is not None
    assert authority.revoke(f"{third.serial:x}") == [third], "one by its number"


def test_what_is_refused(authority: Authority, tmp_path: Path) -> None:
    with pytest.raises(BadCertificate, match="an authority already exists"):
        Authority.init(tmp_path / "authority", "again")
    with pytest.raises(BadCertificate, match=r"no certificate authority found .*stateflow certs init"):
        Authority(tmp_path / "nowhere")
    with pytest.raises(BadCertificate, match=r"is a server.*--host"):
        authority.issue(NODE, [], tmp_path / "x")
    with pytest.raises(BadCertificate, match="not a host name"):
        authority.issue(NODE, ["ümläut"], tmp_path / "x")
    with pytest.raises(InvalidArgument, match="days is not allowed"):
        authority.issue(NODE, ["h"], tmp_path / "x", 9999)
    with pytest.raises(BadCertificate, match="no certificate was issued to 'x'"):
        authority.revoke("x")
    with pytest.raises(BadCertificate, match="there is no certificate to renew"):
        authority.renew(tmp_path / "x")
    authority.issue(NODE, ["h"], tmp_path / "x")
    with pytest.raises(BadCertificate, match="holds a certificate of node/edge-0"):
        authority.issue(Identity.of("admin", "alice"), [], tmp_path / "x")
    authority.issue(Identity.of("admin", "edge-0"), [], tmp_path / "y")
    with pytest.raises(BadCertificate, match="ambiguous: admin/edge-0 or node/edge-0"):
        authority.revoke("edge-0")
    other = Authority.init(tmp_path / "other", "other")
    with pytest.raises(BadCertificate, match="issued by another authority"):
        other.renew(tmp_path / "x")
    (tmp_path / "authority" / "ca.key").chmod(0o640)
    with pytest.raises(BadCertificate, match=r"is readable by other users.*chmod 600"):
        Authority(tmp_path / "authority")


def test_an_authority_ends_too(tmp_path: Path) -> None:
    clock = ManualClock(SYSTEM_CLOCK.now_us())
    authority = Authority.init(tmp_path / "authority", "acme", clock, days=100)
    clock.advance(20 * 86_400)
    with pytest.raises(BadCertificate, match="would outlive the authority, which expires on"):
        authority.issue(NODE, ["h"], tmp_path / "x")


@given(st.data())
def test_files_that_are_damaged_anywhere_are_refused_by_name(whole: Path, data: st.DataObject) -> None:
    """A flipped bit also makes unknown curves, versions and names, each with an error of its own."""
    name = data.draw(st.sampled_from(["ca.pem", "ca.key", "crl.pem"]))
    with flipped(whole / name, data), refused(whole):
        Authority(whole).issued()


@given(st.data())
def test_a_members_authority_that_is_damaged_anywhere_is_refused_by_name(whole: Path, data: st.DataObject) -> None:
    """A member whose authority has another name or time than that of the others would fail at its first connection."""
    out = whole / "member"
    if not out.exists():
        Authority(whole).issue(NODE, ["h"], out)
    with flipped(out / "ca.pem", data), refused(out / "ca.pem"):
        TlsFiles(settings(out))


@contextlib.contextmanager
def flipped(path: Path, data: st.DataObject) -> Iterator[None]:
    """Flips one bit of a PEM file, and then restores the file. A bit that changes no meaning is not drawn."""
    pem = path.read_bytes()
    head, *lines, tail = pem.splitlines()
    der = bytearray(base64.b64decode(b"".join(lines)))
    der[data.draw(st.integers(0, len(der) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    damaged = b"\n".join([head, base64.encodebytes(der).strip(), tail, b""])
    assume(meaning(damaged) != meaning(pem))
    path.write_bytes(damaged)
    try:
        yield
    finally:
        path.write_bytes(pem)


def meaning(pem: bytes) -> object:
    """Returns what a PEM text says; text that cannot be read says itself."""
    try:
        if b"CRL" in pem:
            listed = x509.load_pem_x509_crl(pem)
            return listed.tbs_certlist_bytes, listed.signature
        if b"KEY" in pem:
            key = serialization.load_pem_private_key(pem, None)
            return key.private_bytes(
                serialization.Encoding.DER, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
            )
        cert = x509.load_pem_x509_certificate(pem)
        return cert.tbs_certificate_bytes, cert.signature
    except UNREADABLE:
        return pem


@contextlib.contextmanager
def refused(where: Path) -> Iterator[None]:
    with pytest.raises(BadCertificate, match=re.escape(str(where))):
        yield


def test_a_key_of_another_authority_is_refused(authority: Authority, tmp_path: Path) -> None:
    Authority.init(tmp_path / "other", "other")
    shutil.copy(tmp_path / "other" / "ca.key", tmp_path / "authority" / "ca.key")
    with pytest.raises(BadCertificate, match=r"the authority's key does not match its certificate.*authority"):
        Authority(tmp_path / "authority")


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("authority") / "a"
    Authority.init(directory, "acme")
    return directory


def test_a_revocation_is_durable(authority: Authority, tmp_path: Path, synced: list[Path]) -> None:
    issued = authority.issue(NODE, ["h"], tmp_path / "x")
    synced.clear()
    authority.revoke(f"{issued.serial:x}")
    assert synced[-1] == authority.crl.parent


def test_each_revocation_list_has_a_greater_number(tmp_path: Path) -> None:
    """The numbers rise in one second, and after the authority was restored from a backup."""
    clock = ManualClock(SYSTEM_CLOCK.now_us())
    authority = Authority.init(tmp_path / "authority", "acme", clock)
    authority.issue(NODE, ["h"], tmp_path / "x")
    backup = authority.crl.read_bytes()

    def number() -> int:
        found = revoked_of(authority.crl.read_bytes(), authority.ca, "").number
        assert found is not None
        return found

    numbers = [number()]
    for _ in range(3):
        authority.revoke("edge-0")
        numbers.append(number())
    authority.crl.write_bytes(backup)
    clock.advance(60)
    authority.revoke("edge-0")
    numbers.append(number())
    assert numbers == sorted(set(numbers))


def test_revocations_at_once_keep_each_other(
    authority: Authority, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("first", "second"):
        authority.issue(Identity.of("read", name), [], tmp_path / name)
    came, locked = threading.Event(), fcntl.flock

    def second() -> None:
        authority.revoke("second")
        came.set()

    other = threading.Thread(target=second)

    def lock(*arguments: Any) -> None:
        if threading.current_thread() is other:
            came.set()
        locked(*arguments)

    def write(path: Path, *arguments: Any) -> None:
        if threading.current_thread() is not other:  # the first has read the list, and has not written it yet
            other.start()
            came.wait()
        write_durably(path, *arguments)

    monkeypatch.setattr("fcntl.flock", lock)
    monkeypatch.setattr("stateflow.security.authority.write_durably", write)
    authority.revoke("first")
    other.join()
    assert all(each.revoked for each in authority.issued())


@pytest.mark.parametrize("last", ["ca.key", "crl.pem", "ca.pem"])
def test_an_init_that_was_cut_off_can_be_repeated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, last: str) -> None:
    def write(path: Path, *arguments: Any) -> None:
        if path.name == last:
            raise OSError("no space left")
        write_durably(path, *arguments)

    with monkeypatch.context() as patch:
        patch.setattr("stateflow.security.authority.write_durably", write)
        with pytest.raises(OSError, match="no space left"):
            Authority.init(tmp_path / "a", "acme")
    with pytest.raises(BadCertificate, match=r"no certificate authority found .*stateflow certs init"):
        Authority(tmp_path / "a")
    again = Authority.init(tmp_path / "a", "acme")
    again.issue(NODE, ["h"], tmp_path / "x")
    assert len(again.revoke("edge-0")) == 1


@pytest.mark.parametrize("kept", [[], ["ca.key"], ["ca.key", "crl.pem"]])
def test_an_authority_is_opened_or_else_its_making_is_completed(kept: list[str], tmp_path: Path) -> None:
    first = Authority.open_or_init(tmp_path / "a", "acme")
    assert Authority.open_or_init(tmp_path / "a", "acme").ca == first.ca
    for name in {"ca.key", "crl.pem", "ca.pem"} - set(kept):
        (tmp_path / "a" / name).unlink()
    again = Authority.open_or_init(tmp_path / "a", "acme")
    again.issue(NODE, ["h"], tmp_path / "x")
    (tmp_path / "a" / "ca.pem").unlink()
    with pytest.raises(BadCertificate, match="restore it from a backup"):
        Authority.open_or_init(tmp_path / "a", "acme")


def test_the_directory_of_a_process_is_no_authority(authority: Authority, tmp_path: Path) -> None:
    """The advice was to restore a key that had never been in that directory."""
    authority.issue(NODE, ["h"], tmp_path / "x")
    with pytest.raises(BadCertificate, match=r"no certificate authority found .*--dir"):
        Authority(tmp_path / "x")


def test_a_key_that_is_kept_elsewhere_is_not_replaced(authority: Authority, tmp_path: Path) -> None:
    authority.issue(NODE, ["h"], tmp_path / "x")
    (tmp_path / "authority" / "ca.key").unlink()
    with pytest.raises(BadCertificate, match=r"No such file.*ca\.key.*restore it from a backup"):
        Authority(tmp_path / "authority")
    with pytest.raises(BadCertificate, match="an authority already exists"):
        Authority.init(tmp_path / "authority", "again")
