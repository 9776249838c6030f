"""Identity in a certificate: to a URI and back, and for whom its holder may speak."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stateflow.errors import InvalidArgument
from stateflow.security.roles import Identity, Role

NAMES = st.from_regex(r"[A-Za-z0-9][A-Za-z0-9_.\-]{0,20}", fullmatch=True)


@given(role=st.sampled_from(Role), name=NAMES, operators=st.lists(NAMES, max_size=3))
def test_a_uri_says_all_of_it(role: Role, name: str, operators: list[str]) -> None:
    who = Identity.of(role, name, tuple(operators) if role.limited else ())
    assert Identity.of_uri(who.uri) == who


@pytest.mark.parametrize(
    "uri",
    [
        "https://node/edge-0",
        "stateflow://king/edge-0",
        "stateflow://node/",
        "stateflow://node/a/b",
        "stateflow://node/edge-0~1",
        "stateflow://data/gw?operator=A&until=noon",
        "stateflow://data/gw?operator=",
        "stateflow://admin/alice?operator=A",
        "spiffe://node/edge-0",
    ],
)
def test_another_uri_is_nobody(uri: str) -> None:
    assert Identity.of_uri(uri) is None


def test_what_cannot_be_asked_for() -> None:
    with pytest.raises(InvalidArgument, match="there is no role 'king'"):
        Identity.of("king", "x")
    with pytest.raises(InvalidArgument, match="cannot be restricted to operators"):
        Identity.of("admin", "x", ("Pumps",))


@pytest.mark.parametrize(
    ("who", "name", "may"),
    [
        (Identity(Role.NODE, "edge-0"), "edge-0", True),
        (Identity(Role.NODE, "edge-0"), "edge-0~3", True),
        (Identity(Role.NODE, "edge-0"), "edge-1", False),
        (Identity(Role.NODE, "edge"), "edge-0", False),
        (Identity(Role.AGENT, "gw-1"), "gw-1", True),
        (Identity(Role.AGENT, "gw-1"), "gw-1-0~2", True),
        (Identity(Role.AGENT, "gw-1"), "gw-1-x", False),
        (Identity(Role.AGENT, "gw"), "gw-1-0", False),
        (Identity(Role.ADMIN, "edge-0"), "edge-0", False),
    ],
)
def test_who_speaks_for_whom(who: Identity, name: str, may: bool) -> None:
    assert who.speaks_for(name) == may
