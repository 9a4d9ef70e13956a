"""The daemon's status: from its own tables, and from its engine's report, if that comes in time."""

from __future__ import annotations

import asyncio
import os
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import msgspec

from djinn_client.errors import EngineLost, ShuttingDown
from djinn_client.protocol import CLASSES, DeviceInfo, ModelInfo, SessionInfo, StatusReply
from djinn_client.protocol.fields.scheduling import QuotaUse
from djinnd import __version__
from djinnd.messages import Inquire, Report, SessionUse
from djinnd.server.arenas.arena import Arena
from djinnd.server.engines.supervisor import Supervisor
from djinnd.server.loading.models import ModelTable, ServedModel
from djinnd.server.loading.sharing import ShareTable
from djinnd.server.models.call_counts import CallCounts
from djinnd.server.quotas.quotas import QuotaTable
from djinnd.server.sessions.session import SessionRecord
from djinnd.server.sessions.sessions import SessionTable
from djinnd.server.status.audit import audit_descriptors, audit_engine, audit_tables
from djinnd.server.text.texts import Texts
from djinnd.server.wire.client import ConnectedClient
from djinnd.server.wire.clients import ClientTable

# Fields of a ModelInfo that are 0 while nothing of the model is on the device.
_BLOCKS = ("blocks_plain", "blocks_packed", "blocks_streamed", "streamed_bytes", "ring_bytes", "scratch_bytes")
_NOTHING_ON_DEVICE = dict.fromkeys((*_BLOCKS, "kv_bytes", "pages", "pages_used"), 0)
_LOOK = 0.05  # seconds between two looks at an engine's report
PATIENCE = 5.0  # seconds in which an engine must report; it may be in a long step


class TenantFigures(NamedTuple):
    """The figures of one principal. `tokens`: computed for it since the daemon started."""

    user: int
    name: str
    sessions: int
    tokens: int


