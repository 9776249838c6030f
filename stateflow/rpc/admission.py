"""Admission of calls: the caller is known by its certificate, and the table of roles says what it may call.

Both are checked before any handler runs.
"""

from __future__ import annotations

import contextvars
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Any

from stateflow.clock import SYSTEM_CLOCK, Clock
from stateflow.errors import BadCertificate, NotAllowed, StateflowError
from stateflow.rpc.layers import Both, Context, Layer, Many, Unary
from stateflow.rpc.wire import abort
from stateflow.security.identity import Identity
from stateflow.security.roles import Rule, check_call, check_request

if TYPE_CHECKING:
    from stateflow.security.files import TlsFiles

_CALLER: contextvars.ContextVar[Identity | None] = contextvars.ContextVar("caller", default=None)


def caller() -> Identity | None:
    """Returns the caller of the running call. None: it came in plain text, or no call is running."""
    return _CALLER.get()


class _Caller:
    """The caller of one call, which may be revoked, or its certificate expire, while the call runs."""

    def __init__(self, files: TlsFiles, clock: Clock, method: str, pem: bytes) -> None:
        from stateflow.security.reading import certificate_of

        self._files, self._clock, self._method = files, clock, method
        self._certificate = certificate_of(pem)
        identity = self._certificate.identity
        if identity is None:
            raise NotAllowed(
                "the certificate has no stateflow identity",
                remedy="issue one with `stateflow certs issue`",
                call=method.rpartition("/")[2],
            )
        self.identity = identity
        self._ends_us = self._certificate.not_after.timestamp() * 1e6
        self._rule: Rule = check_call(method, identity)

    def check(self, request: Any) -> None:
        """Checks the certificate and one request. Raises NotAllowed."""
        if self._certificate.serial in self._files.current().revoked:
            raise self._refused("was revoked")
        if self._clock.now_us() > self._ends_us:
            raise self._refused("has expired")
        check_request(self._rule, self._method, self.identity, request)

    def _refused(self, why: str) -> NotAllowed:
        return NotAllowed(
            f"the certificate of {self.identity} {why}",
            remedy="use another one: `stateflow certs issue` or `renew`",
            call=self._method.rpartition("/")[2],
            who=self.identity,
            serial=f"{self._certificate.serial:x}",
        )


class Admission(Layer):
    def __init__(self, files: TlsFiles, clock: Clock = SYSTEM_CLOCK) -> None:
        super().__init__()
        self._files, self._clock = files, clock

    def unary(self, method: str, inner: Unary) -> Unary:
        async def call(request: Any, context: Context) -> Any:
            await self._admit(method, request, context)
            return await inner(request, context)

        return call

    def many(self, method: str, inner: Many) -> Many:
        async def call(request: Any, context: Context) -> AsyncIterator[Any]:
            """Checks each message, too: the stream may last for days, and a caller revoked meanwhile hears nothing
            more."""
            who = await self._admit(method, request, context)
            async for message in inner(request, context):
                try:
                    who.check(request)
                except NotAllowed as error:
                    await abort(context, error)
                yield message

        return call

    def both(self, method: str, inner: Both) -> Both:
        async def call(requests: AsyncIterator[Any], context: Context) -> None:
            """Checks each request, as the stream may last for days. The handler writes its responses itself."""
            who = await self._admit(method, None, context)

            async def checked() -> AsyncIterator[Any]:
                async for request in requests:
                    who.check(request)
                    yield request

            try:
                await inner(checked(), context)
            except NotAllowed as error:
                await abort(context, error)

        return call

    async def _admit(self, method: str, request: Any, context: Context) -> _Caller:
        """Admits the caller, or ends the call with NotAllowed.

        Args:
            request: None: the first request is still to come.
        """
        try:
            sent = context.auth_context().get("x509_pem_cert", [b""])[0]
            who = _Caller(self._files, self._clock, method, sent)
            if request is not None:
                who.check(request)
        except BadCertificate as error:
            refused: StateflowError = NotAllowed(error.what, remedy=error.remedy, **error.where)
        except NotAllowed as error:
            refused = error
        else:
            _CALLER.set(who.identity)  # for the task of this call, and the tasks that it begins
            return who
        await abort(context, refused)
        raise refused
