"""The server's life: startup, main loop, shutdown.

The first SIGTERM, SIGINT or SIGHUP drains: no new work; what runs may finish within limits.shutdown_grace, and is
cancelled then. The second ends everything at once. Either way no engine, shared memory or socket file is left.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import sys
from collections.abc import Coroutine, Sequence
from typing import Any

from djinnd import __version__
from djinnd.config import Config
from djinnd.messages import Close
from djinnd.server.arena import Arena, sweep
from djinnd.server.clients import Clients
from djinnd.server.engine_process import STOPPING
from djinnd.server.handlers import Handlers
from djinnd.server.listener import Listener
from djinnd.server.models import Models
from djinnd.server.notify import Notifier
from djinnd.server.router import Router
from djinnd.server.sessions import SessionRecord, SessionTable
from djinnd.server.socket_path import SocketPath, StartError, inherited_listener
from djinnd.server.status import Status
from djinnd.server.stopping import Stopping
from djinnd.server.supervisor import Supervisor

log = logging.getLogger("djinnd.server")

_BEAT = 1.0  # seconds, at most, between words to systemd
_CANCELLING = 5.0  # seconds for cancelled requests to end


class Server:
    """`engine_command` starts an engine: see EngineProcess.start. Raises StartError where it can get no socket."""

    def __init__(self, config: Config, engine_command: Sequence[str], stopping: Stopping) -> None:
        self._limits = config.limits
        self._stopping = stopping
        self._notifier = Notifier(os.environ)
        self._path, self._socket = _listen(config.socket)
        self.address: str = self._socket.getsockname()
        self._sessions = SessionTable(self._limits, self._close_in_engine)
        self._arena = Arena()
        self._models = Models(config.models, self._sessions, self._arena, lambda model: self._router.engine_for(model))
        self._supervisor = Supervisor(engine_command, _engine_environ(config), self._limits, self._models)
        self._router = Router([self._supervisor])
        self._clients = Clients(
            self._limits, config.admins, lambda *c: self._handlers.handle(*c), self._sessions.detach
        )
        self._status = Status(self._sessions, self._models, self._supervisor, self._clients, self._arena, self.address)
        self._handlers = Handlers(self._sessions, self._models, self._status)
        self._listener = Listener(self._socket, self._clients.accept)

    async def serve(self) -> None:
        """Until it is asked to stop. Raises StartError where no engine comes up."""
        beating = asyncio.create_task(self._beat())
        try:
            self._startup()
            await self._main_loop()
        finally:
            await self._shutdown()
            beating.cancel()

    def _startup(self) -> None:
        log.info("djinnd_starting version=%s pid=%d socket=%s", __version__, os.getpid(), self.address)
        sweep()
        self._supervisor.start()
        self._models.preload()

    async def _main_loop(self) -> None:
        """Clients, engine and timers have their own callbacks: here is only what the whole waits for."""
        await _first(self._stopping.asked.wait(), self._supervisor.settled())
        if self._supervisor.failure:
            raise StartError(f"no engine, because {self._supervisor.failure}: the log has its own account")
        if self._supervisor.state == "ready":
            self._notifier.tell(READY=1)
            log.info("djinnd_ready socket=%s", self.address)
        await self._stopping.asked.wait()

    async def _shutdown(self) -> None:
        self._status.is_draining = True
        self._notifier.tell(STOPPING=1)
        log.info("djinnd_draining requests=%d", self._clients.unfinished)
        await self._drain()
        self._listener.close()
        self._models.stop()
        await self._supervisor.stop(0.0 if self._stopping.now.is_set() else STOPPING)
        await self._clients.close(at_once=self._stopping.now.is_set())
        await self._models.close()
        self._sessions.clear()
        self._socket.close()
        if self._path is not None:
            self._path.release()
        log.info("djinnd_stopped")

    async def _drain(self) -> None:
        """What runs may finish, for a while; then it is cancelled, which takes a step."""
        await _first(self._clients.idle.wait(), self._stopping.now.wait(), timeout=self._limits.shutdown_grace)
        for client in self._clients:
            client.cancel_calls()
        await _first(self._clients.idle.wait(), self._stopping.now.wait(), timeout=_CANCELLING)

    async def _beat(self) -> None:
        notifier = self._notifier
        while True:
            notifier.tell(WATCHDOG=1, STATUS=self._status.line())
            await asyncio.sleep(min(_BEAT, notifier.watchdog_s / 3 or _BEAT))

    def _close_in_engine(self, session: SessionRecord) -> None:
        engine = self._models.find(session.model).engine
        if engine is not None:
            engine.send(Close(session.id))


async def run(config: Config) -> None:
    stopping = Stopping()
    with stopping.by_signals():  # before there is anything that would be left behind
        await Server(config, engine_command(config), stopping).serve()


def engine_command(config: Config) -> list[str]:
    command = [sys.executable, "-m", "djinnd.engine", "--parent", str(os.getpid())]
    command += ["--device", config.device, "--memory", str(config.memory)]
    return [*command, "--log-level", config.log.level, "--log-format", config.log.format]


def _engine_environ(config: Config) -> dict[str, str]:
    """Compiled kernels outlive the daemon, unless somebody has another place for them."""
    return {"TRITON_CACHE_DIR": f"{config.state_dir}/triton", **os.environ}


def _listen(path: str) -> tuple[SocketPath | None, socket.socket]:
    inherited = inherited_listener(os.environ)
    if inherited is not None:
        return None, inherited
    claim = SocketPath(path)
    return claim, claim.listener


async def _first(*waits: Coroutine[Any, Any, Any], timeout: float | None = None) -> None:
    """Returns when one of them does, or the time is over."""
    tasks = [asyncio.ensure_future(wait) for wait in waits]
    await asyncio.wait(tasks, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
    for task in tasks:
        task.cancel()
