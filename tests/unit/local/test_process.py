"""Environment of a process of a local cluster."""

from __future__ import annotations

from pathlib import Path

import pytest

from stateflow.errors import InvalidArgument
from stateflow.local.process import python_path


def test_a_directory_that_the_variable_cannot_hold_is_refused(tmp_path: Path) -> None:
    """A directory with ':' in its name is refused.

    Python looked in its two halves, and found no module of the program.
    """
    odd = tmp_path / "a:b"
    assert python_path(["/x", "", str(odd), "/x"]) == f"/x:{odd}", "nothing is there to be imported"
    odd.mkdir()
    with pytest.raises(InvalidArgument, match="with ':' in its name"):
        python_path(["/x", str(odd)])
