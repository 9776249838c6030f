"""Time to live of a state's entries, as ``ttl=``, ``ttl_domain=`` and ``ttl_refresh=`` declare it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Final, Literal, get_args

from stateflow.errors import DeclarationError

Domain = Literal["processing", "event"]
Refresh = Literal["write", "read_write"]

#: fraction of the ttl that must have passed since an expiry was written before a read renews it
REFRESH_AFTER: Final = 0.1


@dataclass(frozen=True, slots=True)
class Ttl:
    """Time to live of a state's entries.

    Attributes:
        us: microseconds after which an entry expires, from when it was last written.
        domain: the clock that counts: the machine's ("processing"), or the watermark ("event").
        refresh: whether reading an entry renews its expiry, too ("read_write"), or only writing it does ("write").
    """

    us: int
    domain: Domain
    refresh: Refresh

    @classmethod
    def of(cls, ttl: float | timedelta | None, domain: Domain, refresh: Refresh) -> Ttl | None:
        """Checks and converts the arguments of a declaration; None: no ttl.

        Raises DeclarationError for a ttl that is not a positive, finite time.
        """
        if domain not in get_args(Domain):
            raise DeclarationError(f"unknown ttl_domain {domain!r}", remedy="use 'processing' or 'event'")
        if refresh not in get_args(Refresh):
            raise DeclarationError(f"unknown ttl_refresh {refresh!r}", remedy="use 'write' or 'read_write'")
        if ttl is None:
            return None
        if isinstance(ttl, bool) or not isinstance(ttl, int | float | timedelta):
            raise DeclarationError(f"{ttl!r} is not a ttl", remedy="use seconds or a timedelta")
        try:
            us = (ttl if isinstance(ttl, timedelta) else timedelta(seconds=ttl)) // timedelta(microseconds=1)
        except (ValueError, OverflowError) as error:
            raise DeclarationError(f"{ttl!r} is not a ttl: {error}", remedy="use seconds or a timedelta") from error
        if us <= 0:
            raise DeclarationError(f"a ttl of {ttl!r} is not positive", remedy="use a positive time")
        return cls(us, domain, refresh)

    @classmethod
    def described(cls, described: Mapping[str, Any] | None) -> Ttl | None:
        """Returns the ttl in the output of :meth:`Declaration.describe`; None: no ttl. Raises KeyError, TypeError."""
        return None if described is None else cls(described["us"], described["domain"], described["refresh"])

    @property
    def refresh_below_us(self) -> int:
        """Remaining life in microseconds below which a read renews the expiry."""
        return self.us - int(self.us * REFRESH_AFTER)
