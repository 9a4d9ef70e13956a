"""The engine: receives messages, and in each turn of its loop runs a step and whatever has to be done beside steps."""

from __future__ import annotations

import logging
import math
import os
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from djinn_client.errors import SessionNotFound
from djinnd import messages
from djinnd.core.session import Session
from djinnd.device import Device
from djinnd.engine.adapter_loads import AdapterLoads
from djinnd.engine.collector import Collector
from djinnd.engine.dispatch import Dispatcher
from djinnd.engine.drafts.drafts import Drafts
from djinnd.engine.grammar.processes import GrammarProcesses
from djinnd.engine.io.background import BackgroundWork
from djinnd.engine.io.channel import ServerChannel, ServerGone
from djinnd.engine.io.idle_work import IdleWork
from djinnd.engine.kernels.compiler import KernelCompiler
from djinnd.engine.load.loading import LoadQueue
from djinnd.engine.models import EngineModels
from djinnd.engine.paging.pauses import Pauses
from djinnd.engine.paging.tiers import Tiers
from djinnd.engine.report import Reporter
from djinnd.engine.requests import Requests
from djinnd.engine.run.model_runner import ModelRunner
from djinnd.engine.steps import Steps
from djinnd.engine.tracing import Tracer
from djinnd.engine.tuning import ALIVE_EVERY
from djinnd.scheduler.policy import Policy, Target
from djinnd.scheduler.scheduler import Scheduler

log = logging.getLogger("djinnd.engine")

GRAMMAR_LIMITS = (10.0, 1 << 30)  # default configuration: seconds, and bytes of memory


