"""Environment and log of a process of a local cluster."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from stateflow.agent.processes import FILE_BYTES, LocalLauncher, older
from stateflow.errors import InvalidArgument
from stateflow.fleet import Command, Launcher
from stateflow.local import process
from stateflow.local.process import ForkLauncher, python_path


def test_a_directory_that_the_variable_cannot_hold_is_refused(tmp_path: Path) -> None:
    """A directory with ':' in its name is refused.

    Python looked in its two halves, and found no module of the program.
    """
    odd = tmp_path / "a:b"
    assert python_path(["/x", "", str(odd), "/x"]) == f"/x:{odd}", "nothing is there to be imported"
    odd.mkdir()
    with pytest.raises(InvalidArgument, match="with ':' in its name"):
        python_path(["/x", str(odd)])


@pytest.mark.parametrize("launcher", [ForkLauncher(), LocalLauncher(rotates=False)], ids=["forked", "local"])
def test_a_full_log_is_rotated_at_the_start(
    launcher: Launcher, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: Any = lambda *_, **__: None  # noqa: E731
    monkeypatch.setattr(process, "fork_server", lambda: SimpleNamespace(start=started))
    monkeypatch.setattr("subprocess.Popen", started)
    log = tmp_path / "r.log"
    log.write_bytes(b"x" * (FILE_BYTES + 1))
    for _ in range(2):
        launcher.start(Command("r", [], {}, log))
        assert (log.stat().st_size, older(log, 1).stat().st_size) == (0, FILE_BYTES + 1)
