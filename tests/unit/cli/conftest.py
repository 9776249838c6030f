"""Makes the program's commands once for all tests, as that takes longer than most of the tests."""

from __future__ import annotations

import functools
from collections.abc import Iterator

import pytest
import typer.testing


@pytest.fixture(autouse=True, scope="session")
def commands_made_once() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(typer.testing, "_get_command", functools.cache(typer.testing._get_command))
        yield
