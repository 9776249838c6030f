"""Configures this process from a settings file for one test."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from stateflow.settings import CONFIG, base

Configure = Callable[[str], Path]


@pytest.fixture(autouse=True)
def no_file(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv(CONFIG, "")
    yield
    base._read.cache_clear()


@pytest.fixture
def configure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Configure:
    def write(text: str) -> Path:
        file = tmp_path / "fleet.toml"
        file.write_text(text)
        file.chmod(0o600)
        base._read.cache_clear()
        monkeypatch.setenv(CONFIG, str(file))
        return file

    return write
