"""Decides whether a request is admitted: its token or the right to have none, a place, and room for its body."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager

from djinnd.config import Http
from djinnd.gateway.daemon.pools import Daemon, Pool
from djinnd.gateway.entry import auth
from djinnd.gateway.entry.metrics import Metrics
from djinnd.gateway.entry.peer_user import is_own
from djinnd.gateway.entry.request import HttpRequest
from djinnd.gateway.http.errors import HttpError, unauthorised

PUBLIC_REQUESTS = 64  # without a token, at once; they take no place of requests with one
_SOON = 1.0  # seconds, after which a refused client may try again


class Admission:
    """Counts the requests that are being answered, and the bytes of their bodies: of each token, and in all."""

    def __init__(self, http: Http, daemon: Daemon, metrics: Metrics) -> None:
        self.http = http  # a reload sets it anew
        self.metrics = metrics
        self._daemon = daemon
        self._requests = 0
        self._public = 0
        self._held = 0  # bytes

    @asynccontextmanager
    async def admitted(self, request: HttpRequest, public: bool) -> AsyncIterator[None]:
        """Gives the request its pool, and a place until the context ends. Raises HttpError."""
        request.metrics = self.metrics
        if public:
            with self._public_place():
                request.pool = self._daemon.own
                yield
            return
        token = self._token(request)
        with self._place(request):
            request.pool = await self._daemon.pool(token)
            request.principal = request.pool.name
            with self._place_of_token(request.pool, request):
                yield

    def _token(self, request: HttpRequest) -> str:
        """The request's token; "" if it needs none. Raises HttpError."""
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

    @contextmanager
    def _public_place(self) -> Iterator[None]:
        if self._public >= PUBLIC_REQUESTS:
            raise HttpError(429, f"this gateway answers {self._public} requests without a token", retry_s=_SOON)
        self._public += 1
        try:
            yield
        finally:
            self._public -= 1

    @contextmanager
    def _place(self, request: HttpRequest) -> Iterator[None]:
        if self._requests >= self.http.requests:
            raise HttpError(429, f"this gateway answers {self._requests:,} requests, its limit", retry_s=_SOON)
        self._requests += 1
        self.metrics.requests.set(self._requests)
        request.hold = lambda count: self._hold(request, count)
        try:
            yield
        finally:
            self._requests -= 1
            self._held -= request.held
            self.metrics.requests.set(self._requests)

    @contextmanager
    def _place_of_token(self, pool: Pool, request: HttpRequest) -> Iterator[None]:
        if pool.requests >= self.http.requests_per_token:
            raise HttpError(429, f"this token has {pool.requests:,} requests under way, its limit", retry_s=_SOON)
        pool.requests += 1
        try:
            yield
        finally:
            pool.requests -= 1
            pool.held -= request.held

    def _hold(self, request: HttpRequest, count: int) -> None:
        """Raises HttpError if there is no room for these further bytes."""
        limits = self.http
        if request.pool.held + count > limits.held_bytes_per_token or self._held + count > limits.held_bytes:
            told = "the bodies of the requests that are being answered have no room for this one"
            raise HttpError(429, told, retry_s=_SOON)
        request.held += count
        request.pool.held += count
        self._held += count
