"""Temporary changes of this process's environment variables."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager


@contextmanager
def environment(given: Mapping[str, str]) -> Iterator[None]:
    """Sets variables within the block; afterwards they have their former values, or are unset."""
    before = {variable: os.environ.get(variable) for variable in given}
    os.environ.update(given)
    try:
        yield
    finally:
        for variable, value in before.items():
            if value is None:
                os.environ.pop(variable, None)
            else:
                os.environ[variable] = value
