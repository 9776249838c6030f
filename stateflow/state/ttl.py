"""How long entries of a state live: what ``ttl=``, ``ttl_domain=`` and ``ttl_refresh=`` say."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Final, Literal, get_args

from stateflow.errors import DeclarationError

Domain = Literal["processing", "event"]
Refresh = Literal["write", "read_write"]

#: a read is worth a write once this part of the ttl has passed since the expiry was last written
REFRESH_AFTER: Final = 0.1


@dataclass(frozen=True, slots=True)
class Ttl:
    """
    Attributes:
        us: an entry is gone this many microseconds after it was written.
        domain: whose time counts: the machine's, or the watermark's.
        refresh: whether reading an entry keeps it alive, too.
    """

    us: int
    domain: Domain
    refresh: Refresh

    @classmethod
    def of(cls, ttl: float | timedelta | None, domain: Domain, refresh: Refresh) -> Ttl | None:
        """None for no ttl. Raises DeclarationError for one that is not a positive, finite time."""
        if domain not in get_args(Domain):
            raise DeclarationError(f"there is no ttl_domain {domain!r}", remedy="use 'processing' or 'event'")
        if refresh not in get_args(Refresh):
            raise DeclarationError(f"there is no ttl_refresh {refresh!r}", remedy="use 'write' or 'read_write'")
        if ttl is None:
            return None
        if isinstance(ttl, bool) or not isinstance(ttl, int | float | timedelta):
            raise DeclarationError(f"{ttl!r} is no ttl", remedy="use seconds or a timedelta")
        try:
            us = (ttl if isinstance(ttl, timedelta) else timedelta(seconds=ttl)) // timedelta(microseconds=1)
        except (ValueError, OverflowError) as error:
            raise DeclarationError(f"{ttl!r} is no ttl: {error}", remedy="use seconds or a timedelta") from error
        if us <= 0:
            raise DeclarationError(f"a ttl of {ttl!r} lets nothing live", remedy="use a positive time")
        return cls(us, domain, refresh)

    @classmethod
    def described(cls, described: Mapping[str, Any] | None) -> Ttl | None:
        """As :meth:`Declaration.describe` has it. Raises KeyError, TypeError."""
        return None if described is None else cls(described["us"], described["domain"], described["refresh"])

    @property
    def refresh_below_us(self) -> int:
        """A read rewrites the expiry when less than this is left."""
        return self.us - int(self.us * REFRESH_AFTER)
