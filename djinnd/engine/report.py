"""Reports of an engine: steps and tokens so far, memory of its models and sessions, and the findings of an audit."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from djinn_client.protocol import ModelInfo
from djinnd import messages
from djinnd.device import CopyLane, Device
from djinnd.engine.drafts.drafts import Drafts
from djinnd.engine.grammar.guidance import Guidance
from djinnd.engine.paging.tiers import Tiers
from djinnd.engine.run.model_info import info_of
from djinnd.engine.run.model_runner import ModelRunner
from djinnd.scheduler.scheduler import Scheduler

_COPIED = {CopyLane.WEIGHTS: "weights", CopyLane.UP: "pages up", CopyLane.DOWN: "pages down"}  # names in Report.copied


@dataclass(eq=False)
class Reporter:
    """Reports on the engine, and audits it."""

    _device: Device
    _scheduler: Scheduler
    _tiers: Tiers
    _runners: Mapping[str, ModelRunner]  # by model, a live view
    _under_way: Collection[int]  # numbers of running requests, a live view
    _guidance: Guidance
    _drafts: Drafts
    steps: int = field(init=False, default=0)
    generated: int = field(init=False, default=0)  # tokens that steps have chosen

    def report(self, message: messages.Inquire) -> messages.Report:
        budget = self._device.budget
        return messages.Report(
            request=message.request,
            budget_bytes=budget.total,
            used_bytes=budget.used,
            steps=self.steps,
            generated_tokens=self.generated + self._guidance.appended,
            models=[self.info(runner) for runner in self._runners.values()],
            sessions=[self._tiers.use_of(session) for session in self._scheduler.sessions()],
            tenants=self._tiers.uses_of_tenants(),
            findings=self._audit() if message.check else [],
            copied={_COPIED[lane]: nbytes for lane, nbytes in self._device.copied.items()},
        )

    def info(self, runner: ModelRunner) -> ModelInfo:
        info = info_of(runner)
        self._tiers.fill(info)
        return info

    def _audit(self) -> list[str]:
        findings = []
        audits = {"scheduler": self._scheduler.check_integrity, "budget": self._device.budget.check_integrity}
        audits["drafts"] = self._drafts.check_integrity
        runners = self._runners.values()
        audits |= {f"edits of {runner.name}": runner.probes.edits.check_integrity for runner in runners}
        audits |= {f"adapters of {runner.name}": runner.adapters.check_integrity for runner in runners}
        audits |= {f"parked rows of {runner.name}": runner.probes.parked.check_integrity for runner in runners}
        for name, audit in audits.items():
            try:
                audit()
            except AssertionError as error:
                findings.append(f"{name}: {error}")
        windows = {request for runner in runners for request in runner.windows}
        if stray := windows.difference(self._under_way):
            findings.append(f"engine: windows of ended requests {sorted(stray)}")
        for session in self._scheduler.sessions():
            stage = session.stage if session.left_stage is None else session.left_stage.stage
            waits = stage is not None and stage.first > 0
            if waits and not self._runners[session.model].probes.parked.holds(session):
                findings.append(f"engine: session {session.id} waits in mid-model, and its rows are not parked")
        return findings
