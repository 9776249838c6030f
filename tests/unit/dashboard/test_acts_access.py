"""Access to the dashboard: who may look, and who may do what."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from stateflow.clock import ManualClock
from stateflow.dashboard import acts
from stateflow.dashboard.acts import (
    CALLS,
    Access,
    Sessions,
    Shown,
    SignInRequired,
    check_host,
    check_same_page,
    host_of,
    shown_by,
)
from stateflow.errors import BadCertificate, NotAllowed
from stateflow.security.authority import Authority
from stateflow.security.roles import RULES, Identity, Role

NOW = datetime(2026, 11, 26, tzinfo=UTC)
ALICE, GRAFANA = Identity(Role.OPERATE, "alice"), Identity(Role.READ, "grafana")
ROOT, PUMPS = Identity(Role.ADMIN, "root"), Identity(Role.DATA, "pumps", ("Pumps",))


@pytest.mark.parametrize(
    ("header", "host"),
    [
        ("fleet.example:7443", "fleet.example"),
        ("127.0.0.1:1", "127.0.0.1"),
        ("[::1]:7071", "::1"),
        ("A.B", "a.b"),
        ("", ""),
    ],
)
def test_the_host_of_a_header(header: str, host: str) -> None:
    assert host_of(header) == host


@pytest.mark.parametrize(
    "header", ["127.0.0.1:7071", "localhost:7071", "[::1]:7071", "10.0.0.7", "page.example:1", "PAGE.EXAMPLE"]
)
def test_it_is_served_by_address_and_under_its_names(header: str) -> None:
    check_host(header, {"page.example"})


@pytest.mark.parametrize(
    "header", ["evil.example:7071", "", "127.0.0.1.evil.example", "localhost.evil.example", "page.example.evil"]
)
def test_a_name_that_somebody_points_here_is_refused(header: str) -> None:
    with pytest.raises(NotAllowed, match="not served under the name"):
        check_host(header, {"page.example"})


def test_a_change_comes_from_the_page_itself() -> None:
    own = {"host": "127.0.0.1:7071", "origin": "http://127.0.0.1:7071", "x-stateflow": "1"}
    check_same_page(own, "http")
    for wrong in (
        {"x-stateflow": "2"},
        {"origin": "http://evil.example"},
        {"origin": "null"},
        {"origin": "https://127.0.0.1:7071"},
        {"origin": "http://127.0.0.1:7072"},
    ):
        with pytest.raises(NotAllowed):
            check_same_page({**own, **wrong}, "http")
    for missing in ("x-stateflow", "origin"):
        with pytest.raises(NotAllowed):
            check_same_page({name: value for name, value in own.items() if name != missing}, "http")


def test_every_act_is_a_call_that_the_table_of_roles_has() -> None:
    for act in CALLS:
        service = "ReplicaService" if CALLS[act] == "Scan" else "ControllerService"
        assert f"/stateflow.rpc.{service}/{CALLS[act]}" in RULES


def test_in_plain_text_everybody_may_do_everything() -> None:
    assert all(Access(None, None).may().values())
    assert not Access(None, None).needs_sign_in


def test_who_has_not_said_who_they_are_sees_nothing() -> None:
    nobody = Access(ROOT, None)
    assert nobody.needs_sign_in
    with pytest.raises(SignInRequired):
        nobody.check_look()
    assert not any(nobody.may().values())


@pytest.mark.parametrize(
    ("who", "allowed"),
    [
        (GRAFANA, {"plan"}),
        (ALICE, set(CALLS) - {"state", "restore"}),
        (ROOT, set(CALLS)),
    ],
)
def test_whoever_looks_is_offered_what_their_role_may(who: Identity, allowed: set[str]) -> None:
    assert {act for act, may in Access(ROOT, who).may().items() if may} == allowed


def test_nobody_may_more_than_the_process_that_does_it() -> None:
    assert {act for act, may in Access(GRAFANA, ROOT).may().items() if may} == {"plan"}
    with pytest.raises(NotAllowed, match="read/grafana may not call Migrate"):
        Access(GRAFANA, ROOT).check("migrate")


def test_users_are_named_by_a_process_that_may_name_them() -> None:
    assert Access(ROOT, ALICE).named == ALICE
    assert Access(ROOT, None).named is None
    assert Access(None, None).named is None, "in plain text no user is known"
    assert Access(None, None).author == ""
    for role in (Role.READ, Role.OPERATE, Role.DATA):
        assert Access(Identity(role, "page"), ALICE).named is None, "a controller would refuse it"


def test_a_token_of_some_operators_reads_no_others() -> None:
    mine = Access(ROOT, PUMPS)
    mine.check("state")
    mine.check_operator("Pumps")
    with pytest.raises(NotAllowed):
        mine.check_operator("Other")
    with pytest.raises(NotAllowed):
        mine.check_look()  # seeing the whole fleet needs more rights


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority.init(
        tmp_path_factory.mktemp("authority") / "a", "tests", ManualClock(round(NOW.timestamp() * 1e6))
    )


def ca_of(authority: Authority) -> bytes:
    return (authority.crl.parent / "ca.pem").read_bytes()


def test_a_token_says_who_looks_and_until_when(authority: Authority) -> None:
    text, certificate = authority.token(ALICE, timedelta(hours=8))
    assert shown_by(text, ca_of(authority), (), NOW) == Shown(ALICE, certificate.serial, certificate.not_after)
    longer, _ = authority.token(ALICE, timedelta(days=7))
    assert shown_by(longer, ca_of(authority), (), NOW).until == NOW + acts.LONGEST


def test_a_token_that_does_not_count(authority: Authority, tmp_path: Path) -> None:
    text, certificate = authority.token(ALICE, timedelta(hours=8))
    with pytest.raises(BadCertificate, match="revoked"):
        shown_by(text, ca_of(authority), {certificate.serial}, NOW)
    with pytest.raises(BadCertificate, match="expired"):
        shown_by(text, ca_of(authority), (), NOW + timedelta(hours=9))
    other = Authority.init(tmp_path / "other", "others", ManualClock(round(NOW.timestamp() * 1e6)))
    with pytest.raises(BadCertificate, match="another authority"):
        shown_by(other.token(ALICE, timedelta(hours=8))[0], ca_of(authority), (), NOW)
    with pytest.raises(BadCertificate):
        shown_by("sftoken1_nonsense", ca_of(authority), (), NOW)


def test_a_session_ends_with_its_time_by_hand_and_when_there_are_too_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(acts, "SESSIONS_MAX", 2)
    numbers = iter("abcde")
    made = Sessions(lambda: next(numbers))
    until = NOW + timedelta(hours=1)
    first, second = made.open(Shown(ALICE, 1, until)), made.open(Shown(ROOT, 2, until))
    assert (made.find(first, (), NOW), made.find(second, (), NOW)) == (ALICE, ROOT)
    third = made.open(Shown(GRAFANA, 3, until))
    assert made.find(first, (), NOW) is None, "the oldest has made room"
    assert made.find(third, (), until) is None
    made.end(second)
    assert made.find(second, (), NOW) is None
    assert made.find("", (), NOW) is None


def test_a_session_ends_when_its_token_is_revoked() -> None:
    made, until = Sessions(), NOW + timedelta(hours=1)
    alice, root = made.open(Shown(ALICE, 1, until)), made.open(Shown(ROOT, 2, until))
    assert made.find(alice, {1}, NOW) is None
    assert made.find(root, {1}, NOW) == ROOT
    assert made.find(alice, (), NOW) is None, "it stays ended"
