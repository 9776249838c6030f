"""Values of a user as errors repeat them."""

from __future__ import annotations

from typing import Any

import pytest

from stateflow.types import shown


class Unshowable:
    def __repr__(self) -> str:
        raise RuntimeError("no")


@pytest.mark.parametrize("value", ["größe", b"\xff", 1.5, None, ["a"], "\ud800", "a\nb"])
def test_a_short_value_is_its_repr(value: Any) -> None:
    assert shown(value) == repr(value)
    assert shown(value).isprintable()


@pytest.mark.parametrize("value", ["x" * 5000, b"x" * 5000, ["x"] * 5000])
def test_a_long_value_is_shortened(value: Any) -> None:
    assert len(shown(value)) == 80
    assert shown(value).endswith("...")


def test_a_value_that_cannot_be_shown_is_named_by_its_type() -> None:
    assert shown(10**5000) == "a value of type int, which cannot be shown: ValueError"
    assert shown([Unshowable()]) == "a value of type list, which cannot be shown: RuntimeError"
