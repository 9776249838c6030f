"""The table of roles is complete, and grants what it is meant to grant."""

from __future__ import annotations

import pytest
from google.protobuf.descriptor import FieldDescriptor, MethodDescriptor

from stateflow.errors import NotAllowed
from stateflow.rpc import agent_pb2, controller_pb2, replica_pb2
from stateflow.security.roles import (
    AUTHOR_MAX,
    METRICS,
    RULES,
    Asker,
    Identity,
    Role,
    check_call,
    check_delegate,
    check_owners,
    check_request,
)
from tests.pages import ROOT

with pytest.MonkeyPatch.context() as patch:
    patch.syspath_prepend(ROOT / ".ci" / "docs")
    from roles_page import BEGIN, page

SERVICES = [
    service
    for module in (agent_pb2, controller_pb2, replica_pb2)
    for service in module.DESCRIPTOR.services_by_name.values()
]
METHODS: dict[str, MethodDescriptor] = {
    f"/{service.full_name}/{method.name}": method for service in SERVICES for method in service.methods
}
REPLICA, CONTROLLER = "/stateflow.rpc.ReplicaService/", "/stateflow.rpc.ControllerService/"
AGENT, HEALTH = "/stateflow.rpc.AgentService/", "/grpc.health.v1.Health/Check"
PAGE = ROOT / "docs" / "security.md"


def test_every_rpc_has_a_rule_and_every_rule_an_rpc() -> None:
    assert set(RULES) - {HEALTH, METRICS} == set(METHODS)
    assert len(SERVICES) == 3
    assert [name for name, rule in RULES.items() if not rule.roles] == []


@pytest.mark.parametrize("name", METHODS)
def test_the_fields_of_a_rule_are_in_its_request(name: str) -> None:
    for path in filter(None, (RULES[name].own, RULES[name].operator)):
        message = METHODS[name].input_type
        *outer, last = path.split(".")
        for each in outer:
            message = message.fields_by_name[each].message_type
        assert message.fields_by_name[last].type == FieldDescriptor.TYPE_STRING


@pytest.mark.parametrize("name", METHODS)
def test_a_command_is_a_controllers_and_a_change_is_nobodys_who_only_reads(name: str) -> None:
    field = METHODS[name].input_type.fields_by_name.get("command")
    if not name.startswith(CONTROLLER) and getattr(field and field.message_type, "name", "") == "Command":
        assert RULES[name].roles == {Role.CONTROLLER}
    if Role.READ in RULES[name].roles:
        verbs = ("Get", "List", "Status", "Watch", "Propose", "Positions", "Sources", "Inspect", "Stats")
        assert name.rpartition("/")[2].startswith(verbs)
    if Role.NODE in RULES[name].roles and name.startswith(CONTROLLER):
        assert RULES[name].own or name.rpartition("/")[2] in ("Status", "GetBundlePart")


# -- what roles may not, by hand: the table is compared with no copy of itself here ---------------------------------

#: calls that deploy code or may lose state
RISKY = {
    *("Deploy", "Upgrade", "Undeploy", "PutBundlePart", "ResolveReconfiguration", "Restore", "CancelRestore"),
    *("Replace", "Adopt", "TakeOver", "Forget", "ForgetAgent"),
}
#: calls that move, restart, stop and plan
OPERATING = {
    *("Migrate", "Rebalance", "Drain", "EndMaintenance", "Place", "Autopilot", "CreateJob", "ChangeJob", "Standby"),
    *("CancelReconfiguration", "EditReconfiguration", "PauseReconfiguration", "ResumeReconfiguration"),
    *("RetryReconfiguration", "Checkpoint", "RestartAll", "CancelRolling", "BeginSweep", "CancelSweep"),
    *("RestartReplica", "Spawn", "StopReplica", "Logs"),
}
REPORTING = {"Register", "Heartbeat", "Claim", "AgentBeat", "GetBundlePart"}
#: calls of a controller to its replicas
COMMANDING = {
    *("Create", "Prepare", "Fence", "Cancel", "Release", "TakeOver", "Drop", "Hold", "Checkpoint", "Restore"),
    *("Surrender", "Verify", "Try", "RoundTrips"),
}
#: calls of a replica to another
COPYING = {"Snapshot", "Fetch", "Follow", "Confirm"}
#: calls that read or change state
STATE = {"Apply", "OpenSource", "Outputs", "Scan"}
SOURCES = {"RetireSource", "DropOutput"}
#: role → calls that it may not make, to a controller and to a replica
FORBIDDEN: dict[Role, tuple[set[str], set[str]]] = {
    Role.READ: (RISKY | OPERATING | REPORTING, COMMANDING | COPYING | STATE | SOURCES),
    Role.QUERY: (RISKY | OPERATING | REPORTING, COMMANDING | COPYING | STATE - {"Scan"} | SOURCES),
    Role.DATA: (RISKY | OPERATING | REPORTING, COMMANDING | COPYING | SOURCES),
    Role.OPERATE: (RISKY | REPORTING, COMMANDING | COPYING | STATE),
    Role.ADMIN: (REPORTING, COMMANDING | COPYING),
    Role.NODE: (RISKY - {"Forget"} | OPERATING - {"Migrate", "Drain"} | {"AgentBeat"}, COMMANDING | STATE | SOURCES),
    Role.AGENT: (RISKY - {"Forget"} | OPERATING - {"Migrate", "Drain"}, COMMANDING | STATE | SOURCES),
    Role.CONTROLLER: (RISKY | OPERATING | REPORTING | {"Status"}, COPYING | STATE | SOURCES),
}


