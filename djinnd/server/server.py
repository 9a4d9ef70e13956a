"""The daemon's server process: startup, main loop, shutdown.

The first SIGTERM or SIGINT drains: no new request is accepted, and requests under way may finish within
limits.shutdown_grace before they are cancelled. The second signal ends everything at once. Either way no engine, shared
memory or socket file is left. SIGHUP makes the server read its configuration again. Settings that can change at once
do; the others wait for a restart.

A restart drains too, and then executes this program again in the same process, the successor. The successor inherits
the listening socket, the fork server and an engine that has not quite ended. After a warm restart it also adopts the
complete objects of the arena.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from djinn_client.errors import InvalidRequest, ShuttingDown
from djinnd import __version__
from djinnd.config import Config, ConfigError, differing
from djinnd.messages import Close
from djinnd.server.adapters.table import AdapterTable
from djinnd.server.arenas.arena import Arena
from djinnd.server.checkpoints.inspection import Inspector
from djinnd.server.engines.commands import engine_command, fork_server_command, gateway_command, inspect_command
from djinnd.server.engines.engine_process import STOPPING
from djinnd.server.engines.fork_server import FORK_SERVER_FDS, ForkServer
from djinnd.server.engines.previous_engine import ENGINE_FD, PreviousEngine
from djinnd.server.engines.supervisor import Supervisor
from djinnd.server.gateway_process import GatewayProcess
from djinnd.server.handover.notify import Notifier
from djinnd.server.handover.socket_path import StartError, listen
from djinnd.server.handover.stopping import Restart, Stopping
from djinnd.server.handover.succession import Inherited, inherited
from djinnd.server.journal.journal import Journal
from djinnd.server.loading.models import ModelTable
from djinnd.server.loading.sharing import ShareTable
from djinnd.server.principals.names import groups_of, unix_name
from djinnd.server.principals.tokens import Tokens
from djinnd.server.quotas.queueing import Queue
from djinnd.server.quotas.quotas import QuotaTable
from djinnd.server.requests.adapters import AdapterRequests
from djinnd.server.requests.daemon import DaemonRequests
from djinnd.server.requests.embeddings import EmbedRequests
from djinnd.server.requests.explain import ExplainRequests
from djinnd.server.requests.export import ExportRequests
from djinnd.server.requests.handlers import Handlers
from djinnd.server.requests.models import ModelRequests
from djinnd.server.requests.sessions import SessionRequests
from djinnd.server.requests.tokenizer import TokenizerRequests
from djinnd.server.requests.work import WorkRequests
from djinnd.server.runs.failover import RunFailover
from djinnd.server.sessions.prefixes import PrefixTable
from djinnd.server.sessions.records import RecordTable
from djinnd.server.sessions.session import SessionRecord
from djinnd.server.sessions.sessions import SessionTable
from djinnd.server.status.metrics import DaemonMetrics
from djinnd.server.status.metrics_socket import MetricsSocket
from djinnd.server.status.status import Status
from djinnd.server.text.texts import Texts
from djinnd.server.whitebox.breakpoint_requests import BreakpointRequests
from djinnd.server.whitebox.edit_requests import EditRequests
from djinnd.server.whitebox.functions import FunctionRequests
from djinnd.server.wire.client import ConnectedClient
from djinnd.server.wire.clients import ClientTable
from djinnd.server.wire.listener import Listener

log = logging.getLogger("djinnd.server")

_BEAT = 1.0  # seconds: the longest interval between notifications to systemd
_CANCELLING = 5.0  # seconds that cancelled requests get to end
_GATEWAY_END = 5.0  # seconds that the gateway then gets to end


class Server:
    """Builds the parts of the daemon, connects them, and runs them from start to stop.

    - `engine_command` starts an engine (see Supervisor).
    - `fork_server_command` starts the process that forks engines (see ForkServer).
    - `inspect_command` starts the process that inspects checkpoints (see Inspector).
    - `read_config` reads the configuration again from its source; it raises ConfigError.

    Raises StartError if the listening socket cannot be had.
    """

    def __init__(
        self,
        config: Config,
        engine_command: Sequence[str],
        fork_server_command: Sequence[str],
        inspect_command: Sequence[str],
        stopping: Stopping,
        read_config: Callable[[], Config],
        gateway: GatewayProcess | None = None,
    ) -> None:
        self._config = config  # in force now: after a reload, `at_restart` settings keep their old values
        self._gateway = gateway or GatewayProcess([])
        self._read_config = read_config
        self._stopping = stopping
        self._notifier = Notifier(os.environ)
        given = inherited(os.environ)
        fork_server = [each for each in given if each.name in FORK_SERVER_FDS]
        engine = [each for each in given if each.name == ENGINE_FD]
        self._path, self._socket = listen(config.socket, [each for each in given if each not in fork_server + engine])
        self.address: str = self._socket.getsockname()
        environ = _engine_environ(config)
        self._fork_server = ForkServer(fork_server_command, environ, fork_server)
        self._make_tables(config)
        self._make_models(config, inspect_command)
        self._supervisor = Supervisor(
            engine_command,
            config.memory,
            environ,
            self._fork_server,
            config.limits,
            config.scheduling,
            self._models.events,
            PreviousEngine(engine),
        )
        self._make_requests(config)
        self._listener = Listener(self._socket, self._clients.accept)
        self._metrics = MetricsSocket(config.metrics, DaemonMetrics(self._status, self._sessions))

    def _make_tables(self, config: Config) -> None:
        """Makes the tables of sessions and users, and their journal."""
        self._journal = Journal(config.state_dir)
        self._quotas = QuotaTable(config.quotas, groups_of, config.limits)
        self._queue = Queue(config.limits.queue, time.monotonic())
        self._sessions = SessionTable(config.limits, self._quotas, self._close_in_engine, self._journal)
        self._prefixes = PrefixTable(config.limits, self._journal)
        self._records = RecordTable(config.limits, self._sessions, self._journal)

    def _make_models(self, config: Config, inspect_command: Sequence[str]) -> None:
        """Makes the table of models, and the parts that load them, share them and read their text."""
        self._arena = Arena(config.state_dir)
        self._page_folder = Path(config.state_dir, "pages")
        self._texts = Texts(config.limits)
        time_of = (self._texts.time.charge, self._texts.time.expect)
        self._inspector = Inspector(inspect_command, self._fork_server, config.limits, *time_of)
        self._models = ModelTable(
            config.models,
            self._sessions,
            self._arena,
            lambda: self._supervisor.engine(),
            lambda: self._supervisor.next_engine(),
            self._page_folder,
            self._prefixes,
            config.limits,
            self._texts,
            self._inspector,
            config.hub,
            config.state_dir,
            lambda user: self._clients.is_admin(user),
            lambda user: self._quotas.tenant(user, time.monotonic()).ledger,
        )
        self._adapters = AdapterTable(
            self._models,
            self._sessions,
            config.limits,
            lambda user: self._clients.is_admin(user),
            lambda user: self._quotas.tenant(user, time.monotonic()).ledger,
        )
        self._models.on_forgotten = self._adapters.model_gone
        self._sharing = ShareTable(
            Path(config.state_dir, "shared"),
            config.limits,
            self._models,
            self._sessions,
            lambda: self._supervisor.engine(),
            self._inspector,
        )
        self._functions = FunctionRequests(config.functions, self._sessions, self._models, groups_of)

    def _make_requests(self, config: Config) -> None:
        """Makes the table of clients, and the handlers of their requests."""
        self._tokens = Tokens(config.state_dir, config.limits, lambda: self._clients)
        self._clients = ClientTable(
            config.limits,
            config.admins,
            lambda *c: self._handlers.handle(*c),
            lambda *c: self._handlers.signal(*c),
            self._client_gone,
            self._journal.after,
            lambda user: self._quotas.tenant(user, time.monotonic()),
            self._tokens,
        )
        self._status = Status(
            self._sessions,
            self._quotas,
            self._models,
            self._supervisor,
            self._clients,
            self._arena,
            self._sharing,
            self._texts,
            self.address,
            self._tokens.name_of,
        )
        self._handlers = Handlers(self._sessions, self._models, self._status, self._journal, self._request_parts())

    def _request_parts(self) -> Iterator[object]:
        """Makes the objects that handle requests, one for each theme."""
        sessions, models, status, supervisor = self._sessions, self._models, self._status, self._supervisor
        adapters = self._adapters
        failover = RunFailover(models, adapters)
        work = WorkRequests(sessions, models, adapters, self._texts, self._queue, failover, self._records)
        yield from (work, self._functions, self._records)
        yield EmbedRequests(sessions, models, adapters, work.generate)
        yield TokenizerRequests(models, self._texts)
        yield SessionRequests(sessions, models, adapters, status)
        yield ExportRequests(sessions, models, adapters, status, failover)
        yield ExplainRequests(sessions, models, supervisor, status)
        yield EditRequests(sessions, models)
        yield BreakpointRequests(sessions, models, self._functions)
        yield AdapterRequests(models, adapters)
        yield ModelRequests(sessions, models, adapters, self._sharing, status)
        yield DaemonRequests(
            sessions, models, self._prefixes, supervisor, status, self._tokens, self._restart, self._notes
        )

    def _notes(self) -> list[str]:
        """Messages for administrators."""
        return [*self._journal.notes, *self._tokens.notes]

    async def serve(self) -> list[Inherited]:
        """Runs until the server is asked to stop. Returns the descriptors for the successor; an empty list if there is
        no successor. Raises StartError if no engine starts, or the journal or the metrics socket cannot be opened."""
        beating = asyncio.create_task(self._beat())
        try:
            self._startup()
            await self._main_loop()
        except BaseException:
            self._stopping.restart = None
            raise
        finally:
            await self._shutdown()
            beating.cancel()
            left = self._leave()
        return left

    def _startup(self) -> None:
        log.info("djinnd_starting version=%s pid=%d socket=%s", __version__, os.getpid(), self.address)
        kept = self._journal.open()  # first: locks the state directory for this daemon
        self._tokens.start()
        self._warn_of_unknown_users()
        self._metrics.start()
        self._sessions.restore(kept)
        self._prefixes.restore(kept.prefixes)
        self._records.restore(kept.records)
        _make_folder(self._page_folder)
        adopted = self._arena.adopt()
        self._sharing.start()
        self._supervisor.start()
        self._models.preload(adopted)

    async def _main_loop(self) -> None:
        """Waits for a request to stop or to reload. Clients, engines and timers run in callbacks of their own."""
        await _first(self._stopping.asked.wait(), self._supervisor.settled())
        if self._supervisor.failure:
            raise StartError(f"no engine, because {self._supervisor.failure}: see the log for the details")
        if self._supervisor.told is not None:  # an engine has been ready; if it is lost by now, the next one starts
            self._notifier.tell(READY=1)
            log.info("djinnd_ready socket=%s", self.address)
            self._gateway.start()
        while not self._stopping.asked.is_set():
            await _first(self._stopping.asked.wait(), self._stopping.reload.wait())
            if self._stopping.reload.is_set():
                await self._reload()

    async def _reload(self) -> None:
        """Reads the configuration again. If it has faults, logs them and keeps the old configuration."""
        self._stopping.reload.clear()
        self._notifier.tell_reloading()
        try:
            self._follow(await asyncio.to_thread(self._read_config))
            self._gateway.reload()
        except ConfigError as error:
            for problem in str(error).splitlines():
                log.error("djinnd_reload_refused problem=%s", problem)
        self._notifier.tell(READY=1)

    def _follow(self, config: Config) -> None:
        held = replace(
            self._config,
            limits=config.limits,
            scheduling=config.scheduling,
            quotas=config.quotas,
            functions=config.functions,
            admins=config.admins,
        )
        for part in (
            self._clients,
            self._quotas,
            self._sessions,
            self._prefixes,
            self._records,
            self._sharing,
            self._supervisor,
            self._inspector,
            self._tokens,
            self._adapters,
        ):
            part.limits = held.limits
        self._models.follow(held.limits)
        self._texts.follow(held.limits)
        self._queue.places = held.limits.queue
        self._supervisor.set_scheduling(held.scheduling)
        self._functions.follow(held.functions)
        self._clients.set_admins(held.admins)
        unix_name.cache_clear()
        self._quotas.reload(held.quotas, time.monotonic())
        self._models.set_tenants([tenant.limits for tenant in self._quotas])
        log.info("djinnd_reloaded changed=%s at_restart=%s", differing(self._config, held), differing(held, config))
        self._config = held
        self._warn_of_unknown_users()

    def _warn_of_unknown_users(self) -> None:
        """Logs a warning for each user of a quota that is neither a Unix user nor the name of a token. It may be a
        typing error, or the user may be added later."""
        for rule, quota in self._config.quotas.items():
            for user in quota.users:
                if isinstance(user, str) and not self._tokens.has_name(user):
                    log.warning("quota_user_unknown rule=%s user=%s", rule, user)

    async def _shutdown(self) -> None:
        self._status.is_draining = True
        if self._stopping.restart is None:
            self._notifier.tell(STOPPING=1)
        else:
            self._notifier.tell_reloading()  # until the successor says READY
        log.info("djinnd_draining requests=%d restart=%s", self._clients.unfinished, self._stopping.restart or "no")
        self._gateway.stop()
        await self._drain()
        self._listener.close()
        await self._gateway.gone(_GATEWAY_END)
        await self._metrics.close()
        self._models.stop()
        await self._functions.close()
        await self._inspector.close()
        await self._texts.close()
        await self._stop_engine()
        if self._stopping.restart is None or not self._fork_server.is_sound:
            await self._fork_server.close()
        await self._journal.settled()
        await self._clients.close(at_once=self._stopping.now.is_set())
        await self._models.close(keep_blocks=self._stopping.restart == "warm")
        await self._sharing.close()
        await self._tokens.close()
        await self._journal.close()
        self._sessions.leave()
        self._records.close()
        log.info("djinnd_stopped")

    def _leave(self) -> list[Inherited]:
        if self._stopping.restart is not None:
            left = self._path.hand_over() if self._path else [Inherited("djinnd.socket", self._socket.detach())]
            return left + self._fork_server.hand_over() + self._supervisor.hand_over()
        self._socket.close()
        if self._path is not None:
            self._path.release()
        return []

    async def _restart(self, restart: Restart) -> None:
        """Asks for a restart. Raises InvalidRequest, with the faults, if the successor could not read the
        configuration."""
        try:
            await asyncio.to_thread(self._read_config)
        except ConfigError as error:
            raise InvalidRequest(f"the daemon was not restarted, as it could not start again: {error}") from error
        self._status.is_draining = True  # before the reply, so that the caller's next request sees it
        self._stopping.ask_restart(restart)

    async def _drain(self) -> None:
        """Lets requests under way finish within limits.shutdown_grace, then cancels the rest. Requests of paused
        sessions are cancelled at once, as they would never finish."""
        for session in self._sessions:
            if session.is_paused and session.call is not None:
                session.call.cancel()
        await _first(self._clients.idle.wait(), self._stopping.now.wait(), timeout=self._config.limits.shutdown_grace)
        for client in self._clients:
            client.cancel_calls(ShuttingDown("the daemon is stopping: try again when it is back"))
        await _first(self._clients.idle.wait(), self._stopping.now.wait(), timeout=_CANCELLING)

    async def _stop_engine(self) -> None:
        """Stops the engine. Before a warm restart the engine gets more time, because it saves the pages of sessions for
        the successor. The kernel may take longer still to free the engine's memory: the successor waits for that."""
        restart = self._stopping.restart
        grace = max(STOPPING, self._config.limits.shutdown_grace) if restart == "warm" else STOPPING
        began = time.monotonic()
        engine = await self._supervisor.stop(keep_pages=restart == "warm")
        if engine is not None:
            over = engine.exited() if restart is None else engine.finished()
            await _first(over, self._stopping.now.wait(), timeout=grace)
            engine.kill()
        self._stopping.decide()
        if self._stopping.restart is None or (engine is not None and not engine.can_be_left):
            await self._supervisor.gone()
        log.info("engine_stopped seconds=%.3f", time.monotonic() - began)

    async def _beat(self) -> None:
        """Notifies systemd of status and watchdog. The watchdog is fed as long as the supervisor runs. A back-off of
        minutes between two engines is no reason to restart the daemon; an ended supervisor is."""
        notifier = self._notifier
        while True:
            is_sound = self._status.is_draining or not self._supervisor.is_over
            self._tokens.beat()
            notifier.tell(STATUS=self._status.line(), **({"WATCHDOG": 1} if is_sound else {}))
            await asyncio.sleep(min(_BEAT, notifier.watchdog_s / 3 or _BEAT))

    def _close_in_engine(self, session: SessionRecord) -> None:
        engine = self._models.engine_of(session)
        if engine is not None:
            engine.send(Close(session.id))
        self._functions.session_closed(session)
        self._models.session_closed(session)
        self._sharing.session_closed(session.model)

    def _client_gone(self, client: ConnectedClient) -> None:
        self._sessions.detach(client)
        self._sharing.detach(client)


