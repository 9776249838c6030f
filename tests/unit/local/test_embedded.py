"""The cluster of one program: which directory it may have."""

from __future__ import annotations

from pathlib import Path

import pytest

from stateflow.errors import InvalidArgument
from stateflow.local.embedded import embedded


def test_an_empty_text_is_not_the_working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InvalidArgument, match="the directory is empty text"):
        embedded("", create=False)
