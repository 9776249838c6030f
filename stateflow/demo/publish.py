"""The demonstration's stream on a NATS server: made, filled, deleted."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from typing import Any

from nats.errors import Error as NatsError
from nats.js.errors import NotFoundError

from stateflow.errors import Unavailable
from stateflow.spark.jetstream import connect

#: one message in so many waits until the server has stored it and all before it
ACKNOWLEDGED_EVERY = 1_000


def published(url: str, stream: str, payloads: Iterable[bytes]) -> None:
    """Makes a new stream with these messages in this order. Raises Unavailable."""

    async def work(client: Any) -> None:
        js = client.jetstream()
        await js.add_stream(name=stream, subjects=[f"{stream}.flights"])
        stored, count = 0, 0
        for count, payload in enumerate(payloads, 1):
            if count % ACKNOWLEDGED_EVERY:
                await client.publish(f"{stream}.flights", payload)
            else:
                stored = (await js.publish(f"{stream}.flights", payload)).seq
        if count % ACKNOWLEDGED_EVERY:
            await client.flush()
            stored = (await js.stream_info(stream)).state.last_seq
        if stored != count:
            raise Unavailable(f"the server stored {stored} of {count} messages", remedy="see its log", server=url)

    _with_server(url, work)


def deleted(url: str, stream: str) -> None:
    """Deletes a stream, if it is there. Raises Unavailable."""

    async def work(client: Any) -> None:
        try:
            await client.jetstream().delete_stream(stream)
        except NotFoundError:
            pass

    _with_server(url, work)


def _with_server(url: str, work: Callable[[Any], Awaitable[None]]) -> None:
    async def run() -> None:
        client = await connect((url,))
        try:
            await work(client)
        finally:
            await client.close()

    try:
        asyncio.run(run())
    except (OSError, TimeoutError, NatsError) as error:
        raise Unavailable(
            f"the NATS server does not answer: {str(error) or type(error).__name__}",
            remedy="start one with JetStream (nats-server -js), or pass its URL with --nats",
            server=url,
        ) from error