@pytest.mark.parametrize("role", Role)
def test_what_a_role_may_not(role: Role) -> None:
    controller, replica = FORBIDDEN[role]
    methods = {CONTROLLER + call for call in controller} | {REPLICA + call for call in replica}
    if role is not Role.CONTROLLER:
        methods.add(AGENT + "Logs")
    assert methods <= METHODS.keys()
    who = Identity(role, "someone")
    assert {method for method in methods if may_call(method, who)} == set()


def test_every_call_is_forbidden_to_somebody_by_hand() -> None:
    """A new call is put among those above, or is one that only looks."""
    controller, replica = (set[str]().union(*(each[at] for each in FORBIDDEN.values())) for at in (0, 1))
    named = {CONTROLLER + call for call in controller} | {REPLICA + call for call in replica} | {AGENT + "Logs"}
    looking = ("Get", "List", "Watch", "Propose", "Positions", "Sources", "Inspect", "Stats")
    assert [each for each in METHODS.keys() - named if not each.rpartition("/")[2].startswith(looking)] == []


def may_call(method: str, who: Identity) -> bool:
    try:
        check_call(method, who)
    except NotAllowed:
        return False
    return True


def test_figures_are_for_those_who_may_look_at_all() -> None:
    assert {role for role in Role if may_call(METRICS, Identity(role, "x"))} == {
        *(Role.READ, Role.QUERY, Role.DATA, Role.OPERATE, Role.ADMIN)
    }
    assert not may_call(METRICS, Identity(Role.DATA, "gw", ("Pumps",)))


def test_the_page_is_what_the_rules_give() -> None:
    assert page(PAGE.read_text()) == PAGE.read_text(), "run .ci/generate-settings"
    for marked in ("prose", f"{BEGIN}and no end"):
        with pytest.raises(ValueError, match="no lines that mark where the tables begin and end"):
            page(marked)


def test_a_call_with_which_only_members_speak_is_a_report() -> None:
    reports = {
        method.rpartition("/")[2] for method in METHODS if method.startswith(CONTROLLER) and RULES[method].is_report
    }
    assert reports == REPORTING


def test_who_may_not_call_is_told_why() -> None:
    with pytest.raises(NotAllowed) as caught:
        check_call(CONTROLLER + "Deploy", Identity(Role.READ, "grafana"))
    assert str(caught.value) == (
        "not_allowed: read/grafana may not call Deploy (call=Deploy who=read/grafana role=read needs=admin): "
        "use a certificate with another role: admin"
    )
    with pytest.raises(NotAllowed, match="nobody"):
        check_call("/stateflow.rpc.ReplicaService/Nothing", Identity(Role.ADMIN, "a"))


def test_a_node_speaks_for_itself() -> None:
    who = Identity(Role.NODE, "edge-0")
    for method, request in (
        ("Heartbeat", controller_pb2.HeartbeatRequest(name="edge-0~1")),
        ("Register", controller_pb2.RegisterRequest(replica={"name": "edge-0"})),  # type: ignore[arg-type]
        ("Drain", controller_pb2.DrainRequest(replica="edge-0")),
    ):
        check_request(check_call(CONTROLLER + method, who), CONTROLLER + method, who, request)
    for method, request in (
        ("Heartbeat", controller_pb2.HeartbeatRequest(name="edge-1")),
        ("Register", controller_pb2.RegisterRequest(replica={"name": "cloud-0"})),  # type: ignore[arg-type]
        ("Claim", controller_pb2.ClaimRequest(replica={"name": "cloud-0"})),  # type: ignore[arg-type]
        ("Forget", controller_pb2.ForgetRequest(replica="cloud-0")),
        ("Migrate", controller_pb2.MigrateRequest(operator="A", partitions=[1], to="cloud")),
    ):
        with pytest.raises(NotAllowed, match=r"node/edge-0 may not call .* for '.*': a node may act only for itself"):
            check_request(check_call(CONTROLLER + method, who), CONTROLLER + method, who, request)
    with pytest.raises(NotAllowed, match="for an unnamed replica"):  # a message that is absent names no node either
        rule = check_call(CONTROLLER + "Register", who)
        check_request(rule, CONTROLLER + "Register", who, controller_pb2.RegisterRequest())


