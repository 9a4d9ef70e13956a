"""The engine: receives messages, lets the scheduler compose a batch, runs it, sends what came of it."""

from __future__ import annotations

import logging
import math
import os
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import astuple
from typing import Any

import torch

from djinn_client.errors import Cancelled, DjinnError, OutOfMemory, SessionLost, SessionNotFound
from djinnd import messages
from djinnd.core.batch import Batch
from djinnd.core.edits import FOREVER, now
from djinnd.core.request import Request
from djinnd.core.session import Session
from djinnd.device import Device
from djinnd.engine.channel import Channel, ServerGone
from djinnd.engine.collector import Collector
from djinnd.engine.courses import Courses
from djinnd.engine.deliveries import Deliveries
from djinnd.engine.export import Passages
from djinnd.engine.figures import Figures
from djinnd.engine.loading import LoadQueue
from djinnd.engine.model_runner import ModelRunner
from djinnd.engine.models import Models
from djinnd.engine.pauses import Pauses
from djinnd.engine.stop_captures import StopCaptures
from djinnd.engine.tiers import Tiers
from djinnd.engine.tracing import Tracer
from djinnd.model.sampler import Sampled
from djinnd.scheduler.policy import LEAST_CHUNK, Policy
from djinnd.scheduler.scheduler import Scheduler

log = logging.getLogger("djinnd.engine")

LOST = (
    "the session's KV came from a client, and its pages are gone: read its tokens, and hand the KV over again, or go "
    "on with the tokens in a new session"
)
ALIVE_EVERY = 0.5  # seconds


