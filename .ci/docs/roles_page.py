"""The tables of roles and calls in docs/security.md, made from the rules. ``.ci/generate-settings`` writes them."""

from __future__ import annotations

from stateflow.security.roles import RULES, Role, Rule

#: lines of the page between which everything is generated
BEGIN = "<!-- Made by .ci/generate-settings from stateflow/security/roles.py -->\n"
END = "<!-- End of what .ci/generate-settings made -->\n"
#: tables of the page, and what the methods in them begin with; the last one has all others
_TABLES = {
    "Calls to a controller": "/stateflow.rpc.ControllerService/",
    "Calls to a replica": "/stateflow.rpc.ReplicaService/",
    "Calls to an agent": "/stateflow.rpc.AgentService/",
    "Calls to every process": "/",
}
_HEAD = f"| call | {' | '.join(Role)} |\n|{'---|' * (len(Role) + 1)}\n"


def page(before: str) -> str:
    """Returns the page with new tables.

    Args:
        before: the present page.

    Raises ValueError if the page has no place for the tables.
    """
    prose, begins, rest = before.partition(BEGIN)
    _, ends, after = rest.partition(END)
    if not begins or not ends:
        raise ValueError("the page has no lines that mark where the tables begin and end")
    return prose + BEGIN + "".join(_table(title, prefix) for title, prefix in _TABLES.items()) + "\n" + END + after


def _table(title: str, prefix: str) -> str:
    rows = sorted(_row(method, prefix) for method in RULES if _prefix_of(method) == prefix)
    return f"\n### {title}\n\n{_HEAD}{''.join(rows)}"


def _prefix_of(method: str) -> str:
    return next(prefix for prefix in _TABLES.values() if method.startswith(prefix))


def _row(method: str, prefix: str) -> str:
    cells = (_cell(RULES[method], role) for role in Role)
    return f"| `{method.removeprefix(prefix)}` | {' | '.join(cells)} |\n"


def _cell(rule: Rule, role: Role) -> str:
    """Returns how far a role may make a call, in words that the page explains."""
    if role not in rule.roles:
        return ""
    if rule.own and role in (Role.NODE, Role.AGENT):
        return "its own name" if rule.itself else "its own"
    return "its operators" if rule.operator and role.limited else "yes"
