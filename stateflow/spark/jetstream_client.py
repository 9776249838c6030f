"""Client of a NATS server for the JetStream source: facts about a stream, and the messages of a range of it.

Blocking, and connected only during a request, as Spark calls it from processes that come and go. It speaks JetStream's
JSON API directly: for the few requests needed here that is clearer than a client library's wrappers.
"""

from __future__ import annotations

import asyncio
import json
import time
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, TypeVar

import nats
from nats.aio.msg import Msg
from nats.errors import Error as NatsError
from nats.errors import NoRespondersError

from stateflow.clock import SYSTEM_CLOCK
from stateflow.errors import InvalidArgument, SourceMissing, Unavailable
from stateflow.settings import NatsSettings

T = TypeVar("T")
CONNECT_TIMEOUT_S = 5.0
REQUEST_TIMEOUT_S = 10.0
RETRY_INTERVAL_S = 0.25
#: messages requested at once; a message is at most a few MB, mostly far less
CHUNK = 512
#: seconds after which the server forgets a consumer whose reader has died
INACTIVE_S = 60
_NO_STREAM = 10059


@dataclass(frozen=True, slots=True)
class Place:
    """Servers and name of a stream. ``subject``: the wanted subjects; None: all. ``domain``: JetStream domain."""

    servers: tuple[str, ...]
    stream: str
    subject: str | None = None
    domain: str | None = None


@dataclass(frozen=True, slots=True)
class Message:
    """One message. ``time_us``: when the server stored it, µs since 1970."""

    seq: int
    time_us: int
    subject: str
    headers: dict[str, str] | None
    data: bytes


@dataclass(frozen=True, slots=True)
class StreamFacts:
    """Facts about a stream.

    The stream holds the sequences ``first``…``last`` except ``deleted`` (ascending); in an empty stream ``last`` is
    less than ``first``. ``created`` distinguishes two streams of one name.
    """

    created: str
    first: int
    last: int
    deleted: Sequence[int] = ()
    retention: str = "limits"

    def held(self, after: int, last: int) -> int:
        """Returns the number of messages that the stream holds with after < sequence ≤ last."""
        after, last = max(after, self.first - 1), min(last, self.last)
        return max(0, last - after - (bisect_right(self.deleted, last) - bisect_right(self.deleted, after)))


class Connection:
    """Connection to the first server that answers.

    Raises Unavailable for errors that may pass, InvalidArgument and SourceMissing for others.
    """

    def __init__(self, place: Place) -> None:
        self._place = place
        self._api_prefix = f"$JS.{place.domain}.API" if place.domain else "$JS.API"
        self._runner = asyncio.Runner()
        try:
            self._nc = self._run(connect(place.servers))
        except BaseException:
            self._runner.close()
            raise

    def __enter__(self) -> Connection:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        try:
            self._runner.run(self._nc.close())
        except (OSError, NatsError):  # the connection was gone already
            pass
        finally:
            self._runner.close()

    def facts(self) -> StreamFacts:
        info = self._api(f"STREAM.INFO.{self._place.stream}")
        if info["state"].get("num_deleted"):
            info = self._api(f"STREAM.INFO.{self._place.stream}", {"deleted_details": True})
        state = info["state"]
        return StreamFacts(
            created=info["created"],
            first=max(1, state["first_seq"]),
            last=state["last_seq"],
            deleted=tuple(sorted(state.get("deleted") or ())),
            retention=info["config"]["retention"],
        )

    def check_subject(self) -> None:
        """Checks that the stream can hold the wanted subject. Raises InvalidArgument."""
        self._delete_consumer(self._new_consumer(1)[0])

    def messages(self, first: int, last: int) -> Iterator[list[Message]]:
        """Yields, in chunks and in order, all messages held with first ≤ sequence ≤ last and a wanted subject."""
        name, pending = self._new_consumer(first)
        inbox = self._nc.new_inbox()
        arriving = self._run(self._nc.subscribe(inbox, pending_bytes_limit=-1))
        while pending and first <= last:
            count = min(CHUNK, pending, last - first + 1)
            got, whole = self._run(self._pull(name, inbox, arriving, count))
            found, pending = [], 0
            for message in got:
                read, pending = _message(message)
                if read.seq <= last:
                    found.append(read)
            if found:
                yield found
            if not whole:
                raise self._unavailable("it stopped sending")
            if len(found) < len(got):
                break
            first = found[-1].seq + 1 if found else first
        self._delete_consumer(name)

    async def _pull(self, name: str, inbox: str, arriving: Any, count: int) -> tuple[list[Msg], bool]:
        """Returns the next messages, at most ``count``, and whether these are all that were to come."""
        request = json.dumps({"batch": count, "no_wait": True}).encode()
        await self._nc.publish(f"{self._api_prefix}.CONSUMER.MSG.NEXT.{self._place.stream}.{name}", request, inbox)
        got: list[Msg] = []
        try:
            while len(got) < count:
                message = await arriving.next_msg(timeout=REQUEST_TIMEOUT_S)
                if message.headers and "Status" in message.headers and not message.reply:
                    # nothing is left: messages that were counted as pending have been deleted since
                    return got, message.headers["Status"] in ("404", "408")
                got.append(message)
        except (OSError, TimeoutError, NatsError):
            return got, False
        return got, True

    def _new_consumer(self, first: int) -> tuple[str, int]:
        """Makes an ephemeral consumer that keeps nothing on the server's disk; returns (name, messages pending)."""
        place = self._place
        config: dict[str, Any] = {
            "deliver_policy": "by_start_sequence",
            "opt_start_seq": first,
            "ack_policy": "none",
            "replay_policy": "instant",
            "inactive_threshold": INACTIVE_S * 10**9,
            "mem_storage": True,
            "num_replicas": 1,
        }
        if place.subject is not None:
            config["filter_subject"] = place.subject
        made = self._api(f"CONSUMER.CREATE.{place.stream}", {"stream_name": place.stream, "config": config})
        return made["name"], made["num_pending"]

    def _delete_consumer(self, name: str) -> None:
        self._api(f"CONSUMER.DELETE.{self._place.stream}.{name}")

    def _api(self, what: str, request: dict[str, Any] | None = None) -> dict[str, Any]:
        payload = json.dumps(request).encode() if request else b""
        try:
            reply = self._run(self._nc.request(f"{self._api_prefix}.{what}", payload, timeout=REQUEST_TIMEOUT_S))
        except Unavailable as error:
            if isinstance(error.__cause__, NoRespondersError):
                error.remedy = "start the server with JetStream (-js), or correct the option domain"
            raise
        answer: dict[str, Any] = json.loads(reply.data)
        said = answer.get("error")
        if said is None:
            return answer
        if said.get("err_code") == _NO_STREAM:
            raise SourceMissing(
                f"there is no stream {self._place.stream!r}",
                remedy="create it, or correct the option stream",
                servers=",".join(self._place.servers),
            )
        if said.get("code", 500) >= 500:
            raise self._unavailable(said.get("description", "the request failed"))
        raise InvalidArgument(
            f"the server refuses the request: {said.get('description')}",
            remedy="correct the options stream and subject",
            stream=self._place.stream,
            subject=self._place.subject,
        )

    def _run(self, work: Any) -> Any:
        try:
            return self._runner.run(work)
        except (OSError, TimeoutError, NatsError) as error:
            raise self._unavailable(str(error) or type(error).__name__) from error

    def _unavailable(self, said: str) -> Unavailable:
        return Unavailable(
            f"the NATS server does not answer: {said.removeprefix('nats: ')}",
            remedy="start it, or correct the option servers",
            servers=",".join(self._place.servers),
            stream=self._place.stream,
        )


