"""Tokens: their content, who may have one, and that an error about a damaged token reveals nothing of it."""

from __future__ import annotations

import stat
from datetime import timedelta
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stateflow.clock import SYSTEM_CLOCK, ManualClock
from stateflow.errors import BadCertificate, InvalidArgument
from stateflow.security import plain
from stateflow.security.authority import Authority, write_private
from stateflow.security.certificates import LENGTH_MAX, LOOK_S, PREFIX, TlsFiles, decoded_token
from stateflow.security.roles import Identity
from stateflow.settings import ConnectionSettings

PUMPS = Identity.of("data", "job", ("Pumps",))


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority.init(tmp_path / "authority", "acme")


@pytest.fixture
def token(authority: Authority) -> str:
    return authority.token(PUMPS, timedelta(hours=8))[0]


def test_it_is_a_certificate_of_some_hours(authority: Authority, tmp_path: Path) -> None:
    text, said = authority.token(PUMPS, timedelta(hours=8))
    assert text.startswith(PREFIX)
    assert len(text) < 3000
    own = plain.of_file(tmp_path / "pumps.token")
    write_private(tmp_path / "pumps.token", text.encode() + b"\n")
    assert stat.S_IMODE((tmp_path / "pumps.token").stat().st_mode) == 0o600
    current = TlsFiles(own).current()
    assert current.own == said
    assert (said.identity, said.serves) == (PUMPS, False)
    assert timedelta(hours=8) < said.not_after - said.not_before < timedelta(hours=8, minutes=6)
    assert current.ca == (tmp_path / "authority" / "ca.pem").read_bytes()
    assert [each.certificate.serial for each in authority.issued()] == [said.serial], "it can be revoked"


@pytest.mark.parametrize("role", ["node", "agent", "controller"])
def test_servers_have_none(authority: Authority, role: str) -> None:
    with pytest.raises(InvalidArgument, match=f"a token cannot carry the role {role}"):
        authority.token(Identity.of(role, "x"), timedelta(hours=1))
    assert authority.issued() == []


@pytest.mark.parametrize("lifetime", [timedelta(), timedelta(seconds=59), timedelta(days=31, seconds=1)])
def test_it_does_not_last(authority: Authority, lifetime: timedelta) -> None:
    with pytest.raises(InvalidArgument, match="1m to 31d"):
        authority.token(PUMPS, lifetime)


def test_a_newer_one_in_the_file_is_taken_up(authority: Authority, tmp_path: Path) -> None:
    file, clock = tmp_path / "token", ManualClock(SYSTEM_CLOCK.now_us())
    first, second = (authority.token(PUMPS, timedelta(hours=n))[0] for n in (1, 2))
    write_private(file, first.encode())
    files = TlsFiles(plain.of_file(file), clock)
    before = files.current()
    write_private(file, b"half of a tok")
    clock.advance(LOOK_S)
    assert files.current() == before, "what is wrong is left aside"
    write_private(file, second.encode())
    clock.advance(LOOK_S)
    assert files.current().own.serial != before.own.serial
    assert files.token() == second


def test_a_file_that_everybody_can_read_is_refused(token: str, tmp_path: Path) -> None:
    write_private(tmp_path / "token", token.encode())
    (tmp_path / "token").chmod(0o644)
    with pytest.raises(BadCertificate, match=r"is readable by other users.*chmod 600"):
        TlsFiles(plain.of_file(tmp_path / "token"))
    with pytest.raises(BadCertificate, match="STATEFLOW_TOKEN_FILE cannot be read"):
        TlsFiles(plain.of_file(tmp_path / "none"))


def test_who_it_is_is_said_once(token: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("STATEFLOW_TOKEN", token)
    settings = plain.connection_settings()
    assert settings.tls
    assert token not in repr(settings)
    assert plain.own_token() == token
    for name in ("STATEFLOW_TOKEN_FILE", "STATEFLOW_TLS_CERT"):
        with monkeypatch.context() as also:
            also.setenv(name, "/x")
            with pytest.raises(InvalidArgument, match="more than one identity is configured") as said:
                plain.connection_settings()
            assert token not in str(said.value)
    monkeypatch.delenv("STATEFLOW_TOKEN")
    assert plain.own_token() == ""


def test_one_that_was_handed_over_counts_before_the_environment(
    token: str, authority: Authority, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STATEFLOW_TOKEN", authority.token(Identity.of("read", "other"), timedelta(hours=1))[0])
    plain.use_token(token)
    try:
        files = plain.tls_files()
        assert files is not None
        assert files.current().own.identity == PUMPS
    finally:
        plain.use_token("")
    files = plain.tls_files()
    assert files is not None
    assert str(files.current().own.identity) == "read/other"


@pytest.mark.parametrize(("role", "warned"), [("admin", 1), ("data", 0), ("read", 0)])
def test_an_administrators_is_handed_on_with_a_warning(
    role: str, warned: int, authority: Authority, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    given = authority.token(Identity.of(role, "alice"), timedelta(hours=1))[0]
    monkeypatch.setenv("STATEFLOW_TOKEN", given)
    assert plain.token_to_hand_on() == plain.task_token("Pumps") == given
    said = f"tasks on executors get the token of {role}/alice, with which they may do everything: "
    assert caplog.text.count(said) == warned, "once for each token"
    assert given not in caplog.text


def test_an_expired_one_is_refused_before_it_is_used(token: str) -> None:
    late = ManualClock(SYSTEM_CLOCK.now_us() + 9 * 3600 * 10**6)
    with pytest.raises(BadCertificate, match=r"expired at .* UTC"):
        TlsFiles(ConnectionSettings(token=token), late)  # type: ignore[arg-type]


@pytest.mark.parametrize("text", ["", "x", "Bearer abc", PREFIX, PREFIX + "é", PREFIX + "A" * LENGTH_MAX, PREFIX + "A"])
def test_what_is_none(text: str) -> None:
    with pytest.raises(BadCertificate):
        decoded_token(text)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> str:
    return Authority.init(tmp_path_factory.mktemp("authority") / "a", "acme").token(PUMPS, timedelta(hours=8))[0]


@pytest.mark.parametrize("organisation", ["a", "ab", "abc"])  # one of these leaves no spare bits in the last character
def test_spare_bits_of_the_last_character_are_none_of_it(tmp_path: Path, organisation: str) -> None:
    made = Authority.init(tmp_path / "a", organisation).token(PUMPS, timedelta(hours=8))[0]
    others = [made[:-1] + each for each in "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_"]
    decoded_token(made)
    for other in others:
        if other != made:
            with pytest.raises(BadCertificate):
                decoded_token(other)


@given(st.data())
def test_a_damaged_one_is_refused_and_tells_nothing(whole: str, data: st.DataObject) -> None:
    at = data.draw(st.integers(len(PREFIX), len(whole) - 1))
    cut = data.draw(st.booleans())
    other = data.draw(st.sampled_from("ABCxyz019-_=\n é\0").filter(lambda each: each != whole[at]))
    spoiled = whole[:at] if cut else whole[:at] + other + whole[at + 1 :]
    try:
        parts = decoded_token(spoiled)
    except BadCertificate as error:
        told = f"{error} {error.__cause__} {error.__context__ if not error.__suppress_context__ else ''}"
        assert whole[len(PREFIX) : len(PREFIX) + 40] not in told
    else:  # a bit of a name or of the signature, which the handshake refuses
        assert parts != decoded_token(whole) or spoiled.strip() == whole
