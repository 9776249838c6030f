"""Addresses to which plain text may go."""

from __future__ import annotations

import os

import pytest

from stateflow.errors import InsecureRefused
from stateflow.security.plain import check_dialled, check_served, environment, is_loopback


@pytest.mark.parametrize(
    ("address", "here"),
    [
        ("127.0.0.1:7070", True),
        ("127.8.8.8:7070", True),
        ("localhost:7070", True),
        ("a.LOCALHOST:0", True),
        ("[::1]:7070", True),
        ("0.0.0.0:7070", False),
        ("[::]:7070", False),
        ("10.0.0.1:7070", False),
        ("ctl:7070", False),
        ("localhost.evil.org:7070", False),
        ("127.0.0.1.evil.org:1", False),
    ],
)
def test_loopback(address: str, here: bool) -> None:
    assert is_loopback(address) == here


def test_a_network_is_refused_with_both_remedies() -> None:
    check_served("127.0.0.1:0", None)
    check_served("127.0.0.1:0", "localhost:7")
    check_dialled("localhost:7070")
    for listen, advertise in (("0.0.0.0:0", None), ("127.0.0.1:0", "ctl:7070")):
        with pytest.raises(InsecureRefused, match=r"STATEFLOW_TLS_CA.*--insecure or STATEFLOW_INSECURE=1"):
            check_served(listen, advertise)
    with pytest.raises(
        InsecureRefused, match=r"ctl:7070 is not on this machine.*STATEFLOW_TLS_CA.*STATEFLOW_INSECURE=1"
    ):
        check_dialled("ctl:7070")


def test_who_says_so_is_warned(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setenv("STATEFLOW_INSECURE", "1")
    for _ in range(2):
        check_served("0.0.0.0:7070", "ctl:7070")
    assert caplog.text.count("everybody who reaches 0.0.0.0:7070 may control this process") == 2, "each start"
    for _ in range(2):
        check_dialled("ctl-plain:7070")
    assert caplog.text.count("INSECURE: plain text to ctl-plain:7070") == 1


def test_variables_that_two_blocks_set_are_restored_in_any_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two clusters with certificates run in one process, and the first one is stopped first."""
    monkeypatch.setenv("STATEFLOW_TLS_CERT", "given")
    monkeypatch.delenv("STATEFLOW_TLS_KEY", raising=False)

    def now() -> tuple[str | None, str | None]:
        return os.environ.get("STATEFLOW_TLS_CERT"), os.environ.get("STATEFLOW_TLS_KEY")

    first = environment({"STATEFLOW_TLS_CERT": "a", "STATEFLOW_TLS_KEY": "a"})
    second = environment({"STATEFLOW_TLS_CERT": "b"})
    third = environment({"STATEFLOW_TLS_CERT": "c", "STATEFLOW_TLS_KEY": "c"})
    for each in (first, second, third):
        each.__enter__()
    first.__exit__(None, None, None)
    assert now() == ("c", "c")
    third.__exit__(None, None, None)
    assert now() == ("b", None)
    second.__exit__(None, None, None)
    assert now() == ("given", None)