async def connect(servers: Sequence[str]) -> Any:
    """Returns a client of the first server that answers.

    Raises OSError, TimeoutError or nats errors; InvalidArgument for wrong credentials.
    """
    failed: Exception | None = None
    for server in servers:
        try:
            return await nats.connect(
                server,
                name="stateflow",
                allow_reconnect=False,  # a consumer would not survive it; the reader starts a new one
                max_reconnect_attempts=1,  # by default nats tries an address without a listener for two minutes
                reconnect_time_wait=0,
                connect_timeout=int(CONNECT_TIMEOUT_S),
                error_cb=_quiet,
                **_credentials(),
            )
        except (OSError, TimeoutError, NatsError) as error:
            if "authorization" in str(error).lower():
                raise InvalidArgument(
                    "the server refuses the credentials",
                    remedy="set STATEFLOW_NATS_USER and _PASSWORD, _TOKEN or _CREDS in the environment",
                    server=server,
                ) from None
            failed = error
    assert failed is not None
    raise failed


def patiently(place: Place, ask: Callable[[Connection], T], timeout_s: float) -> T:
    """Returns the answer, asking again while the server is away, for at most ``timeout_s``."""
    deadline = SYSTEM_CLOCK.monotonic() + timeout_s
    while True:
        try:
            with Connection(place) as connection:
                return ask(connection)
        except Unavailable:
            if SYSTEM_CLOCK.monotonic() >= deadline:
                raise
            time.sleep(RETRY_INTERVAL_S)


def read_range(place: Place, first: int, last: int, timeout_s: float) -> Iterator[list[Message]]:
    """Yields messages as :meth:`Connection.messages` does, and resumes behind the last one after an outage.

    Raises Unavailable when nothing comes for ``timeout_s``.
    """
    deadline = SYSTEM_CLOCK.monotonic() + timeout_s
    while first <= last:
        try:
            with Connection(place) as connection:
                for chunk in connection.messages(first, last):
                    first = chunk[-1].seq + 1
                    yield chunk
                    deadline = SYSTEM_CLOCK.monotonic() + timeout_s
                return
        except Unavailable:
            if SYSTEM_CLOCK.monotonic() >= deadline:
                raise
            time.sleep(RETRY_INTERVAL_S)


def _message(message: Msg) -> tuple[Message, int]:
    """Returns a message, and the number of messages behind it.

    The reply subject has both. Its parts are counted from the end:
    ``$JS.ACK.[domain.account.]stream.consumer.delivered.sequence.number.time.pending[.token]``.
    """
    parts = message.reply.split(".")
    at = 5 if len(parts) == 9 else 7
    read = Message(
        seq=int(parts[at]),
        time_us=int(parts[at + 2]) // 1000,
        subject=message.subject,
        headers=dict(message.headers) if message.headers else None,
        data=message.data,
    )
    return read, int(parts[at + 3])


def _credentials() -> dict[str, Any]:
    """Returns the credentials from this process's settings.

    Options of a source have none, as Spark shows them.
    """
    said = NatsSettings()
    values = {
        "user": said.user,
        "password": said.password.get_secret_value(),
        "token": said.token.get_secret_value(),
        "user_credentials": said.creds,
    }
    return {key: value for key, value in values.items() if value}


async def _quiet(_: Exception) -> None:
    """Ignores the error: the call that waits for an answer raises it."""
