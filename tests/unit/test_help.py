"""``help()`` of public names shows their use: an example that tests run, or a line that needs a cluster."""

from __future__ import annotations

import ast
import doctest
import inspect
import re
import sys
from collections.abc import Iterator
from typing import Any

import pytest

import stateflow
from stateflow import client, spark, state, testing

SURFACES = (stateflow, state, spark, client, testing)
LINE = re.compile(r"Example: ``(.+?)``", re.DOTALL)


def public() -> Iterator[tuple[str, Any]]:
    seen: set[int] = set()
    for module in SURFACES:
        for name in module.__all__:
            found = getattr(module, name)
            if (inspect.isclass(found) or inspect.isfunction(found)) and id(found) not in seen:
                seen.add(id(found))
                yield f"{module.__name__}.{name}", found


PUBLIC = dict(public())


def test_there_are_many() -> None:
    assert len(PUBLIC) > 90


@pytest.mark.parametrize("name", PUBLIC)
def test_its_help_has_an_example_that_works(name: str) -> None:
    found = PUBLIC[name]
    text = found.__doc__ or ""
    lines = [" ".join(line.split()) for line in LINE.findall(text)]
    known = vars(sys.modules[found.__module__]).copy()
    test = doctest.DocTestParser().get_doctest(inspect.cleandoc(text), known, name, None, None)
    assert lines or test.examples, "give it one"
    for line in lines:
        ast.parse(line)
    told: list[str] = []
    doctest.DocTestRunner(optionflags=doctest.ELLIPSIS).run(test, out=told.append)
    assert told == []