class Engine:
    """Owns the scheduler, the models and the channel. Everything runs on one thread, except loading and a few helpers
    that have threads."""

    def __init__(
        self,
        channel: ServerChannel,
        device: Device,
        max_batch_tokens: int,
        max_rows: int,
        compiler: KernelCompiler | None = None,
        grammar_limits: tuple[float, int] = GRAMMAR_LIMITS,
    ) -> None:
        """`compiler`: compiles kernels, None for a device without kernels of ours. `grammar_limits`: see
        GrammarProcesses."""
        self._channel = channel
        self._device = device
        self._scheduler = Scheduler(max_batch_tokens, max_rows)
        self._loads = LoadQueue(channel, device, max_batch_tokens)
        self._runners: dict[str, ModelRunner] = {}
        self._pauses = Pauses(self._scheduler, self._runners, channel)
        self._tiers = Tiers(device, self._scheduler, self._loads, self._pauses)
        self._tracer = Tracer(device, channel.send)
        self._drafts = Drafts(self._scheduler, self._runners)
        self._background = BackgroundWork(channel)
        self._requests = Requests(
            device,
            self._background,
            GrammarProcesses(channel, grammar_limits),
            self._scheduler,
            self._runners,
            self._tiers,
            channel,
            lambda: self._models.spare_idle(),
        )
        self._guidance = self._requests.guidance
        self._reporter = Reporter(
            device, self._scheduler, self._tiers, self._runners, self._requests.under_way, self._guidance, self._drafts
        )
        self._models = EngineModels(
            device,
            self._scheduler,
            self._loads,
            self._tiers,
            self._requests.deliveries,
            self._reporter,
            self._runners,
            self._drafts,
            channel,
            (max_batch_tokens, max_rows),
            compiler,
        )
        self._adapters = AdapterLoads(device, self._runners, channel, self._background, compiler)
        if compiler is not None:
            from djinnd.model.kernels.launching.launches import (
                launches,  # needs Triton, which only CUDA builds of torch bring
            )

            launches.install(compiler.compile, self._send_alive)
        self._inquiries: list[messages.Inquire] = []
        self._alive_at = 0.0
        self._stopping = False
        self._dispatcher = Dispatcher(channel, self._scheduler, self._requests, self._handlers())
        self._idle_work = IdleWork(
            [
                lambda: self._steps.send_started(),
                self._tiers.work_during_step,
                self._dispatcher.handle_during_step,
                self._answer_inquiries,
                self._tracer.answer,
                self._requests.deliveries.advance,
            ]
        )
        self._steps = Steps(
            device,
            self._scheduler,
            self._runners,
            self._requests,
            self._tiers,
            self._reporter,
            self._tracer,
            self._drafts,
            self._idle_work,
            channel,
            may_go_on=self._nothing_waits,
        )

    def _handlers(self) -> dict[type, Callable[[Any], None]]:
        """The handler of each kind of message."""
        return {
            messages.Load: self._models.load,
            messages.Plan: self._models.describe,
            messages.DescribeDevice: self._models.describe,
            messages.DescribeImage: self._loads.submit,
            messages.SetBudget: self._models.set_budget,
            messages.Trace: self._tracer.start,
            messages.ArenaReady: self._loads.arena,
            messages.ArenaRefused: self._loads.arena,
            messages.Unload: self._models.unload,
            messages.Open: self._open,
            messages.Fork: self._fork,
            messages.Close: self._close,
            messages.Run: self._requests.run,
            messages.CancelRun: lambda m: self._requests.finish(self._scheduler.cancel(m.request)),
            messages.Halt: lambda m: self._requests.finish(self._scheduler.halt(m.request, m.keep)),
            messages.Hold: self._hold,
            messages.Truncate: self._truncate,
            messages.AddEdit: lambda m: self._scheduler.edit(m.session, m.edit),
            messages.EndEdits: lambda m: self._scheduler.end_edits(m.session, m.edits, m.at),
            messages.ExportKv: self._requests.kv_transfers.export,
            messages.ImportKv: self._requests.kv_transfers.import_,
            messages.Signal: self._tiers.signal,
            messages.Pause: self._pauses.ask,
            messages.Resume: lambda m: self._scheduler.resume(m.session),
            messages.SetClass: lambda m: self._scheduler.set_class(m.session, m.priority),
            messages.SetTenants: self._set_tenants,
            messages.SetPolicy: self._set_policy,
            messages.Explain: self._explain,
            messages.PublicPrefix: self._models.mark_public,
            messages.LoadAdapter: self._adapters.load,
            messages.DropAdapter: self._adapters.drop,
            messages.Inquire: self._inquire,
            messages.Shutdown: self._shutdown,
        }

    def serve(self) -> None:
        """Runs until the server sends Shutdown or closes the channel."""
        device = self._device
        busy = quiet = False  # quiet: no message for a while
        collector = Collector(time.monotonic())
        try:
            self._channel.send(messages.Ready(device.name, device.description, device.budget.total, os.getpid()))
            while not self._stopping:
                received = self._dispatcher.receive(0.0 if busy else min(ALIVE_EVERY, self._tiers.patience))
                self._tracer.turn()
                quiet = not received and (quiet or not busy)
                self._idle_work.turn()
                if self._steps.is_ahead:  # the next step already runs
                    busy = self._steps.run()
                    self._beat()
                    continue
                self._dispatcher.handle_between_steps(step_follows=self._idle_work.is_expected)
                self._models.turn()
                self._tracer.did("messages", calls=self._dispatcher.take_calls())
                moving = self._tiers.turn(step_follows=self._idle_work.is_expected)
                self._tracer.did("pages")
                stepped = self._steps.run()
                if self._steps.is_ahead:
                    busy = True
                    continue
                leaving = self._tiers.after_step(has_overlapped=self._idle_work.has_run)
                self._answer_inquiries()
                busy = stepped or leaving or self._models.is_adopting or (quiet and self._models.prepare())
                busy = self._background.turn() or busy
                if moving and not busy and not self._tiers.follow():
                    self._tiers.wait()
                busy = busy or self._tiers.is_busy  # composing a step may have asked for page copies
                if not stepped:
                    busy = self._tracer.answer() or busy
                collector.turn(quiet and not busy, time.monotonic())
                self._beat()
            self._channel.finish()
        except ServerGone:
            log.warning("server_gone")
        finally:
            collector.close()
            self._models.close()
            self._loads.close()
            self._background.close()
            self._guidance.close()
            self._tiers.stop()

    # --- sessions -----------------------------------------------------------------------------------------------------

    def _open(self, message: messages.Open) -> None:
        session = Session(message.session, message.model, message.tenant, message.priority, list(message.tokens))
        session.paused, session.edits, session.due_from = message.paused, message.edits, message.due_from
        session.adapter = message.adapter
        self._scheduler.open(session)

    def _fork(self, message: messages.Fork) -> None:
        copy = self._scheduler.fork(message.parent, message.session, message.priority)
        if copy is not None:
            self._runners[self._scheduler.session(message.session).model].pages.copy(*copy)

    def _close(self, message: messages.Close) -> None:
        runner = self._runners[self._scheduler.session(message.session).model]
        self._requests.finish(self._scheduler.close(message.session))
        self._drafts.close(runner.name, message.session)
        runner.probes.use_edits(message.session, ())
        runner.probes.parked.drop(message.session)

    def _truncate(self, message: messages.Truncate) -> None:
        """The session may be closed already: the server truncates when a run ends, and that end can cross with
        a Close."""
        with suppress(SessionNotFound):
            self._scheduler.truncate(message.session, message.length)

    def _hold(self, message: messages.Hold) -> None:
        (self._scheduler.hold if message.held else self._scheduler.release)(message.request)

    # --- the engine itself ------------------------------------------------------------------------------------------

    def _set_policy(self, message: messages.SetPolicy) -> None:
        targets = {name: Target(*(seconds or math.inf for seconds in each)) for name, each in message.targets.items()}
        policy = Policy(targets, message.ageing, message.paging)
        if policy != self._scheduler.policy:
            self._scheduler.set_policy(policy)
            told = " ".join(f"{name}={between:g}/{first:g}" for name, (between, first) in targets.items())
            log.info("policy_set %s ageing=%g paging=%g", told, policy.ageing, policy.paging)

    def _set_tenants(self, message: messages.SetTenants) -> None:
        for limits in message.tenants:
            self._scheduler.set_tenant(limits.tenant, limits.weight, limits.device_kv)
        self._tiers.set_tenants(message.tenants)

    def _explain(self, message: messages.Explain) -> None:
        told = self._scheduler.why(message.session)
        self._channel.send(messages.Explained(message.request, told.state, told.reason, told.figures, told.ahead))

    def _inquire(self, message: messages.Inquire) -> None:
        """Answers a report at the next convenient time: it visits all pages of all sessions, so it overlaps with a step
        if there is one. An audit is made now, between two steps."""
        self._inquiries.append(message)
        if message.check:
            self._answer_inquiries()

    def _answer_inquiries(self) -> None:
        for message in self._inquiries:
            self._channel.send(self._reporter.report(message))
        self._inquiries.clear()

    def _nothing_waits(self) -> bool:
        """True if nothing is known that has to be done between two steps, so that the next step may be launched before
        the running one ends."""
        return not (self._dispatcher.has_some or self._tiers.is_busy or self._guidance or self._device.trace)

    def _beat(self) -> None:
        now = time.monotonic()
        if now - self._alive_at >= ALIVE_EVERY:
            self._alive_at = now
            self._send_alive()

    def _send_alive(self, *_: int) -> None:
        self._channel.send(messages.Alive())

    def _shutdown(self, message: messages.Shutdown) -> None:
        if message.keep_pages:
            self._tiers.keep()
        self._stopping = True
