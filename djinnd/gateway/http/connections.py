"""uvicorn's HTTP/1.1 protocol, with bounds in size and time on requests, and on clients that do not read.

uvicorn itself has none for a request's headers, for a connection that sends nothing, and for a client that reads
nothing. A connection has one timer, for the part that is due now:

    (header_seconds) headers ──► (body_seconds) body ──► answer ──► (uvicorn's keep-alive) the next request
                                                           └── (write_seconds) while the client takes nothing
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from djinnd.config import Http

log = logging.getLogger("djinnd.gateway")

HEAD_BYTES = 64 << 10  # of a request's line and headers
HEADERS = 200  # of a request: each look-up goes through all of them
PIPELINED = 16  # requests of one connection that wait for the first one's answer


class HttpConnection(HttpToolsProtocol):
    """`settings` returns the settings of the moment; `args` are uvicorn's."""

    def __init__(self, settings: Callable[[], Http], *args: Any) -> None:
        super().__init__(*args)
        self._settings = settings
        self._timer: asyncio.TimerHandle | None = None
        self._stalled: asyncio.TimerHandle | None = None
        self._in_head = True
        self._head_bytes = 0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > self._settings().connections and not self._close_an_idle_one():
            log.warning("http_connection_refused connections=%d", len(self.connections) - 1)
            transport.abort()
            return
        self._await("headers", self._settings().header_seconds)

    def connection_lost(self, exc: Exception | None) -> None:
        self._settle()
        if self._stalled is not None:
            self._stalled.cancel()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._in_head and self._timer is None:
            self._await("headers", self._settings().header_seconds)
        super().data_received(data)
        is_unfinished = self._in_head and self._timer is not None
        self._head_bytes = self._head_bytes + len(data) if is_unfinished else 0
        if self._head_bytes > HEAD_BYTES:
            self._abort("header_bytes")

    def on_header(self, name: bytes, value: bytes) -> None:
        super().on_header(name, value)
        if len(self.headers) > HEADERS:
            self._abort("headers")

    def on_headers_complete(self) -> None:
        self._in_head = False
        self._await("body", self._settings().body_seconds)
        super().on_headers_complete()
        if len(self.pipeline) > PIPELINED:
            self._abort("pipelined")

    def on_message_complete(self) -> None:
        self._in_head = True
        self._settle()
        super().on_message_complete()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._stalled = self.loop.call_later(self._settings().write_seconds, self._abort, "write_seconds")

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._stalled is not None:
            self._stalled.cancel()
            self._stalled = None

    @property
    def is_idle(self) -> bool:
        """True between two requests."""
        return self._timer is None and (self.cycle is None or self.cycle.response_complete)

    def _close_an_idle_one(self) -> bool:
        idle = next((each for each in self.connections if isinstance(each, HttpConnection) and each.is_idle), None)
        if idle is not None:
            idle.transport.close()
        return idle is not None

    def _await(self, what: str, seconds: float) -> None:
        self._settle()
        self._timer = self.loop.call_later(seconds, self._abort, what)

    def _settle(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _abort(self, why: str) -> None:
        self._settle()
        log.info("http_connection_aborted reason=%s", why)
        self.transport.abort()
