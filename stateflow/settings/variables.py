"""Variables of the environment: which there are, and which of those that are set nobody reads."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping

from stateflow.settings.base import CONFIG, SECTIONS

PREFIX = "STATEFLOW_"
#: of the project's own tests
_TESTS = "STATEFLOW_TEST_"
#: that are no settings, with what they are for
OTHERS = {
    CONFIG: "names the file of settings, as `--config` does",
    "STATEFLOW_TRACEBACKS": "1: errors are shown with all of their tracebacks",
    "STATEFLOW_INSIDE": "set by stateflow for processes that run operators; not to be set by anybody else",
}
#: that Kubernetes sets for a Service whose name begins with stateflow: STATEFLOW_CONTROLLER_PORT_7070_TCP_ADDR
_OF_KUBERNETES = re.compile(r"_(SERVICE_HOST|SERVICE_PORT(_\w+)?|PORT(_\d+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?)?)$")
ALIKE = 0.8


def known_variables() -> set[str]:
    """Of the environment, that some process reads."""
    return set(OTHERS) | {
        kind.variable(name) for kinds in SECTIONS.values() for kind in kinds for name in kind.model_fields
    }


def own_variables(environment: Mapping[str, str]) -> list[str]:
    """That are set and are for stateflow, sorted."""
    return sorted(
        name
        for name in environment
        if name.startswith(PREFIX) and not name.startswith(_TESTS) and not _OF_KUBERNETES.search(name)
    )


def unknown_variables(environment: Mapping[str, str]) -> dict[str, str | None]:
    """That are set and nobody reads, each with the name that may have been meant."""
    known = known_variables()
    return {
        name: next(iter(difflib.get_close_matches(name, known, 1, ALIKE)), None)
        for name in own_variables(environment)
        if name not in known
    }
