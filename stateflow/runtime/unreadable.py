"""A value of a row that Python cannot represent, like a time in the year 12000: an error only when it is looked at."""

from __future__ import annotations

from typing import Any, NoReturn

from stateflow.errors import InvalidArgument


class Unreadable:
    """Stand-in for a value that Python lacks. All uses but showing it raise InvalidArgument with column and row."""

    __slots__ = ("_column", "_row", "_type", "_why")

    def __init__(self, column: str, row: int, type_: str, why: str) -> None:
        self._column, self._row, self._type, self._why = column, row, type_, why

    def refusal(self) -> InvalidArgument:
        return InvalidArgument(
            f"Python cannot represent a {self._type}: {self._why}",
            remedy="filter out such rows, or cast the column",
            column=self._column,
            row=self._row,
        )

    def __repr__(self) -> str:
        return f"<a {self._type} that Python cannot represent>"

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):  # a look-up of what the value can do
            raise AttributeError(name)
        raise self.refusal()

    def _refuse(self, *_: Any) -> NoReturn:
        raise self.refusal()

    __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = __hash__ = __bool__ = _refuse
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __mod__ = __truediv__ = __floordiv__ = _refuse
    __neg__ = __abs__ = __int__ = __float__ = __index__ = __round__ = __bytes__ = __reduce__ = _refuse
    __getitem__ = __iter__ = __len__ = __contains__ = __reversed__ = __or__ = __ror__ = _refuse

    def __format__(self, spec: str) -> str:
        return format(repr(self), spec) if not spec else self._refuse()
