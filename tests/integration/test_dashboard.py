"""The live page of real processes: served by a controller, and in a cluster with certificates."""

from __future__ import annotations

import json
import re
import ssl
import urllib.error
import urllib.request
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from stateflow.dashboard import Dashboard, DashboardOptions
from stateflow.ledger import Ledger
from stateflow.local.process import Process
from stateflow.security.roles import Identity
from stateflow.testing import LocalCluster
from tests.integration.operators import Tally
from tests.integration.support import eventually

pytestmark = pytest.mark.processes


class Showing(LocalCluster):
    def _process(self, name: str, arguments: list[str]) -> Process:
        page = ["--dashboard", "127.0.0.1:0"] if name in self.controllers else []
        return super()._process(name, [*arguments, *page])

    def url(self) -> str:
        said = re.findall(r"dashboard at (http://\S+/)", (self.data_dir / "controller.log").read_text())
        return str(said[-1]) if said else ""


def ask(
    url: str, *, body: bytes | None = None, cookie: str = "", trusted: ssl.SSLContext | None = None
) -> tuple[int, Any, str]:
    """Returns status, JSON, and the cookie that the page set."""
    headers = {"x-stateflow": "1", "origin": url.split("/api/", maxsplit=1)[0], "cookie": cookie}
    try:
        with urllib.request.urlopen(urllib.request.Request(url, body, headers), timeout=60, context=trusted) as answer:
            return answer.status, json.load(answer), answer.headers.get("set-cookie", "")
    except urllib.error.HTTPError as error:
        return error.code, json.load(error), ""


def looked(url: str, replicas: int, cookie: str = "", trusted: ssl.SSLContext | None = None) -> dict[str, Any]:
    """Returns the first snapshot with so many replicas; the stream begins with one from before the request."""
    request = urllib.request.Request(f"{url}api/events", headers={"cookie": cookie})
    with urllib.request.urlopen(request, timeout=60, context=trusted) as stream:
        for line in stream:
            if line.startswith(b'data: {"at_us"'):
                found = json.loads(line.removeprefix(b"data: "))
                if len(found.get("replicas", ())) == replicas:
                    return dict(found)
    raise AssertionError("the stream has ended")


def test_a_controller_serves_the_page_and_ends_with_somebody_looking() -> None:
    with Showing(Tally, sites={"cloud": 1, "edge": 1}, partitions=4) as local:
        url = eventually(local.url, "the page is served")
        snapshot = looked(url, 2)
        assert (snapshot["error"], snapshot["controller"]) == (None, local.address)
        assert [each["name"] for each in snapshot["replicas"]] == ["cloud-0", "edge-0"]
        assert snapshot["batches"] is not None, "a controller knows its ledger"
        move = {"do": "migrate", "operator": "Tally", "partitions": "all", "to": "edge"}
        status, begun, _ = ask(f"{url}api/begin", body=json.dumps(move).encode())
        assert status == 200, begun
        (id_,) = begun["begun"]
        state = eventually(lambda: local.cluster.reconfiguration(id_).state.replace("RUNNING", ""), "it has ended")
        assert state == "COMPLETED"
        watching = urllib.request.urlopen(f"{url}api/events", timeout=60)
        assert watching.readline()
    assert b"snapshot" in watching.read(), "the stream ends with the controller"


def test_with_certificates_nobody_looks_without_a_token() -> None:
    with LocalCluster(Tally, partitions=2, tls=True) as local:
        assert local.certificates is not None
        authority = local.certificates.authority
        issued = local.certificates.issue("page", "node", "127.0.0.1")  # as an authority that browsers trust would
        cert, key = Path(issued["STATEFLOW_TLS_CERT"]), Path(issued["STATEFLOW_TLS_KEY"])
        trusted = ssl.create_default_context(cafile=issued["STATEFLOW_TLS_CA"])
        with Dashboard(DashboardOptions(local.address, cert=cert, key=key)) as page:
            assert page.url.startswith("https://")
            assert ask(f"{page.url}api/me", trusted=trusted)[1]["sign_in"] is True
            assert ask(f"{page.url}api/events", trusted=trusted)[0] == 401
            for role, state in (("read", 403), ("admin", 200)):
                text, _ = authority.token(Identity.of(role, "alice"), timedelta(hours=1))
                status, said, given = ask(f"{page.url}api/sign-in", body=text.encode(), trusted=trusted)
                assert (status, said) == (200, {"who": f"{role}/alice"})
                assert "secure" in given.lower()
                cookie = given.partition(";")[0]
                assert looked(page.url, 1, cookie, trusted)["totals"]["partitions"] == 2
                asked = json.dumps({"operator": "Tally", "state": "n", "key": "a"}).encode()
                assert ask(f"{page.url}api/state", body=asked, cookie=cookie, trusted=trusted)[0] == state
                swept = json.dumps({"chore": "verify"}).encode()
                assert ask(f"{page.url}api/sweep", body=swept, cookie=cookie, trusted=trusted)[0] == state
        with Ledger(local.ledger, create=False) as ledger:
            authors = {record.author for record in ledger.newest(100)}
        assert "admin/alice via admin/local" in authors, "the user, and the process that called for the user"
