"""Refused calls are counted, and logged once per caller and minute."""

from __future__ import annotations

import pytest

from stateflow.clock import ManualClock
from stateflow.errors import BadCertificate, NotAllowed
from stateflow.security.refusals import SAY_EVERY_S, UNKNOWN, Refusals
from stateflow.security.roles import RULES, Identity, Role, check_call

CONTROLLER = "/stateflow.rpc.ControllerService/"
GRAFANA, MALLORY = Identity(Role.READ, "grafana"), Identity(Role.DATA, "mallory")


def refusal(call: str, who: Identity) -> NotAllowed:
    with pytest.raises(NotAllowed) as caught:
        check_call(CONTROLLER + call, who)
    return caught.value


def test_who_tries_everything_is_counted_by_call_and_said_once_a_minute(caplog: pytest.LogCaptureFixture) -> None:
    clock = ManualClock()
    refusals = Refusals(clock)
    calls = [name.removeprefix(CONTROLLER) for name, rule in RULES.items() if name.startswith(CONTROLLER)]
    tried = [call for call in calls if Role.READ not in RULES[CONTROLLER + call].roles]
    for call in tried:
        refusals.note(call, refusal(call, GRAFANA), "ipv4:10.0.0.7")
    assert refusals.counts() == dict.fromkeys(((call, "read") for call in tried), 1)
    assert [record.message for record in caplog.records] == [
        f"refused a call of read/grafana at ipv4:10.0.0.7: {refusal(tried[0], GRAFANA)}; calls refused so far: 1"
    ]
    clock.advance(SAY_EVERY_S)
    refusals.note("Deploy", refusal("Deploy", GRAFANA))
    assert caplog.records[1].message.startswith(
        "refused a call of read/grafana: not_allowed: read/grafana may not call"
    )
    assert caplog.records[1].message.endswith(f"; calls refused so far: {len(tried) + 1}")


def test_a_flood_of_callers_costs_no_more_for_each(caplog: pytest.LogCaptureFixture) -> None:
    refusals = Refusals(ManualClock())
    error = refusal("Deploy", GRAFANA)
    error.where.pop("who")
    known = refusals._lines._passed_at
    for number in range(3_000):
        refusals.note("Deploy", error, f"10.0.{number >> 8}.{number & 255}")
    assert refusals._lines._passed_at is known, "nothing is built anew for a refusal"
    assert len(known) == 1_000, "and nothing grows with the callers"
    assert refusals.counts() == {("Deploy", UNKNOWN): 3_000}
    assert caplog.records[-1].message.endswith("; calls refused so far: 3000")


def test_each_caller_is_said(caplog: pytest.LogCaptureFixture) -> None:
    refusals = Refusals(ManualClock())
    for who in (GRAFANA, MALLORY, GRAFANA):
        refusals.note("Deploy", refusal("Deploy", who), "10.0.0.7")
    assert len(caplog.records) == 2
    assert refusals.counts() == {("Deploy", "read"): 2, ("Deploy", "data"): 1}


def test_who_showed_no_identity_is_known_by_the_host(caplog: pytest.LogCaptureFixture) -> None:
    refusals = Refusals(ManualClock())
    for host in ("10.0.0.7", "10.0.0.8", "10.0.0.7"):
        refusals.note("sign-in", BadCertificate("not a token", remedy="issue one"), host)
    elsewhere = NotAllowed("grafana may not", who="admin/alice")  # an answer of another process, whose facts are texts
    refusals.note("sign-in", elsewhere, "10.0.0.7")
    assert refusals.counts() == {("sign-in", UNKNOWN): 4}
    said = [record.message for record in caplog.records]
    assert [message.partition(": ")[0] for message in said] == [
        "refused a call of 10.0.0.7",
        "refused a call of 10.0.0.8",
    ]