@dataclass(eq=False)
class Status:
    """Describes sessions, models, tenants and the daemon as a whole."""

    _sessions: SessionTable
    _quotas: QuotaTable
    _models: ModelTable
    _supervisor: Supervisor
    _clients: ClientTable
    _arena: Arena
    _sharing: ShareTable
    _texts: Texts
    _address: str
    name_of: Callable[[int], str]
    is_draining: bool = field(init=False, default=False)
    _started: float = field(init=False, default_factory=time.monotonic)

    async def reply(self, request: int, check: bool, client: ConnectedClient) -> StatusReply:
        expected = [s for model in self._models if model.engine for s in self._sessions.of_model(model.name)]
        report = await self.report(check)
        running, queued = self.requests(report)
        guessed, kept = self._guesses(client)
        return StatusReply(
            id=request,
            version=__version__,
            pid=os.getpid(),
            uptime_s=time.monotonic() - self._started,
            address=self._address,
            state=self.state,
            devices=[self._device_info(report)],
            models=[self.model_info(model, report) for model in self._models.visible(client)],
            sessions=self.classes(),
            requests_running=running,
            requests_queued=queued,
            connections=len(self._clients),
            arena_bytes=self._arena.nbytes,
            latency={name: latencies.told() for name, latencies in self._sessions.latency.items()},
            guessed_tokens=guessed,
            kept_tokens=kept,
            integrity=self._audit(expected, report) if check else [],
        )

    @property
    def state(self) -> str:
        if self.is_draining:
            return "draining"
        return "starting" if self._supervisor.told is None else self._supervisor.state

    @property
    def restarts(self) -> int:
        """How often the engine was restarted."""
        return self._supervisor.restarts

    def classes(self) -> dict[str, int]:
        """Number of sessions of each class."""
        counted = Counter(session.priority for session in self._sessions)
        return {name: counted[name] for name in CLASSES}

    def tenants(self) -> list[TenantFigures]:
        """The figures of all principals that the daemon has seen since it started."""
        sessions = Counter(session.user for session in self._sessions)
        return [
            TenantFigures(tenant.user, self.name_of(tenant.user), sessions[tenant.user], tenant.tokens)
            for tenant in self._quotas
        ]

    def calls(self) -> Iterator[tuple[str, CallCounts]]:
        """The counts of calls, by name of the model."""
        return ((model.name, model.calls) for model in self._models)

    def _guesses(self, client: ConnectedClient) -> tuple[int, int]:
        """Guessed and kept tokens of the client's calls; of all calls for an administrator."""
        counted = [
            counts
            for _, calls in self.calls()
            for user, counts in calls.users.items()
            if client.is_admin or user == client.user
        ]
        return sum([each.guessed_tokens for each in counted]), sum([each.kept_tokens for each in counted])

    def requests(self, report: Report | None) -> tuple[int, int]:
        """Numbers of running requests, and of requests that wait for their first row."""
        use = _uses(report)
        busy = Counter(_state(s, use.get(s.id)) for s in self._sessions if s.call is not None)
        running = busy["running"] + busy["held"]
        return running, busy.total() - running

    def line(self) -> str:
        """A line for `systemctl status`. Any user may read it, so it only counts the models of users."""
        ready = [model for model in self._models if model.engine is not None]
        public = [model.name for model in ready if model.is_configured]
        told = ", ".join(public + [f"{len(ready) - len(public)} of users"] * (len(ready) > len(public)))
        return f"{self.state}; sessions: {len(self._sessions)}; models: {told or 'none'}"

    # --- sessions -----------------------------------------------------------------------------------------------------

    async def session_infos(self, sessions: Sequence[SessionRecord]) -> list[SessionInfo]:
        use = _uses(await self.report())
        return [self.session_info(session, use.get(session.id)) for session in sessions]

    def session_info(self, session: SessionRecord, use: SessionUse | None = None) -> SessionInfo:
        """Describes a session. `use` None: the session has no pages on a device."""
        now = time.monotonic()
        model = self._models.model_of(session)
        return SessionInfo(
            id=session.id,
            model=session.model,
            priority=session.priority,
            user=session.user,
            user_name=self.name_of(session.user),
            state=_state(session, use),
            tokens=len(session.tokens),
            kv_tokens=use.kv_tokens if use else 0,
            pages=use.pages if use else 0,
            host_pages=use.host_pages if use else 0,
            disk_pages=use.disk_pages if use else 0,
            page_bytes=model.info.page_bytes if model is not None and model.info is not None else 0,
            age_s=now - session.created,
            idle_s=0.0 if session.call else now - session.used,
            attached=len(session.attached),
            edits=len(session.edits.unended),
            hit=session.breakpoints.hit,
            foreign_kv=bool(session.salt),
            latency=session.latency.told(),
            adapter="" if session.adapter is None else session.adapter.name,
        )

    async def quota_uses(self, users: Iterable[int]) -> list[QuotaUse]:
        report, now = await self.report(), time.monotonic()
        held = {use.tenant: use for use in report.tenants} if report else {}
        sessions, most = self._sessions, self._sessions.limits.sessions_per_user
        uses = []
        for user in users:
            tenant = self._quotas.tenant(user, now)
            times = [self._texts.time.use(user), self._texts.grammar_time.use(user)]
            uses.append(tenant.use(sessions.count(user), most, held.get(user), times, now))
        return [msgspec.structs.replace(use, user_name=self.name_of(use.user)) for use in uses]

    # --- models and devices -------------------------------------------------------------------------------------------

    async def model_infos(self, models: Sequence[ServedModel]) -> list[ModelInfo]:
        report = await self.report()
        return [self.model_info(model, report) for model in models]

    async def complete_info(self, model: ServedModel) -> ModelInfo:
        """Describes a model when its lower tiers are known, which the engine reports a moment after the model is
        ready."""
        deadline = time.monotonic() + PATIENCE
        while True:
            (info,) = await self.model_infos([model])
            is_told = (
                info.host_pages or model.kv.host == 0 or any("no pages on the host" in note for note in info.notes)
            )
            if is_told or time.monotonic() > deadline:
                return info
            await asyncio.sleep(_LOOK)

    def model_info(self, model: ServedModel, report: Report | None = None) -> ModelInfo:
        described = {info.name: info for info in report.models} if report else {}
        info = described.get(model.name) or model.info or ModelInfo(name=model.name, path=model.source.path)
        sessions = len(self._sessions.of_model(model.name))
        notes = [*info.notes, *(model.text.notes if model.text is not None else [])]
        if model.share is not None:
            notes.insert(0, f"shared by user {self.name_of(model.share.user)}")
        return msgspec.structs.replace(
            info,
            name=model.name,
            state=model.state,
            error=model.error,
            adapters=[*model.source.adapters],
            sessions=sessions,
            notes=notes,
            idle_s=self._models.idle_seconds(model),
            **(_NOTHING_ON_DEVICE if model.state == "asleep" else {}),
        )

    def _device_info(self, report: Report | None) -> DeviceInfo:
        supervisor = self._supervisor
        told = supervisor.told
        return DeviceInfo(
            name=told.device if told else "",
            description=told.description if told else "",
            budget_bytes=told.budget_bytes if told else 0,
            used_bytes=report.used_bytes if report else 0,
            state=supervisor.state,
            pid=told.pid if told else 0,
            restarts=supervisor.restarts,
            steps=report.steps if report else 0,
            generated_tokens=report.generated_tokens if report else 0,
        )

    # ----------------------------------------------------------------------------------------------------------------

    async def report(self, check: bool = False) -> Report | None:
        """The engine's report. None if there is no engine, or it does not answer within PATIENCE."""
        if self._supervisor.state != "ready":
            return None
        engine = await self._supervisor.engine()
        try:
            async with asyncio.timeout(PATIENCE):
                return await engine.call(Inquire, check=check)
        except (TimeoutError, EngineLost, ShuttingDown):
            return None

    def _audit(self, expected: Sequence[SessionRecord], report: Report | None) -> list[str]:
        findings = [*audit_tables(self._clients, self._sessions, self._models, self._arena)]
        files = [fd for model in self._models if model.files for fd in map(model.files.descriptor, model.files)]
        findings += audit_descriptors(self._clients, self._sharing, self._address, files)
        if report is None:
            return [*findings, f"the engine did not report: it is {self._supervisor.state}"]
        return [*findings, *audit_engine(expected, report)]


def _uses(report: Report | None) -> dict[str, SessionUse]:
    return {use.session: use for use in report.sessions} if report else {}


def _state(session: SessionRecord, use: SessionUse | None) -> str:
    """The session's state. The engine's state is used where only the engine knows: paused, arriving, waiting."""
    told = use.state if use else ""
    if told == "paused" or (session.is_paused and not told):
        return "paused"
    if session.call is not None:
        state = session.call.run.state if session.call.run else "queued"
        return "arriving" if (state, told) == ("queued", "arriving") else state
    if not session.attached:
        if session.kept is None:
            return "detached"
        return told if told in ("waiting", "arriving") else "kept"
    if told in ("waiting", "arriving"):
        return told
    return "idle" if session.breakpoints.hit is None else "stopped"