def _make_folder(path: Path) -> None:
    """Creates a folder in the state directory. Raises StartError."""
    try:
        path.mkdir(mode=0o700, exist_ok=True)
    except OSError as error:
        raise StartError(f"no folder {path}: {error}; choose another place with --state-dir") from error


async def run(
    config: Config, read_config: Callable[[], Config], http: str | None = None, file: Path | None = None
) -> list[Inherited]:
    """Runs the daemon; returns as Server.serve does. `http` is the address of a gateway process that starts and stops
    with the daemon and reads the rest of its configuration from `file`; None starts no gateway."""
    stopping = Stopping()
    with stopping.by_signals():  # before anything exists that a signal could leave behind
        commands = (engine_command(config), fork_server_command(config), inspect_command())
        gateway = GatewayProcess(gateway_command(config, http, file) if http else [])
        return await Server(config, *commands, stopping, read_config, gateway).serve()


def _engine_environ(config: Config) -> dict[str, str]:
    """Sets the folder for compiled Triton kernels, which outlive the daemon. The environment may name another
    folder."""
    return {"TRITON_CACHE_DIR": f"{config.state_dir}/triton", **os.environ}


async def _first(*waits: Coroutine[Any, Any, Any], timeout: float | None = None) -> None:
    """Returns when one of the coroutines returns, or after `timeout` seconds. Cancels the others."""
    tasks = [asyncio.ensure_future(wait) for wait in waits]
    await asyncio.wait(tasks, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
    for task in tasks:
        task.cancel()
