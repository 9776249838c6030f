"""Tokens of a cluster inside Spark: what tasks get, and how long a read has one."""

from __future__ import annotations

import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from stateflow.clock import SYSTEM_CLOCK, ManualClock
from stateflow.errors import InvalidArgument
from stateflow.security.authority import Authority
from stateflow.security.certificates import certificate_of, decoded_token, utc
from stateflow.security.plain import own_issuer, own_token, task_token
from stateflow.security.roles import Identity, Role
from stateflow.spark.credentials import READ_FOR, TOKEN_SHARED_FOR, Credentials, read_token

HALF_S = READ_FOR.total_seconds() / 2
TALLY = Identity(Role.QUERY, "spark", ("Tally",))


@pytest.fixture
def credentials(tmp_path: Path) -> Iterator[Credentials]:
    made = Credentials(tmp_path / "certificates", "127.0.0.1", "spark-abc123", 2)
    yield made
    made.end()


def test_an_authority_whose_making_was_cut_off_is_completed(tmp_path: Path) -> None:
    place = tmp_path / "certificates" / "authority"
    Authority.init(place, "stateflow in Spark")
    (place / "ca.pem").unlink()
    Credentials(tmp_path / "certificates", "127.0.0.1", "spark-abc123", 1).end()


def identity_of(token: str) -> Identity | None:
    return certificate_of(decoded_token(token).cert).identity


def issued(credentials: Credentials) -> int:
    return len(list((credentials.directory / "authority" / "issued").iterdir()))


def test_tasks_of_queries_may_less_than_the_driver(credentials: Credentials, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tasks get a token for their operator, even if the caller passes the cluster's address and not the cluster."""
    monkeypatch.delenv("STATEFLOW_TOKEN_FILE", raising=False)
    before = task_token("Tally")
    credentials.begin()
    assert identity_of(own_token()) == Identity(Role.ADMIN, "driver")
    assert identity_of(task_token("Tally")) == Identity(Role.DATA, "spark", ("Tally",))
    credentials.end()
    assert own_issuer() is None
    assert task_token("Tally") == before


def test_uses_of_an_operator_share_a_token_for_an_hour(credentials: Credentials) -> None:
    """``foreachBatch`` may apply an operator to each micro-batch; each had a certificate and connections of its own."""
    clock = ManualClock(SYSTEM_CLOCK.now_us())
    first = credentials.task_token("Tally", clock)
    before = issued(credentials)
    clock.advance(TOKEN_SHARED_FOR.total_seconds() - 60)
    assert credentials.task_token("Tally", clock) == first
    assert issued(credentials) == before
    assert identity_of(credentials.task_token("Other", clock)) == Identity(Role.DATA, "spark", ("Other",))
    clock.advance(120)
    second = credentials.task_token("Tally", clock)
    assert second != first
    assert identity_of(second) == identity_of(first)


def test_a_revoked_token_is_shared_no_longer(credentials: Credentials) -> None:
    """Neither that of an operator's tasks nor the stored one of reads."""
    authority = Authority(credentials.directory / "authority")
    for ask in (
        lambda: credentials.task_token("Tally"),
        lambda: read_token(credentials.directory, "Tally", state=True),
    ):
        first = ask()
        authority.revoke(f"{certificate_of(decoded_token(first).cert).serial:x}")
        second = ask()
        assert second != first
        assert identity_of(second) == identity_of(first)
        assert ask() == second


def test_a_read_has_a_token_for_half_of_its_time_at_least(credentials: Credentials) -> None:
    clock = ManualClock(SYSTEM_CLOCK.now_us() // 10**6 * 10**6)  # certificates name whole seconds
    first = read_token(credentials.directory, "Tally", state=True, clock=clock)
    before = issued(credentials)
    clock.advance(HALF_S - 1)
    assert read_token(credentials.directory, "Tally", state=True, clock=clock) == first
    assert issued(credentials) == before, "reads leave no certificates of their own"
    clock.advance(2)
    second = read_token(credentials.directory, "Tally", state=True, clock=clock)
    assert second != first
    assert identity_of(second) == identity_of(first) == TALLY
    assert certificate_of(decoded_token(second).cert).not_after - utc(clock) == READ_FOR


def test_each_operator_has_another_one(credentials: Credentials) -> None:
    found = [read_token(credentials.directory, name, state=True) for name in ("Tally", "Other")]
    found.append(read_token(credentials.directory, "Tally", state=False))
    assert [identity_of(each) for each in found] == [
        TALLY,
        Identity(Role.QUERY, "spark", ("Other",)),
        Identity(Role.READ, "spark"),
    ]
    with pytest.raises(InvalidArgument, match="operator name"):
        read_token(credentials.directory, "../Tally", state=True)


def test_others_cannot_read_the_file_and_a_damaged_one_is_replaced(credentials: Credentials) -> None:
    read_token(credentials.directory, "Tally", state=True)
    (file,) = credentials.directory.glob("query-*.token")
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    file.write_text("half of a tok")
    assert identity_of(read_token(credentials.directory, "Tally", state=True)) == TALLY
    assert sorted(each.name for each in credentials.directory.iterdir() if each.is_file()) == [file.name, "token"]