def test_an_agent_is_no_other_one_that_is_called_as_a_replica_of_it_would_be() -> None:
    def beat(name: str) -> controller_pb2.AgentBeatRequest:
        return controller_pb2.AgentBeatRequest(agent={"name": name})  # type: ignore[arg-type]

    who, method = Identity(Role.AGENT, "gw"), CONTROLLER + "AgentBeat"
    check_request(check_call(method, who), method, who, beat("gw"))
    for name in ("gw-1", "gw~1", ""):
        with pytest.raises(NotAllowed, match="agent/gw may not call AgentBeat for"):
            check_request(check_call(method, who), method, who, beat(name))


def test_a_node_takes_no_partition_from_others() -> None:
    check_owners(Identity(Role.NODE, "edge-0"), {1: "edge-0", 2: "edge-0~1"})
    check_owners(Identity(Role.OPERATE, "edge-0"), {1: "cloud-0"})
    with pytest.raises(NotAllowed, match="may not move partition 2 away from cloud-0"):
        check_owners(Identity(Role.NODE, "edge-0"), {1: "edge-0", 2: "cloud-0"})


def test_a_data_client_reaches_its_operators() -> None:
    who = Identity(Role.DATA, "gw", ("Pumps",))
    header = replica_pb2.ApplyHeader
    rule = check_call(REPLICA + "Apply", who)
    check_request(rule, REPLICA + "Apply", who, replica_pb2.ApplyRequest(header=header(operator="Pumps")))
    check_request(rule, REPLICA + "Apply", who, replica_pb2.ApplyRequest())  # a later piece of a call that was checked
    with pytest.raises(NotAllowed, match="data/gw may not reach the operator 'Tally'"):
        check_request(rule, REPLICA + "Apply", who, replica_pb2.ApplyRequest(header=header(operator="Tally")))
    scan = check_call(REPLICA + "Scan", who)
    with pytest.raises(NotAllowed, match="'Tally'"):
        check_request(scan, REPLICA + "Scan", who, replica_pb2.ScanRequest(operator="Tally"))
    with pytest.raises(NotAllowed, match="Status, which concerns all operators"):
        check_call(CONTROLLER + "Status", who)
    everything = Identity(Role.DATA, "spark")
    assert check_call(CONTROLLER + "Status", everything)
    check_request(scan, REPLICA + "Scan", everything, replica_pb2.ScanRequest(operator="Tally"))


# -- users of a process ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("role", Role)
def test_only_an_administrator_calls_for_its_users(role: Role) -> None:
    alice = Identity(Role.OPERATE, "alice")
    if role is Role.ADMIN:
        check_delegate(CONTROLLER + "Drain", Identity(role, "page"), alice)
        return
    with pytest.raises(NotAllowed, match=f"{role}/page may not call for operate/alice") as refused:
        check_delegate(CONTROLLER + "Drain", Identity(role, "page"), alice)
    assert refused.value.where["who"] == Identity(role, "page")
    assert refused.value.where["call"] == "Drain"


@pytest.mark.parametrize("role", Role)
def test_a_user_is_nothing_that_listens(role: Role) -> None:
    page, user = Identity(Role.ADMIN, "page"), Identity(role, "alice")
    if not role.listens:
        check_delegate(CONTROLLER + "Drain", page, user)
        return
    with pytest.raises(NotAllowed, match=f"admin/page may not call for {role}/alice"):
        check_delegate(CONTROLLER + "Drain", page, user)


def test_an_author_names_both_however_long_their_names_are() -> None:
    page, alice = Identity(Role.ADMIN, "page"), Identity(Role.OPERATE, "alice")
    assert str(Asker(page)) == "admin/page"
    assert str(Asker(page, alice)) == "operate/alice via admin/page"
    longest = str(Asker(Identity(Role.ADMIN, "p" * 128), Identity(Role.OPERATE, "a" * 128)))
    assert AUTHOR_MAX - 1 <= len(longest) <= AUTHOR_MAX
    assert "aaa via admin/ppp" in longest
