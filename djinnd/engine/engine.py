"""The engine: receives messages, lets the scheduler compose a batch, runs it on the model, and sends the results."""

from __future__ import annotations

import logging
import math
import os
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import torch

from djinn_client.errors import DjinnError, OutOfMemory, SessionLost, SessionNotFound
from djinnd import messages
from djinnd.core.batch import LATE, Batch, Row, recomputed
from djinnd.core.request import Request
from djinnd.core.session import Session
from djinnd.device import Device
from djinnd.engine.adapter_loads import AdapterLoads
from djinnd.engine.collector import Collector
from djinnd.engine.dispatch import Dispatcher
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
from djinnd.engine.tracing import Tracer
from djinnd.engine.tuning import ALIVE_EVERY
from djinnd.model.sampling.sampler import Sampled
from djinnd.scheduler.policy import Policy, Target
from djinnd.scheduler.scheduler import Scheduler
from djinnd.scheduler.tuning import STEP

log = logging.getLogger("djinnd.engine")

LOST = (
    "the session's KV was imported from a client and its pages are gone, so it cannot be computed again: import the KV "
    "into a new session, or open a new session with the session's tokens"
)
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
            device, self._scheduler, self._tiers, self._runners, self._requests.under_way, self._guidance
        )
        self._models = EngineModels(
            device,
            self._scheduler,
            self._loads,
            self._tiers,
            self._requests.deliveries,
            self._reporter,
            self._runners,
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
        self._unwaited_s = 0.0  # seconds of steps whose results the host has not waited for
        self._unwaited: Counter[str] = Counter()  # tokens of these steps, by model
        self._hides_prefill = False  # True if the seconds of these steps say nothing about prefill: see `_waited_for`
        self._inquiries: list[messages.Inquire] = []
        self._started: list[messages.Started] = []  # requests with their first row in the current step, not sent yet
        self._alive_at = 0.0
        self._stopping = False
        self._dispatcher = Dispatcher(channel, self._scheduler, self._requests, self._handlers())
        self._idle_work = IdleWork(
            [
                self._send_started,
                self._tiers.work_during_step,
                self._dispatcher.handle_during_step,
                self._answer_inquiries,
                self._tracer.answer,
                self._requests.deliveries.advance,
            ]
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
                self._dispatcher.handle_between_steps(step_follows=self._idle_work.is_expected)
                self._models.turn()
                self._tracer.did("messages", calls=self._dispatcher.take_calls())
                moving = self._tiers.turn(step_follows=self._idle_work.is_expected)
                self._tracer.did("pages")
                stepped = self._step()
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

    # --- the step ---------------------------------------------------------------------------------------------------

    def _step(self) -> bool:
        """Composes and runs one batch. → False if there is nothing to run."""
        self._guidance.turn()
        batch = self._scheduler.next_batch()
        if batch is None:
            self._hides_prefill = bool(self._unwaited)
            return False
        if self._fail_lost(batch) or self._requests.fail_unseen(batch):
            return True
        self._started, began = self._requests.note_started(batch), time.monotonic()
        self._tiers.note_step(batch)
        self._tracer.did("compose")
        try:
            with self._tracer.step(batch):
                masks = self._guidance.masks if self._guidance else None
                sampled = self._runners[batch.model].run(batch, self._idle_work.run, masks)
                scored = self._runners[batch.model].scores.take()
        except ServerGone:
            raise
        except Exception as error:
            self._fail_batch(batch, error)
            return True
        self._reporter.steps += 1
        self._unwaited_s += time.monotonic() - began
        tokens = batch.tokens
        self._unwaited[batch.model] += tokens
        if tokens > len(batch.rows):
            self._hides_prefill = self._hides_prefill or any(row.stage is not None or row.guess for row in batch.rows)
            if again := recomputed(batch):
                self._channel.send(messages.Recomputed(again))
        sampling = [row for row in batch.rows if row.samples]
        if masks is not None:
            sampled = self._guidance.settle(sampling, sampled)
        for message in scored:
            self._channel.send(message)
        self._send_tokens([row.request for row in sampling], sampled)
        waits = bool(sampled.tokens or scored) or any(row.request.logits for row in batch.rows)
        seconds = self._waited_for(batch) if waits else 0.0
        further = {index: [token for token, _ in some] for index, some in sampled.further.items()}
        for request in self._scheduler.complete(batch, self._usable_tokens(sampling, sampled), seconds, further):
            self._requests.finish(request)
        if masks is not None:
            self._guidance.hold_back()
        self._runners[batch.model].settle()
        self._tracer.did("complete")
        return True

    def _waited_for(self, batch: Batch) -> float:
        """The seconds of this step, and of the steps before it whose results the host did not wait for.

        Also updates the measured prefill speed, with two exceptions. Rows that ran a part of the blocks do not measure
        prefill. If the device was idle in between, the end of the earlier steps was not observed.
        """
        seconds, self._unwaited_s = self._unwaited_s, 0.0
        tells, self._hides_prefill = not self._hides_prefill, False
        tokens = self._unwaited.pop(batch.model)
        if tells and tokens - len(batch.rows) >= STEP.least_chunk and not self._unwaited:
            self._tiers.note_prefill(batch.model, tokens, seconds)
        self._unwaited.clear()
        return seconds

    def _send_started(self) -> None:
        """Sends Stepping. As a rule the device still runs the step, so the server has handled the message before the
        first tokens come."""
        if self._started:
            self._channel.send(messages.Stepping(self._started))
            self._started = []

    def _send_tokens(self, requests: Sequence[Request], sampled: Sampled) -> None:
        """Sends the step's tokens. An unsound or late row has none."""
        given = zip(requests, sampled.tokens, sampled.logprobs, strict=True)
        tokenless = {*sampled.unsound, *sampled.late}
        tokens = [
            messages.Token(request.id, token, logprobs)
            for index, (request, token, logprobs) in enumerate(given)
            if index not in tokenless
        ]
        for index, some in sampled.further.items():
            tokens += [messages.Token(requests[index].id, token, logprobs) for token, logprobs in some]
        self._reporter.generated += len(tokens)
        self._send_started()
        if tokens:
            self._channel.send(messages.Stepped(tokens))

    def _usable_tokens(self, sampling: Sequence[Row], sampled: Sampled) -> Sequence[int | None]:
        """The tokens of these rows for the scheduler. A late row has LATE. A row whose logits are not finite has None:
        its call ends there if the session has edits, and fails otherwise."""
        tokens: list[int | None] = [*sampled.tokens]
        for index in sampled.late:
            tokens[index] = LATE
        for index in sampled.unsound:
            tokens[index], row = None, sampling[index]
            if not row.session.edits:
                dtype = self._runners[row.session.model].model.dtype
                told = (
                    "the model gave logits that are no numbers: its weights hold NaN, or its activations overflow "
                    f"{dtype}; the session is as it was before the call"
                )
                self._requests.fail(row.request, DjinnError(told))
        return tokens

    def _fail_lost(self, batch: Batch) -> bool:
        """Fails requests that would have to recompute imported KV: the session's tokens do not determine it. → True if
        there were any."""
        lost = [row.request for row in batch.rows if row.start < row.session.foreign_tokens]
        for request in lost:
            self._requests.fail(request, SessionLost(LOST))
        return bool(lost)

    def _fail_batch(self, batch: Batch, error: Exception) -> None:
        """Fails every request of the step. A permanent error of the device is raised again, and the engine exits."""
        log.error("step_failed model=%s rows=%d", batch.model, len(batch.rows), exc_info=error)
        self._device.synchronize()  # raises again if the error is permanent
        self._runners[batch.model].recover()
        told = DjinnError(f"the step failed: {error!r}")
        if isinstance(error, torch.OutOfMemoryError):
            torch.cuda.empty_cache()
            told = OutOfMemory(f"the step ran out of device memory: {error}")
        for row in batch.rows:
            self._requests.fail(row.request, told)

    # --- sessions -----------------------------------------------------------------------------------------------------

    def _open(self, message: messages.Open) -> None:
        session = Session(message.session, message.model, message.tenant, message.priority, list(message.tokens))
        session.paused, session.edits, session.due_from = message.paused, message.edits, message.due_from
        session.adapter = message.adapter
        self._scheduler.open(session)

    def _fork(self, message: messages.Fork) -> None:
        copy = self._scheduler.fork(message.parent, message.session, message.priority)
        if copy is not None:
            self._runners[self._scheduler.session(message.session).model].copy_page(*copy)

    def _close(self, message: messages.Close) -> None:
        runner = self._runners[self._scheduler.session(message.session).model]
        self._requests.finish(self._scheduler.close(message.session))
        runner.use_edits(message.session, ())
        runner.parked.drop(message.session)

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
