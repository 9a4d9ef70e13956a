"""Sends a reply: the headers once, a stream's bytes as they come, and pings while none come.

A stream begins with its first event, or with its first ping when that takes long. So an error before that has its
proper status, and nearly all errors come before.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import aclosing, asynccontextmanager, suppress
from typing import Any

from djinnd.gateway.http.errors import ClientGone
from djinnd.gateway.http.replies import Framing, Header, Reply, Stream, Whole

_STREAM_HEADERS: list[Header] = [(b"cache-control", b"no-cache"), (b"x-accel-buffering", b"no")]  # proxies pass it on

Send = Callable[[Any], Awaitable[None]]


class Sending:
    """Sends one reply. `headers` is called when it begins: the names of ignored fields are known by then."""

    def __init__(self, send: Send, headers: Callable[[], Iterable[Header]], ping_seconds: float) -> None:
        self.status = 0  # 0: nothing has been sent
        self._client = send
        self._headers = headers
        self._ping_seconds = ping_seconds
        self._clock = asyncio.get_running_loop().time
        self._last = 0.0  # when something was sent

    async def reply(self, reply: Reply) -> None:
        if isinstance(reply, Stream):
            await self._stream(reply)
        else:
            await self.whole(reply)

    async def whole(self, reply: Whole, is_last: bool = False) -> None:
        """`is_last`: the connection is closed after the reply, as the rest of the request is not read."""
        closing = [(b"connection", b"close")] if is_last else []
        length = (b"content-length", str(len(reply.body)).encode())
        await self._begin(reply.status, [(b"content-type", reply.content_type), length, *closing, *reply.headers])
        await self._send({"type": "http.response.body", "body": reply.body})

    async def end_stream(self, last: bytes = b"") -> None:
        await self._send({"type": "http.response.body", "body": last})

    async def _send(self, message: Any) -> None:
        """Raises ClientGone where the connection was cut off meanwhile, as uvloop says by a RuntimeError."""
        try:
            await self._client(message)
        except RuntimeError as error:
            if "closed" not in str(error):
                raise
            raise ClientGone from error

    async def _stream(self, stream: Stream) -> None:
        async with aclosing(stream.events) as events, self._pinged(stream.framing):
            async for data in events:
                await self._bytes(data, stream.framing)
        await self.end_stream()

    async def _bytes(self, data: bytes, framing: Framing) -> None:
        if not self.status:
            await self._begin(200, [(b"content-type", framing.content_type), *_STREAM_HEADERS])
        self._last = self._clock()
        await self._send({"type": "http.response.body", "body": data, "more_body": True})

    @asynccontextmanager
    async def _pinged(self, framing: Framing) -> AsyncIterator[None]:
        """A stream whose format has no pings still begins after a while, so that a proxy sees the headers."""
        self._last = self._clock()
        pinging = asyncio.create_task(self._ping(framing))
        try:
            yield
        finally:
            pinging.cancel()
            with suppress(asyncio.CancelledError):
                await pinging

    async def _ping(self, framing: Framing) -> None:
        while True:
            quiet = self._clock() - self._last
            if quiet >= self._ping_seconds:
                await self._bytes(framing.ping, framing)
                quiet = 0.0
            await asyncio.sleep(self._ping_seconds - quiet)

    async def _begin(self, status: int, headers: list[Header]) -> None:
        assert not self.status, "a reply begins once"
        self.status = status
        await self._send({"type": "http.response.start", "status": status, "headers": [*headers, *self._headers()]})
