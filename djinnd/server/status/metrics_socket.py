"""The socket from which Prometheus, or `curl --unix-socket`, reads the metrics: HTTP/1.0, one GET per connection.

The path of the URL is ignored. A connection has little time, a short request and one of PLACES places. When all places
are taken, a new connection replaces the oldest one, so that idle connections keep no other out.
"""

from __future__ import annotations

import asyncio
import logging
import socket

from djinnd.server.handover.socket_path import SocketPath
from djinnd.server.status.metrics import CONTENT_TYPE, DaemonMetrics
from djinnd.server.wire.listener import Listener

log = logging.getLogger("djinnd.server")

PLACES = 16
HEAD_BYTES = 8 << 10  # of a request
PATIENCE = 15.0  # seconds for an exchange; the engine may take 5 of them to answer


class MetricsSocket:
    """Owns the socket's path from `start` to `close`."""

    def __init__(self, path: str, metrics: DaemonMetrics) -> None:
        """`path`: where the socket is; empty: there is none."""
        self._path = path
        self._metrics = metrics
        self._claim: SocketPath | None = None
        self._listener: Listener | None = None
        self._exchanges: dict[asyncio.Task[None], None] = {}  # the oldest first

    def start(self) -> None:
        """Opens the socket. Raises StartError if the path cannot be had."""
        if self._path:
            self._claim = SocketPath(self._path, setting="`metrics` in the configuration")
            self._listener = Listener(self._claim.listener, self._accept)
            log.info("metrics_ready socket=%s", self._path)

    async def close(self) -> None:
        """Ends all exchanges and removes the socket. Does nothing if it was not started."""
        if self._listener is not None:
            self._listener.close()
        exchanges = list(self._exchanges)
        for exchange in exchanges:
            exchange.cancel()
        await asyncio.gather(*exchanges, return_exceptions=True)
        if self._claim is not None:
            self._claim.release()

    def _accept(self, sock: socket.socket) -> None:
        if len(self._exchanges) >= PLACES:
            oldest = next(iter(self._exchanges))
            del self._exchanges[oldest]
            oldest.cancel()
        exchange = asyncio.create_task(self._exchange(sock))
        self._exchanges[exchange] = None
        exchange.add_done_callback(lambda task: self._ended(task, sock))

    def _ended(self, exchange: asyncio.Task[None], sock: socket.socket) -> None:
        self._exchanges.pop(exchange, None)
        sock.close()  # in case it was cancelled before it began
        if not exchange.cancelled() and (error := exchange.exception()) is not None:
            log.error("metrics_failed", exc_info=error)

    async def _exchange(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        reader, writer = await asyncio.open_unix_connection(sock=sock, limit=HEAD_BYTES)
        try:
            async with asyncio.timeout(PATIENCE):
                writer.write(await self._answer(reader))
                await writer.drain()
                writer.close()
                await writer.wait_closed()
        except (TimeoutError, OSError) as error:
            log.debug("metrics_unread error=%r", error)
        finally:
            writer.transport.abort()

    async def _answer(self, reader: asyncio.StreamReader) -> bytes:
        try:
            head = await reader.readuntil(b"\r\n\r\n")
        except (asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            return _response("400 Bad Request", b"this is no HTTP request\n", "text/plain")
        if not head.startswith(b"GET "):
            return _response("405 Method Not Allowed", b"GET gives the metrics\n", "text/plain")
        return _response("200 OK", await self._metrics.text(), CONTENT_TYPE)


def _response(status: str, body: bytes, content_type: str) -> bytes:
    head = f"HTTP/1.0 {status}\r\nContent-Type: {content_type}\r\nContent-Length: {len(body)}\r\n\r\n"
    return head.encode() + body