class Engine:
    """Owns the scheduler, the models and the channel. One thread; only loading has another."""

    def __init__(self, channel: Channel, device: Device, max_batch_tokens: int, max_rows: int) -> None:
        self._channel = channel
        self._device = device
        self._scheduler = Scheduler(max_batch_tokens, max_rows)
        self._loads = LoadQueue(channel, device, max_batch_tokens)
        self._runners: dict[str, ModelRunner] = {}
        self._pauses = Pauses(self._scheduler, self._runners, channel)
        self._tiers = Tiers(device, self._scheduler, self._loads, self._pauses)
        self._tracer = Tracer(device, channel.send)
        self._courses = Courses(channel)
        self._passages = Passages(device, self._scheduler, self._runners, channel, self._courses, self._compute_kv)
        self._deliveries = Deliveries(device, channel, self._courses, self._fail_delivery)
        self._stop_captures = StopCaptures(self._deliveries, self._runners)
        self._under_way: dict[int, Session] = {}  # by request
        self._waiting: set[int] = set()  # requests that have had no row yet
        self._figures = Figures(device, self._scheduler, self._tiers, self._runners, self._under_way)
        self._models = Models(
            device,
            self._scheduler,
            self._loads,
            self._tiers,
            self._deliveries,
            self._figures,
            self._runners,
            channel,
            (max_batch_tokens, max_rows),
        )
        self._unwaited_s = 0.0  # of steps that nobody has waited for
        self._unwaited: Counter[str] = Counter()  # their tokens, by model
        self._alive_at = 0.0
        self._stopping = False
        self._handlers: dict[type, Callable[[Any], None]] = {
            messages.Load: self._models.load,
            messages.Plan: self._loads.submit,
            messages.DescribeImage: self._loads.submit,
            messages.SetBudget: self._models.set_budget,
            messages.Trace: self._tracer.start,
            messages.ArenaReady: self._loads.arena,
            messages.ArenaRefused: self._loads.arena,
            messages.Unload: self._models.unload,
            messages.Open: self._open,
            messages.Fork: self._fork,
            messages.Close: self._close,
            messages.Run: self._run,
            messages.CancelRun: lambda m: self._finish(self._scheduler.cancel(m.request)),
            messages.Halt: lambda m: self._finish(self._scheduler.halt(m.request, m.keep)),
            messages.Hold: self._hold,
            messages.Truncate: self._truncate,
            messages.AddEdit: lambda m: self._scheduler.edit(m.session, m.edit),
            messages.EndEdits: lambda m: self._scheduler.end_edits(m.session, m.edits, m.at),
            messages.ExportKv: self._passages.export,
            messages.ImportKv: self._passages.import_,
            messages.Signal: self._tiers.signal,
            messages.Pause: self._pauses.ask,
            messages.Resume: lambda m: self._scheduler.resume(m.session),
            messages.SetClass: lambda m: self._scheduler.set_class(m.session, m.priority),
            messages.SetTenants: self._set_tenants,
            messages.SetPolicy: self._set_policy,
            messages.Explain: self._explain,
            messages.PublicPrefix: self._models.mark_public,
            messages.Inquire: lambda m: channel.send(self._figures.report(m)),
            messages.Shutdown: self._shutdown,
        }

    def serve(self) -> None:
        """Until the server says so, or is gone."""
        device = self._device
        busy = quiet = False  # quiet: nobody has said a word for a while
        collector = Collector(time.monotonic())
        try:
            self._channel.send(messages.Ready(device.name, device.description, device.budget.total, os.getpid()))
            while not self._stopping:
                received = self._channel.receive(0.0 if busy else min(ALIVE_EVERY, self._tiers.patience))
                self._scheduler.tick(time.monotonic())
                quiet = not received and (quiet or not busy)
                for message in received:
                    self._handlers[type(message)](message)
                self._models.turn()
                moving = self._tiers.turn()
                stepped = self._step()
                self._tiers.step_over()
                busy = stepped or (quiet and self._models.prepare())
                busy = self._courses.turn() or busy
                if moving and not busy and not self._tiers.follow():
                    self._tiers.wait()
                busy = busy or self._tiers.is_busy  # composing a step may have asked for pages
                collector.turn(quiet and not busy, time.monotonic())
                self._tracer.answer()
                self._beat()
        except ServerGone:
            log.warning("server_gone")
        finally:
            collector.close()
            self._loads.close()
            self._courses.close()
            self._tiers.stop()

    # --- the step ---------------------------------------------------------------------------------------------------

    def _step(self) -> bool:
        """Runs one batch, if there is one."""
        batch = self._scheduler.next_batch()
        if batch is None:
            return False
        if self._fail_lost(batch) or self._fail_unseen(batch):
            return True
        started, began = self._note_started(batch), time.monotonic()
        try:
            with self._tracer.step(batch):
                sampled = self._runners[batch.model].run(batch, self._tiers.beside_step)
        except Exception as error:
            self._fail_batch(batch, error)
            return True
        self._figures.steps += 1
        self._unwaited_s += time.monotonic() - began
        self._unwaited[batch.model] += batch.tokens
        requests = [row.request for row in batch.rows if row.samples]
        self._tell(requests, sampled, started)
        for index in sampled.unsound:
            told = DjinnError("the model gave logits that are no numbers; the session is as it was before the call")
            self._fail(requests[index], told)
        waits = bool(sampled.tokens) or any(row.request.logits for row in batch.rows)
        seconds = self._waited_for(batch) if waits else 0.0
        for request in self._scheduler.complete(batch, sampled.tokens, seconds):
            self._finish(request)
        self._runners[batch.model].settle()
        return True

    def _waited_for(self, batch: Batch) -> float:
        """The seconds of this step, and of those before it that nobody has waited for."""
        seconds, self._unwaited_s = self._unwaited_s, 0.0
        tokens = self._unwaited.pop(batch.model)
        if tokens - len(batch.rows) >= LEAST_CHUNK and not self._unwaited:
            self._tiers.note_prefill(batch.model, tokens, seconds)
        self._unwaited.clear()
        return seconds

    def _note_started(self, batch: Batch) -> list[messages.Started]:
        if not self._waiting:
            return []
        now = time.monotonic()
        rows = [row for row in batch.rows if row.request.id in self._waiting]
        started = [messages.Started(row.request.id, now, row.session.woken) for row in rows]
        for row in rows:
            self._waiting.remove(row.request.id)
            row.session.woken = False
        return started

    def _tell(self, requests: Sequence[Request], sampled: Sampled, started: list[messages.Started]) -> None:
        """What the step gave each request; those that are unsound get no token."""
        given = zip(requests, sampled.tokens, sampled.logprobs, strict=True)
        unsound = set(sampled.unsound)
        tokens = [
            messages.Token(request.id, token, logprobs)
            for index, (request, token, logprobs) in enumerate(given)
            if index not in unsound
        ]
        self._figures.generated += len(tokens)
        if tokens or started:
            self._channel.send(messages.Stepped(tokens, started))

    def _fail_lost(self, batch: Batch) -> bool:
        """Ends requests that would have to compute KV anew which a client gave, and tokens cannot say what it was."""
        lost = [row.request for row in batch.rows if row.start < row.session.foreign_tokens]
        for request in lost:
            self._fail(request, SessionLost(LOST))
        return bool(lost)

    def _fail_unseen(self, batch: Batch) -> bool:
        """Ends requests that are to stop where what is there cannot be captured."""
        refused = self._stop_captures.capture(batch)
        if refused:
            self._models.spare_idle()
            refused = self._stop_captures.capture(batch)
        for request, error in refused:
            self._fail(request, error)
        return bool(refused)

    def _fail_batch(self, batch: Batch, error: Exception) -> None:
        """The step gave nothing: each request in it is told so. A device that is broken for good ends the process."""
        log.error("step_failed model=%s rows=%d", batch.model, len(batch.rows), exc_info=error)
        self._device.synchronize()  # raises again where the error sticks, and so ends the engine
        self._runners[batch.model].recover()
        told = DjinnError(f"the step failed: {error!r}")
        if isinstance(error, torch.OutOfMemoryError):
            torch.cuda.empty_cache()
            told = OutOfMemory(f"the step ran out of device memory: {error}")
        for row in batch.rows:
            self._fail(row.request, told)

    # --- requests ---------------------------------------------------------------------------------------------------

    def _open(self, message: messages.Open) -> None:
        session = Session(message.session, message.model, message.tenant, message.priority, list(message.tokens))
        session.paused, session.edits, session.due_from = message.paused, message.edits, message.due_from
        self._scheduler.open(session)

    def _fork(self, message: messages.Fork) -> None:
        copy = self._scheduler.fork(message.parent, message.session, message.priority)
        if copy is not None:
            self._runners[self._scheduler.session(message.session).model].copy_page(*copy)

    def _close(self, message: messages.Close) -> None:
        runner = self._runners[self._scheduler.session(message.session).model]
        self._finish(self._scheduler.close(message.session))
        runner.use_edits(message.session, ())
        runner.held.drop(message.session)

    def _truncate(self, message: messages.Truncate) -> None:
        """What a run ended with may reach the server when that has closed the session already, and lead to this."""
        with suppress(SessionNotFound):
            self._scheduler.truncate(message.session, message.length)

    def _run(self, message: messages.Run) -> None:
        try:
            self._submit(message)
        except DjinnError as error:
            self._channel.refuse(message.request, error)

    def _submit(self, message: messages.Run) -> None:
        session = self._scheduler.session(message.session)
        first = len(session.tokens)
        seen_from = first if message.logits else FOREVER
        if message.capture:
            seen_from = min(first if message.tokens else now(first), session.due_from)
        request = Request(
            id=message.request,
            first=first,
            prompt_end=first + len(message.tokens),
            max_tokens=message.max_tokens,
            sampling=message.sampling,
            stop_tokens=frozenset(message.stop_tokens),
            logprobs=message.logprobs,
            logits=message.logits,
            capture=tuple(message.capture),
            seen_from=seen_from,
            stops=tuple(message.stops),
            resume_block=message.resume_block,
            expected_tokens=message.expected_tokens,
            deadline=message.deadline or math.inf,
        )
        assert not (message.logits and message.max_tokens), "a forward pass generates nothing"
        in_parts = message.stops or message.resume_block is not None
        assert not (in_parts and (message.logits or message.capture)), (
            "a run that may stop has what is there, and nothing else"
        )
        self._scheduler.submit(session.id, request, message.tokens)
        self._tiers.called(session.id)
        try:
            self._make_room(session, request)
        except OutOfMemory:
            self._models.spare_idle()
            try:
                self._make_room(session, request)
            except OutOfMemory:
                self._scheduler.rollback(request.id)
                raise
        self._stop_captures.expect(request)
        self._under_way[request.id] = session
        self._waiting.add(request.id)

    def _make_room(self, session: Session, request: Request) -> None:
        """For what the request's steps need and give beside tokens. Raises OutOfMemory."""
        runner = self._runners[session.model]
        runner.use_edits(session.id, session.edits)
        if request.capture:
            self._deliveries.open(session, request, runner)
        if request.logits:
            try:
                runner.open_window(request)
            except OSError as error:
                raise OutOfMemory(f"the host has no memory for the logits: {error}") from error

    def _compute_kv(self, number: int, session: Session) -> None:
        """Submits a request that computes what KV the session lacks, and gives no token."""
        length = len(session.tokens)
        self._runners[session.model].use_edits(session.id, session.edits)
        self._scheduler.submit(session.id, Request(number, first=length, prompt_end=length, max_tokens=0), [])
        self._under_way[number] = session

    def _hold(self, message: messages.Hold) -> None:
        (self._scheduler.hold if message.held else self._scheduler.release)(message.request)

    def _finish(self, request: Request | None) -> None:
        """The final reply of a request that the scheduler has ended; None: it had been answered before."""
        if request is None:
            return
        session = self._forget(request)
        length = len(session.tokens)
        window = self._runners[session.model].forget(request)
        if self._passages.filled(request.id, _cancelled(request)):
            return
        if window is None or request.finish_reason == "cancelled":
            assert request.finish_reason is not None
            generated = length - request.prompt_end
            reply = messages.Finished(request.id, request.finish_reason, length, generated, request.computed)
            reply.stopped = self._stopped(session, request)
            if reply.stopped is not None or (request.capture and request.finish_reason != "cancelled"):
                self._deliveries.ended(request, reply)
                return
            self._deliveries.drop(request)
            self._channel.send(reply)
        else:
            told = messages.LogitsReady(request.id, length, request.computed, window.tokens, window.vocab)
            self._channel.send(told, [window.fd])
        if window is not None:
            window.close()

    def _stopped(self, session: Session, request: Request) -> int | None:
        """Before which block the request has ended. Where its rows are not held there, they are computed anew when the
        session goes on."""
        if request.stopped is None:
            return None
        if request.stopped.block and not self._runners[session.model].held.holds(session):
            self._scheduler.drop_stage(session.id)
        return request.stopped.block

    def _fail_delivery(self, session: Session, request: Request, error: DjinnError) -> None:
        """What it captures has nowhere to go."""
        if request.id in self._under_way:
            self._fail(request, error)
            return
        if session in self._scheduler.sessions():  # idle until this is answered
            self._scheduler.truncate(session.id, request.first)
        self._channel.refuse(request.id, error)

    def _fail(self, request: Request, error: DjinnError) -> None:
        """Answers with the error; the session is as it was before the request."""
        self._scheduler.rollback(request.id)
        session = self._forget(request)
        self._deliveries.drop(request)
        window = self._runners[session.model].forget(request)
        if window is not None:
            window.close()
        if not self._passages.filled(request.id, error):
            self._channel.refuse(request.id, error)

    def _forget(self, request: Request) -> Session:
        self._waiting.discard(request.id)
        self._stop_captures.forget(request)
        return self._under_way.pop(request.id)

    def _set_policy(self, message: messages.SetPolicy) -> None:
        policy = Policy(message.slowdown, message.between_tokens, message.ageing)
        if policy != self._scheduler.policy:
            self._scheduler.set_policy(policy)
            log.info("policy_set slowdown=%g between_tokens=%g ageing=%g", *astuple(policy))

    def _set_tenants(self, message: messages.SetTenants) -> None:
        for limits in message.tenants:
            self._scheduler.set_tenant(limits.tenant, limits.weight, limits.device_kv)
        self._tiers.set_tenants(message.tenants)

    def _explain(self, message: messages.Explain) -> None:
        try:
            told = self._scheduler.why(message.session)
        except DjinnError as error:
            self._channel.refuse(message.request, error)
            return
        self._channel.send(messages.Explained(message.request, told.state, told.reason, told.figures, told.ahead))

    # --- the engine itself ------------------------------------------------------------------------------------------

    def _beat(self) -> None:
        now = time.monotonic()
        if now - self._alive_at >= ALIVE_EVERY:
            self._alive_at = now
            self._channel.send(messages.Alive(self._figures.steps))

    def _shutdown(self, message: messages.Shutdown) -> None:
        if message.keep_pages:
            self._tiers.keep()
        self._stopping = True


def _cancelled(request: Request) -> DjinnError | None:
    return Cancelled("the request was cancelled") if request.finish_reason == "cancelled" else None
