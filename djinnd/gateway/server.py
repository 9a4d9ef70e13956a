"""The gateway's life: it listens, follows signals, lets requests finish, and ends."""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
import ssl
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import uvicorn
from msgspec.structs import replace

from djinn_client.transport.remote.tls import ALPN
from djinnd.config import Config, ConfigError, Http, differing
from djinnd.gateway.app import application
from djinnd.gateway.daemon.pools import Daemon
from djinnd.gateway.daemon.refused_tokens import RefusedTokens
from djinnd.gateway.entry.admission import Admission
from djinnd.gateway.entry.metrics import Metrics
from djinnd.gateway.http.connections import HttpConnection
from djinnd.gateway.http.listening import BACKLOG, ListenError, listeners, load_certificate, remote_listener, tls
from djinnd.gateway.remote.accounts import Accounts
from djinnd.gateway.remote.door import RemoteDoor
from djinnd.gateway.remote.figures import Figures

log = logging.getLogger("djinnd.gateway")

KEEP_ALIVE_S = 60  # between two requests of a connection


class GatewayServer(uvicorn.Server):
    """uvicorn's server, with sockets, signals and a reload of our own. `read` reads the configuration again; it raises
    ConfigError."""

    def __init__(self, config: Config, read: Callable[[], Config]) -> None:
        self._http = config.http
        self._read = read
        self._socket = config.socket
        self._sockets = listeners(config.http)
        self._remote_socket = remote_listener(config.remote, config.http)
        if not self._sockets and self._remote_socket is None:
            raise ListenError(
                "nothing to listen at: set http.listen (HOST:PORT), http.socket (a path), remote.listen, or --listen"
            )
        self._tls = tls(config.http, "http/1.1", ssl.TLSVersion.TLSv1_2)
        self._remote_tls = tls(config.http, ALPN, ssl.TLSVersion.TLSv1_3)
        self._door: RemoteDoor | None = None
        refused = RefusedTokens()
        figures = Figures(refused)
        self._accounts = Accounts(config.remote, refused, figures)
        self._daemon = Daemon(config.socket, refused)
        self._admission = Admission(config.http, self._daemon, Metrics(config.metrics, figures))
        self._application = application(self._admission)
        super().__init__(
            uvicorn.Config(
                self._answer,
                interface="asgi3",
                ws="none",
                lifespan="off",
                log_config=None,
                access_log=False,
                server_header=False,
                proxy_headers=False,
                timeout_keep_alive=KEEP_ALIVE_S,
                timeout_graceful_shutdown=_drain(config.http),
            )
        )

    async def _answer(self, scope: Any, receive: Any, send: Any) -> None:
        """An ASGI application that a reload can exchange."""
        await self._application(scope, receive, send)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await self.lifespan.startup()
        self.servers = [await self._listen(sock) for sock in self._sockets]
        self.started = True
        for sock in self._sockets:
            log.info("gateway_ready address=%s tls=%s", _name(sock), self._tls_of(sock) is not None)
        if self._remote_socket is not None and self._remote_tls is not None:
            self._door = RemoteDoor(self._remote_socket, self._remote_tls, self._socket, self._accounts)
            self._door.start()
            log.info("gateway_remote_ready address=%s", _name(self._remote_socket))

    async def _listen(self, sock: socket.socket) -> asyncio.Server:
        loop = asyncio.get_running_loop()
        protocol = partial(HttpConnection, lambda: self._http, self.config, self.server_state, {}, loop)
        if sock.family == socket.AF_UNIX:
            return await loop.create_unix_server(protocol, sock=sock, backlog=BACKLOG)
        context = self._tls_of(sock)
        handshake = self._http.header_seconds if context else None
        return await loop.create_server(
            protocol, sock=sock, backlog=BACKLOG, ssl=context, ssl_handshake_timeout=handshake
        )

    def _tls_of(self, sock: socket.socket) -> ssl.SSLContext | None:
        return None if sock.family == socket.AF_UNIX else self._tls

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        log.info("gateway_draining requests=%d", len(self.server_state.tasks))
        async with asyncio.TaskGroup() as group:
            group.create_task(super().shutdown(self._sockets))
            if self._door is not None:
                group.create_task(self._door.drain(self._http.drain_seconds))
        self._daemon.close()
        if self._http.socket:
            Path(self._http.socket).unlink(missing_ok=True)
        log.info("gateway_stopped")

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._stop)
        loop.add_signal_handler(signal.SIGHUP, self._reload)
        with suppress(asyncio.CancelledError):
            yield

    def _stop(self) -> None:
        """Lets requests finish; the second signal ends them."""
        self.force_exit = self.should_exit
        self.should_exit = True
        if self.force_exit and self._door is not None:
            self._door.close()

    def _reload(self) -> None:
        """Reads the configuration and the certificate again. A problem is logged, and all stays as it was."""
        try:
            read = self._read()
            wanted = read.http
            held = reloaded(self._http, wanted)
            for context in (self._tls, self._remote_tls):
                if context is not None:
                    load_certificate(context, held)
        except (ConfigError, ListenError) as error:
            for problem in str(error).splitlines():
                log.error("gateway_reload_refused problem=%s", problem)
            return
        log.info("gateway_reloaded changed=%s at_restart=%s", differing(self._http, held), differing(held, wanted))
        self._follow(held)
        if self._door is not None:
            self._door.follow(read.remote)

    def _follow(self, http: Http) -> None:
        self._http = self._admission.http = http
        self._application = application(self._admission)
        self.config.timeout_graceful_shutdown = _drain(http)


def reloaded(held: Http, wanted: Http) -> Http:
    """The settings after a reload: the wanted ones, except the sockets, their rights, and whether there is TLS."""
    fixed = {"listen": held.listen, "socket": held.socket, "loopback_without_token": held.loopback_without_token}
    if bool(held.certificate) != bool(wanted.certificate):
        fixed |= {"certificate": held.certificate, "key": held.key}
    return replace(wanted, **fixed)


def _drain(http: Http) -> int:
    """Seconds that requests have to finish, as uvicorn takes them."""
    return max(1, round(http.drain_seconds))


def _name(sock: socket.socket) -> str:
    address = sock.getsockname()
    return address if isinstance(address, str) else f"{address[0]}:{address[1]}"
