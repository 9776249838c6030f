"""Loading operators that were deployed as text, also by the release before."""

from __future__ import annotations

import pytest

from stateflow import Operator, Timer
from stateflow.code.loading import find
from stateflow.errors import OperatorNotImportable


def test_text_that_release_0_1_deployed_is_loaded() -> None:
    """An excerpt imports what the program got by ``import *``. Release 0.1 defined public names in other modules."""
    text = (
        "from stateflow.runtime.operator import Operator as Operator\n"
        "from stateflow.runtime.timers import Timer as Clock\n"
        "class Op(Operator):\n"
        "    key, output = 'k', 'k string'\n"
        "    clock = Clock\n"
    )
    found = find("<notebook>:Op", text)
    assert issubclass(found, Operator)
    assert found.clock is Timer


@pytest.mark.parametrize(
    "line",
    [
        "from stateflow.runtime.slot import Slot as Slot",
        "from stateflow.operator.operator import SlidingWindows as SlidingWindows",
        "from stateflow.nowhere import Operator",
    ],
)
def test_no_other_import_is_changed(line: str) -> None:
    with pytest.raises(OperatorNotImportable, match="Error: "):
        find("<notebook>:Op", f"{line}\nclass Op: ...\n")
