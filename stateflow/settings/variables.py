"""Environment variables: all that stateflow reads, and those that are set but that no process reads."""

from __future__ import annotations

import difflib
import logging
import os
import re
from collections.abc import Callable, Mapping

from stateflow.errors import InvalidArgument
from stateflow.settings.base import CONFIG, SECTIONS

log = logging.getLogger(__name__)

PREFIX = "STATEFLOW_"
#: prefix of variables of the project's own tests
_TESTS = "STATEFLOW_TEST_"
#: variable that makes unread variables an error, in this process and those that it starts
STRICT = "STATEFLOW_STRICT"
#: variables that are not settings, with what they are for
OTHERS = {
    CONFIG: "path of the settings file, like `--config`",
    STRICT: "1: refuse variables `STATEFLOW_…` that nothing reads, like `--strict`; else warn of them",
    "STATEFLOW_TRACEBACKS": "1: show errors with their full tracebacks",
    "STATEFLOW_INSIDE": "set by stateflow in processes that run operators; do not set it yourself",
}
#: variables that Kubernetes sets for a Service whose name begins with stateflow:
#: STATEFLOW_CONTROLLER_PORT_7070_TCP_ADDR
_OF_KUBERNETES = re.compile(r"_(SERVICE_HOST|SERVICE_PORT(_\w+)?|PORT(_\d+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?)?)$")
ALIKE = 0.8


def known_variables() -> set[str]:
    """Returns the environment variables that some process reads."""
    return set(OTHERS) | {
        kind.variable(name) for kinds in SECTIONS.values() for kind in kinds for name in kind.model_fields
    }


def own_variables(environment: Mapping[str, str]) -> list[str]:
    """Returns the variables that are set and are meant for stateflow, sorted."""
    return sorted(
        name
        for name in environment
        if (upper := name.upper()).startswith(PREFIX)  # settings are found in either case
        and not upper.startswith(_TESTS)
        and not _OF_KUBERNETES.search(upper)
    )


def unknown_variables(environment: Mapping[str, str]) -> dict[str, str | None]:
    """Returns the variables that are set and that no process reads, each with the name that may have been meant, or
    None."""
    known = known_variables()
    return {
        name: next(iter(difflib.get_close_matches(name.upper(), known, 1, ALIKE)), None)
        for name in own_variables(environment)
        if name.upper() not in known
    }


def is_strict(environment: Mapping[str, str]) -> bool:
    return environment.get(STRICT, "") not in ("", "0")


def check_variables(environment: Mapping[str, str] = os.environ, say: Callable[[str], None] | None = None) -> None:
    """Reports the variables that no process reads, each with the name that may have been meant. Raises InvalidArgument
    instead where STRICT is set. Otherwise they are no error: a variable may be for another release of the fleet.

    Args:
        say: takes a line; by default it is logged as a warning.
    """
    unknown = unknown_variables(environment)
    for name, meant in unknown.items():
        hint = f"did you mean {meant}?" if meant else ""
        if is_strict(environment):
            raise InvalidArgument(
                f"nothing reads {name}, which is set",
                remedy=hint or "remove it, or drop --strict and STATEFLOW_STRICT",
            )
        (say or log.warning)(f"nothing reads {name}, which is set{f': {hint}' if hint else ''}")
