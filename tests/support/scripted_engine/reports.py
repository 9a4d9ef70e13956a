"""Reports of the scripted engine on its models, sessions and tenants."""

from __future__ import annotations

from djinnd import messages
from tests.support.scripted_engine.channel import Channel
from tests.support.scripted_engine.models import Models
from tests.support.scripted_engine.runs import Runs
from tests.support.scripted_engine.script import PAGE_BYTES, Script
from tests.support.scripted_engine.session import Session


class Reports:
    def __init__(
        self, script: Script, channel: Channel, models: Models, sessions: dict[str, Session], runs: Runs
    ) -> None:
        self._script = script
        self._channel = channel
        self._models = models
        self._sessions = sessions
        self._runs = runs
        self._tenants: dict[int, messages.TenantLimits] = {}

    def on_inquire(self, message: messages.Inquire) -> None:
        report = messages.Report(
            message.request,
            budget_bytes=self._models.budget,
            used_bytes=1 << 16,
            steps=self._runs.steps,
            generated_tokens=0,
            models=list(self._models.infos.values()),
            sessions=[session.use(name) for name, session in self._sessions.items()],
            tenants=[self._use_of(tenant) for tenant in {session.tenant for session in self._sessions.values()}],
            findings=["the script was told to find something"] if self._script.on_load.get("check") else [],
            copied={"weights": 0, "pages up": 0, "pages down": 0},
        )
        self._channel.send(report)

    def _use_of(self, tenant: int) -> messages.TenantUse:
        """Its device bytes are its pages, and its disk bytes are its disk limit, so that a test sees the limits."""
        pages = sum(session.pages for session in self._sessions.values() if session.tenant == tenant)
        limits = self._tenants.get(tenant, messages.TenantLimits(tenant))
        return messages.TenantUse(tenant, pages * PAGE_BYTES, 0, limits.disk_kv or 0)

    def on_settenants(self, message: messages.SetTenants) -> None:
        self._tenants.update((limits.tenant, limits) for limits in message.tenants)
