"""The engine's requests, from a Run to its one final reply.

    Run ─► submitted ─► Started, with its first row ─► … its tokens … ─► Finished, LogitsReady or Failed
            └─ refused: Failed                          └─ fails: rolled back, Failed

Resources of a request other than tokens are reserved when it is submitted, and freed when it ends: the window of its
logits, and rows for captures at its points or at its breakpoint.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import InitVar, dataclass, field

from djinn_client.errors import Cancelled, DjinnError, OutOfMemory, SessionNotFound
from djinnd import messages
from djinnd.core.batch import Batch
from djinnd.core.edits import FOREVER, now
from djinnd.core.request import Request
from djinnd.core.session import Session
from djinnd.device import Device
from djinnd.engine.grammar.guidance import Guidance
from djinnd.engine.grammar.processes import GrammarProcesses
from djinnd.engine.io.background import BackgroundWork
from djinnd.engine.io.channel import ServerChannel
from djinnd.engine.paging.tiers import Tiers
from djinnd.engine.run.model_runner import ModelRunner
from djinnd.engine.windows.deliveries import Deliveries
from djinnd.engine.windows.kv_transfers import KvTransfers
from djinnd.engine.windows.stop_captures import StopCaptures
from djinnd.model.sampling.draw import is_penalised
from djinnd.scheduler.scheduler import Scheduler


@dataclass(eq=False)
class Requests:
    """Submits runs, reserves their memory, and sends their final replies. Used by the engine's thread."""

    device: InitVar[Device]
    background: InitVar[BackgroundWork]
    grammar_processes: InitVar[GrammarProcesses]
    _scheduler: Scheduler
    _runners: Mapping[str, ModelRunner]  # by model, a live view
    _tiers: Tiers
    _channel: ServerChannel
    _spare_idle: Callable[[], object]  # frees device memory of idle sessions
    under_way: dict[int, Session] = field(init=False, default_factory=dict)  # by request
    _waiting: set[int] = field(init=False, default_factory=set)  # requests that have had no row yet

    def __post_init__(self, device: Device, background: BackgroundWork, grammar_processes: GrammarProcesses) -> None:
        shared = self._scheduler, self._runners, self._channel, background
        self.kv_transfers = KvTransfers(device, *shared, self._compute_kv)
        self.deliveries = Deliveries(device, self._channel, background, self._fail_delivery)
        self.guidance = Guidance(self._scheduler, self._channel, grammar_processes, self.fail, self.finish)
        self._stop_captures = StopCaptures(self.deliveries, self._runners)

    # --- requests begin -----------------------------------------------------------------------------------------------

    def run(self, message: messages.Run) -> None:
        """Raises DjinnError if the Run is refused; the session is then as it was before."""
        try:
            self._submit(message)
        finally:
            if message.grammar is not None:
                os.close(message.grammar.fd)

    def is_plain(self, message: messages.Run) -> bool:
        """True if the Run only adds and generates tokens, and needs no memory for logits, captures or new edits."""
        if message.logits or message.capture or message.stops or message.resume_block is not None:
            return False
        if message.prompt_logprobs is not None:
            return False
        try:
            session = self._scheduler.session(message.session)
        except SessionNotFound:
            return False
        runner = self._runners[session.model]
        return runner.probes.edits.of(session.id) == session.edits and runner.adapters.is_ready(session.adapter)

    def _submit(self, message: messages.Run) -> None:
        session = self._scheduler.session(message.session)
        first = len(session.tokens) if message.first is None else message.first
        prompt_end = len(session.tokens) + len(message.tokens) - message.given
        seen_from = first if message.logits else FOREVER
        if message.capture:
            seen_from = min(first if prompt_end > first else now(first), session.due_from)
        if message.prompt_logprobs is not None and prompt_end > first:
            seen_from = now(first)
        request = Request(
            id=message.request,
            first=first,
            prompt_end=prompt_end,
            max_tokens=message.max_tokens,
            sampling=message.sampling,
            stop_tokens=frozenset(message.stop_tokens),
            logprobs=message.logprobs,
            prompt_logprobs=message.prompt_logprobs,
            logits=message.logits,
            capture=tuple(message.capture),
            seen_from=seen_from,
            stops=tuple(message.stops),
            resume_block=message.resume_block,
            may_guess=self._may_guess(message, session),
            expected_tokens=message.expected_tokens,
            deadline=message.deadline or math.inf,
            between_tokens=_target(message.between_tokens),
            first_token=_target(message.first_token),
        )
        assert not (message.logits and message.max_tokens), "a forward pass generates nothing"
        in_parts = message.stops or message.resume_block is not None
        assert not (in_parts and (message.logits or message.capture)), (
            "a run with breakpoints captures there, and nothing else"
        )
        self._scheduler.submit(session.id, request, message.tokens)
        self._tiers.called(session.id)
        try:
            try:
                self._make_room(session, request)
            except OutOfMemory:
                self._spare_idle()
                self._make_room(session, request)
            if message.grammar is not None:
                self.guidance.begin(session, request, message, self._runners[session.model].model.vocab)
        except DjinnError:
            self._scheduler.rollback(request.id)
            self.deliveries.drop(request)
            self._runners[session.model].adapters.let_go(request.id)
            raise
        self._stop_captures.expect(request)
        self.under_way[request.id] = session
        self._waiting.add(request.id)

    def _may_guess(self, message: messages.Run, session: Session) -> bool:
        """True if steps may run guesses of the Run's next tokens: the model's load allows it, it keeps no states, which
        cannot be taken back, and nothing about the Run depends on the tokens of one step or on the tokens before."""
        runner = self._runners[session.model]
        if not (runner.speculates and message.max_tokens) or session.edits:
            return False
        looks_inside = message.capture or message.stops or message.resume_block is not None
        return not (looks_inside or message.prompt_logprobs is not None or is_penalised(message.sampling))

    def _make_room(self, session: Session, request: Request) -> None:
        """Reserves memory for the session's adapter and edits, and the request's captures and logits. Raises
        AdapterNotFound, OutOfMemory."""
        runner = self._runners[session.model]
        runner.adapters.use(request.id, session.adapter)
        runner.probes.use_edits(session.id, session.edits)
        if request.capture:
            self.deliveries.open(session, request, runner)
        if request.logits:
            try:
                runner.open_window(request)
            except OSError as error:
                raise OutOfMemory(f"the host has no memory for the logits: {error}") from error

    def _compute_kv(self, number: int, session: Session) -> None:
        """Submits a request that computes the session's missing KV and generates no token."""
        length = len(session.tokens)
        runner = self._runners[session.model]
        runner.probes.use_edits(session.id, session.edits)
        runner.adapters.use(number, session.adapter)
        self._scheduler.submit(session.id, Request(number, first=length, prompt_end=length, max_tokens=0), [])
        self.under_way[number] = session

    def note_started(self, batch: Batch) -> list[messages.Started]:
        """Started messages for the requests with their first row in this batch."""
        if not self._waiting:
            return []
        now = time.monotonic()
        rows = [row for row in batch.rows if row.request.id in self._waiting]
        started = [messages.Started(row.request.id, now, row.session.woken) for row in rows]
        for row in rows:
            self._waiting.remove(row.request.id)
            row.session.woken = False
        return started

    def fail_unseen(self, batch: Batch) -> bool:
        """Fails requests that stop in this batch if the device has no room for the activations there. → True if
        there were any."""
        refused = self._stop_captures.capture(batch)
        if refused:
            self._spare_idle()
            refused = self._stop_captures.capture(batch)
        for request, error in refused:
            self.fail(request, error)
        return bool(refused)

    # --- requests end -------------------------------------------------------------------------------------------------

    def finish(self, request: Request | None) -> None:
        """Sends the final reply of a request that the scheduler has ended. None: it has had its reply."""
        if request is None:
            return
        session = self._forget(request)
        length = len(session.tokens)
        window = self._runners[session.model].forget(request)
        if self.kv_transfers.filled(request.id, _cancelled(request)):
            return
        if window is None or request.finish_reason == "cancelled":
            assert request.finish_reason is not None
            generated = length - request.prompt_end
            reply = messages.Finished(request.id, request.finish_reason, length, generated, request.computed)
            reply.guessed, reply.kept = request.guessed, request.kept
            reply.stopped = self._stopped(session, request)
            if reply.stopped is not None or (request.capture and request.finish_reason != "cancelled"):
                self.deliveries.ended(request, reply)
                return
            self.deliveries.drop(request)
            self._channel.send(reply)
        else:
            told = messages.LogitsReady(request.id, window.tokens, window.vocab)
            self._channel.send(told, [window.fd])
        if window is not None:
            window.close()

    def _stopped(self, session: Session, request: Request) -> int | None:
        """The block before which the request has stopped, or None. If its rows are not parked there, the stage is
        dropped, and the session recomputes them when it continues."""
        if request.stopped is None:
            return None
        if request.stopped.block and not self._runners[session.model].probes.parked.holds(session):
            self._scheduler.drop_stage(session.id)
        return request.stopped.block

    def _fail_delivery(self, session: Session, request: Request, error: DjinnError) -> None:
        """Fails a request whose captures cannot be delivered."""
        if request.id in self.under_way:
            self.fail(request, error)
            return
        if session in self._scheduler.sessions():  # the session is idle until the request has its reply
            self._scheduler.truncate(session.id, request.first)
        self._channel.refuse(request.id, error)

    def fail(self, request: Request, error: DjinnError) -> None:
        """Replies with the error; the session is as it was before the request."""
        self._scheduler.rollback(request.id)
        session = self._forget(request)
        self.deliveries.drop(request)
        window = self._runners[session.model].forget(request)
        if window is not None:
            window.close()
        if not self.kv_transfers.filled(request.id, error):
            self._channel.refuse(request.id, error)

    def _forget(self, request: Request) -> Session:
        self._waiting.discard(request.id)
        self._stop_captures.forget(request)
        self.guidance.forget(request)
        session = self.under_way.pop(request.id)
        self._runners[session.model].adapters.let_go(request.id)
        return session


def _cancelled(request: Request) -> DjinnError | None:
    return Cancelled("the request was cancelled") if request.finish_reason == "cancelled" else None


def _target(seconds: float | None) -> float | None:
    return math.inf if seconds == 0.0 else seconds
