"""Certificates for replicas in Spark's tasks: who is given one, and who is refused."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import ssl
import stat
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stateflow.errors import NotAllowed, Unavailable
from stateflow.security.authority import own_request, read_own
from stateflow.security.plain import own_token
from stateflow.spark.credentials import ANSWER_LONGEST, PLACES, Credentials, Enrolment, Register

BASE, HOST = "spark-abc123", "127.0.0.1"
SECRET = "s" * 64


def certified(name: str, host: str, request: bytes) -> bytes:
    return f"{name} at {host}".encode()


def asked(register: Register, name: str = f"{BASE}-0", host: str = "10.0.0.1", secret: str = SECRET) -> str:
    """Returns the certificate or the text of the refusal. Raises nothing."""
    line = register.answer(json.dumps({"secret": secret, "name": name, "request": "r"}).encode(), host)
    assert line.endswith(b"\n")
    answer = json.loads(line)
    return str(answer["cert"] if "cert" in answer else answer["refused"]["what"])


@pytest.fixture
def register() -> Register:
    return Register(BASE, 2, SECRET, certified)


def test_a_task_is_given_one_of_its_replicas_name_and_address(register: Register) -> None:
    assert asked(register, f"{BASE}-1") == f"{BASE}-1 at 10.0.0.1"
    assert asked(register, f"{BASE}-1-17", "10.0.0.2") == f"{BASE}-1-17 at 10.0.0.2", "the one after it"
    assert asked(register, f"{BASE}-1") == f"{BASE}-1 at 10.0.0.1", "again, as after a restart"


def test_a_name_of_one_address_is_not_given_to_another(register: Register) -> None:
    asked(register)
    assert asked(register, host="10.0.0.2") == f"{BASE}-0 runs at 10.0.0.1, not at 10.0.0.2"


@pytest.mark.parametrize(
    "name", [f"{BASE}-2", f"{BASE}-0-1-2", f"{BASE}-x", BASE, "", "edge-0", f"{BASE}-0~1", f"{BASE}-0\n", f"{BASE}-٠"]
)
def test_no_other_name_is_given(register: Register, name: str) -> None:
    assert asked(register, name) == f"{name!r} is not a replica of this cluster"


@pytest.mark.parametrize("secret", ["", "s" * 63, "S" * 64, "é"])
def test_who_does_not_know_the_secret_is_given_nothing(register: Register, secret: str) -> None:
    assert asked(register, secret=secret) == "the request does not come from a task of this application"
    assert asked(register, host="10.0.0.9") == f"{BASE}-0 at 10.0.0.9", "nor has it taken the name"


@given(st.binary(max_size=200) | st.sampled_from([b"[" * 5000, b'{"secret":"\\ud800","name":"","request":""}']))
def test_what_is_no_question_is_refused(said: bytes) -> None:
    answer = json.loads(Register(BASE, 2, SECRET, certified).answer(said, HOST))
    assert answer["refused"]["code"] == "not_allowed"


@pytest.fixture
def credentials(tmp_path: Path) -> Iterator[Credentials]:
    made = Credentials(tmp_path / "certificates", HOST, BASE, 2)
    yield made
    made.end()


def test_over_tls(credentials: Credentials, tmp_path: Path) -> None:
    credentials.enrolment.enrol(f"{BASE}-0", tmp_path / "tls")
    found = read_own(tmp_path / "tls")
    assert found is not None
    assert (str(found.identity), found.hosts, found.serves) == (f"node/{BASE}-0", (HOST,), True)
    assert stat.S_IMODE((tmp_path / "tls" / "key.pem").stat().st_mode) == 0o600
    first = (tmp_path / "tls" / "key.pem").read_bytes()
    credentials.renew()
    credentials.enrolment.enrol(f"{BASE}-0", tmp_path / "tls")
    assert (tmp_path / "tls" / "key.pem").read_bytes() != first
    with pytest.raises(NotAllowed, match="is not a replica of this cluster"):
        credentials.enrolment.enrol("edge-0", tmp_path / "other")
    assert not (tmp_path / "other").exists()


def test_the_secret_does_not_show(credentials: Credentials) -> None:
    assert credentials.enrolment.secret not in repr(credentials.enrolment)
    assert len(credentials.enrolment.secret) == 64


def test_the_secret_is_said_to_nobody_else(credentials: Credentials, tmp_path: Path) -> None:
    """The secret is sent to the real desk only.

    Another server at the desk's address has a certificate of its own authority.
    """
    other = Credentials(tmp_path / "other", HOST, BASE, 2)
    ours, heard = credentials.enrolment, []
    with socket.create_server((HOST, 0)) as listening:

        def stand_in() -> None:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(tmp_path / "other/controller/cert.pem", tmp_path / "other/controller/key.pem")
            plain, _ = listening.accept()
            with plain, contextlib.suppress(OSError), context.wrap_socket(plain, server_side=True) as way:
                heard.append(way.recv(4096))

        standing = threading.Thread(target=stand_in)
        standing.start()
        false = Enrolment(f"{HOST}:{listening.getsockname()[1]}", ours.ca, ours.secret)
        with pytest.raises(Unavailable, match="no certificate received from the driver"):
            false.enrol(f"{BASE}-0", tmp_path / "tls")
        standing.join()
    other.end()
    assert heard in ([], [b""])


def test_strangers_do_not_keep_it_from_tasks(credentials: Credentials, tmp_path: Path) -> None:
    host, _, port = credentials.enrolment.address.rpartition(":")
    with contextlib.ExitStack() as opened:
        for _ in range(PLACES - 1):
            opened.enter_context(socket.create_connection((host, int(port))))  # the connection sends nothing
        credentials.enrolment.enrol(f"{BASE}-0", tmp_path / "tls")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.load_verify_locations(cadata=credentials.enrolment.ca.decode())
    with socket.create_connection((host, int(port))) as plain, context.wrap_socket(plain, server_hostname=host) as way:
        with contextlib.suppress(OSError):
            way.sendall(b"x" * (ANSWER_LONGEST + 9000))
        with contextlib.suppress(OSError):
            assert way.recv(1) == b"", "a line without end is not waited for"
    credentials.enrolment.enrol(f"{BASE}-1", tmp_path / "tls")


def test_when_it_is_over_nobody_is_given_any(credentials: Credentials, tmp_path: Path) -> None:
    credentials.end()
    with pytest.raises(Unavailable):
        credentials.enrolment.enrol(f"{BASE}-0", tmp_path / "tls")


def test_this_process_is_an_administrator_meanwhile(
    credentials: Credentials, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STATEFLOW_TLS_CA", "before")
    monkeypatch.delenv("STATEFLOW_TOKEN_FILE", raising=False)
    credentials.begin()
    assert own_token() == credentials.token_file.read_text()
    credentials.end()
    assert os.environ["STATEFLOW_TLS_CA"] == "before"
    assert "STATEFLOW_TOKEN_FILE" not in os.environ


def test_a_request_is_a_keys_own(credentials: Credentials) -> None:
    """A certificate request that was changed in transit belongs to no key, and is refused."""
    _, request = own_request()
    _, other = own_request()
    lines, others = request.splitlines(), other.splitlines()
    mixed = b"\n".join([lines[0], lines[1], *others[2:]])
    answer = Register(BASE, 2, SECRET, credentials._certify).answer(
        json.dumps({"secret": SECRET, "name": f"{BASE}-0", "request": mixed.decode()}).encode(), HOST
    )
    assert json.loads(answer)["refused"]["code"] == "bad_certificate"
