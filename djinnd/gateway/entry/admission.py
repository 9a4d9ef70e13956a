"""Who may come in: a token or the right to do without, and a place among the requests that are being answered."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from djinnd.config import Http
from djinnd.gateway.daemon.pools import Daemon, Pool
from djinnd.gateway.entry import auth
from djinnd.gateway.entry.metrics import Metrics
from djinnd.gateway.entry.peer_user import is_own
from djinnd.gateway.entry.request import HttpRequest
from djinnd.gateway.http.errors import HttpError, unauthorised

_SOON = 1.0  # seconds, after which a refused client may try again


class Admission:
    def __init__(self, http: Http, daemon: Daemon, metrics: Metrics) -> None:
        self.http = http
        self.metrics = metrics
        self._daemon = daemon
        self._requests = 0  # that are being answered

    @asynccontextmanager
    async def admitted(self, request: HttpRequest, public: bool) -> AsyncIterator[None]:
        """Gives the request its pool, and a place until the context ends. Raises HttpError."""
        token = "" if public else self._token(request)
        if self._requests >= self.http.requests:
            raise HttpError(429, f"this gateway answers {self._requests:,} requests, its limit", retry_s=_SOON)
        self._requests += 1
        self.metrics.running.set(self._requests)
        try:
            pool = await self._daemon.pool(token)
            with _Place(pool, self.http.requests_per_token):
                request.pool = pool
                request.principal = pool.name
                request.metrics = self.metrics
                yield
        finally:
            self._requests -= 1
            self.metrics.running.set(self._requests)

    def _token(self, request: HttpRequest) -> str:
        """ "" for a request that needs none. Raises HttpError."""
        token = auth.token_of(request.headers)
        if auth.is_djinnd_token(token):
            return token
        if not self.http.loopback_without_token:
            raise unauthorised(
                "this is no token of djinnd's: `djinnctl token add NAME` makes one"
                if token
                else "this request needs a token: Authorization: Bearer djn_…"
            )
        auth.expect_own_machine(request.client, request.headers, self.http.cors)
        if request.client is not None and not is_own(request.scope["client"], request.scope["server"]):
            raise unauthorised("only the gateway's own Unix user needs no token: Authorization: Bearer djn_…")
        return ""


class _Place:
    """Among the requests of one token. Raises HttpError where all are taken."""

    def __init__(self, pool: Pool, places: int) -> None:
        self._pool = pool
        self._places = places

    def __enter__(self) -> None:
        if self._pool.requests >= self._places:
            raise HttpError(429, f"this token has {self._places:,} requests under way, its limit", retry_s=_SOON)
        self._pool.requests += 1

    def __exit__(self, *error: object) -> None:
        self._pool.requests -= 1
