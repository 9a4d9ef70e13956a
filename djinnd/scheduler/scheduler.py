"""The scheduler composes the batch of each step and applies the results of the step.

It owns the sessions and the requests in progress, and a `ModelQueue` for each model. A step is

    tick ──► next_batch ──► kv.pool.take_stale, zero those pages, run the rows ──► complete

The scheduler reads no clock: `tick` sets the time of the events that follow. Any event may come between these calls.
`complete` ignores a row whose request has ended meanwhile. A batch that is never completed has no effect on tokens or
KV: the next batch runs its tokens again.

`follow` composes the next batch before the running one completes. While two batches run, only events may come that
change no session with a row: see djinnd/engine/steps.py.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence

from djinn_client.errors import SessionNotFound
from djinn_client.protocol import CLASSES, Class, FinishReason
from djinn_client.protocol.fields.points import Point
from djinnd.core.batch import Batch, Row
from djinnd.core.edits import FOREVER, Edit, ended
from djinnd.core.request import Request, RequestState
from djinnd.core.session import Session
from djinnd.core.stops import next_stop
from djinnd.kvcache.manager import KvManager, PageCopy
from djinnd.kvcache.moves import Transfer
from djinnd.kvcache.paging import Paging
from djinnd.scheduler.apply_step import StepResults
from djinnd.scheduler.model_queue import ModelQueue
from djinnd.scheduler.policy import DEFAULT, Policy
from djinnd.scheduler.turns.device_quotas import DeviceQuotas
from djinnd.scheduler.turns.shares import Shares
from djinnd.scheduler.why import Explanation

NO_FURTHER: Mapping[int, Sequence[int]] = {}


class Scheduler:
    def __init__(self, max_batch_tokens: int, max_rows: int, policy: Policy = DEFAULT) -> None:
        """`max_batch_tokens` and `max_rows` limit one batch."""
        assert max_batch_tokens > 0 and max_rows > 0
        self.max_batch_tokens = max_batch_tokens
        self.max_rows = max_rows
        self.policy = policy
        self._now = 0.0
        self.shares = Shares()
        self._quotas = DeviceQuotas()
        self.queues: dict[str, ModelQueue] = {}  # by model; only this class adds and removes
        self._sessions: dict[str, Session] = {}
        self._in_progress: dict[int, tuple[Session, Request]] = {}  # by request id
        self._step = 0
        self._followed = 0  # number of the step before it, if the last one was composed by `follow`
        self._completed = 0  # number of the last step that completed
        self._ran: tuple[Row, ...] = ()  # the rows of that step
        self.next_wake = math.inf  # earliest time at which a waiting session is expected back

    def tick(self, now: float) -> None:
        """Sets the time of the events that follow, in seconds on a clock that never goes back."""
        assert now >= self._now
        self._now = now

    # --- models and sessions ----------------------------------------------------------------------------------------

    def add_model(
        self, name: str, kv: KvManager, max_context: int, num_blocks: int, paging: Paging | None = None
    ) -> None:
        """`max_context` is in tokens, and at most the KV manager's. `paging` moves the manager's pages to lower tiers,
        if there are any."""
        assert name not in self.queues
        paging = paging or Paging(kv)
        queue = ModelQueue(name, paging, max_context, num_blocks, self.shares, self._quotas, self.policy)
        self.queues[name] = queue
        self._quotas.add(queue)

    def remove_model(self, name: str) -> None:
        count = len(self.queues[name].sessions)
        assert count == 0, f"model {name} is removed while {count} sessions use it"
        self._quotas.remove(self.queues.pop(name).kv)

    def secure(self, session_id: str) -> bool:
        """Reserves pages for all tokens of an idle session: see ModelQueue.secure, also for the errors. Raises
        SessionNotFound."""
        session = self.session(session_id)
        return self.queues[session.model].secure(session)

    def open(self, session: Session) -> None:
        """Adds a session. A session that already has tokens comes from an earlier engine process; its KV is computed
        again when it next runs."""
        assert session.id not in self._sessions and session.request is None and session.computed == 0
        self.queues[session.model].sessions[session.id] = session
        self._sessions[session.id] = session

    def fork(self, parent_id: str, child_id: str, priority: Class) -> PageCopy | None:
        """Opens a session with the tokens and the KV of `parent_id`, which must be idle. Returns the copy of a page
        that has to be made before the next step, if there is one. Raises SessionNotFound."""
        parent = self.session(parent_id)
        assert parent.request is None, f"session {parent_id} is forked while request {parent.request.id} runs"
        child = Session(child_id, parent.model, parent.tenant, priority, list(parent.tokens))
        child.touched, child.given = parent.touched, parent.given
        child.salt, child.foreign_tokens = parent.salt, parent.foreign_tokens
        child.adapter = parent.adapter
        child.edits, child.due_from = parent.edits, parent.due_from
        self.open(child)
        residency = self.queues[parent.model].residency
        if residency.is_arriving(parent):
            residency.revise(parent, len(parent.tokens))
        child.left_at = parent.left_at
        kv = self.queues[child.model].kv
        may_copy = self._quotas.has_room(child.tenant, kv) or child.foreign_tokens > 0
        # its last page cannot be recomputed, so the last token runs again on a copy of that page
        ends_foreign = child.foreign_tokens == len(child.tokens) > 0
        child.computed, copy = kv.fork(
            parent_id, child_id, child.tenant, parent.computed, may_copy=may_copy, runs_last_again=ends_foreign
        )
        return copy

    def session(self, session_id: str) -> Session:
        """Raises SessionNotFound."""
        session = self._sessions.get(session_id)
        if session is None:
            raise SessionNotFound(f"there is no session {session_id}: open a new one", session=session_id)
        return session

    def sessions(self) -> Iterable[Session]:
        return self._sessions.values()

    def close(self, session_id: str) -> Request | None:
        """Removes the session. Returns its request if one was in progress and is now cancelled. Raises
        SessionNotFound."""
        session = self.session(session_id)
        request = self._finish(session, "cancelled") if session.request else None
        queue = self.queues[session.model]
        queue.residency.close(session)
        queue.batch_builder.guesses.close(session)
        del queue.sessions[session_id], self._sessions[session_id]
        return request

    def truncate(self, session_id: str, length: int) -> None:
        """Cuts an idle session to `length` tokens; a shorter one stays as it is. Raises SessionNotFound."""
        session = self.session(session_id)
        assert session.request is None, f"session {session_id} is truncated while request {session.request.id} runs"
        if length < len(session.tokens):
            session.truncate(length)
            self.queues[session.model].revise(session, length)

    def edit(self, session_id: str, edit: Edit) -> None:
        """Adds an edit to an idle session. The positions that it changes are recomputed when the session next runs.
        Raises SessionNotFound."""
        session = self.session(session_id)
        assert session.request is None, f"session {session_id} is edited while request {session.request.id} runs"
        session.edits = (*session.edits, edit)
        self._revise(session, edit.first, edit.points)

    def end_edits(self, session_id: str, numbers: Collection[int], at: int) -> None:
        """Ends the edits with these numbers in an idle session: from position `at` on, they change nothing. Raises
        SessionNotFound."""
        session = self.session(session_id)
        assert session.request is None, f"session {session_id} is edited while request {session.request.id} runs"
        changed = [
            edit for edit in session.edits if edit.number in numbers and any(each.end > at for each in edit.extents)
        ]
        session.edits = ended(session.edits, numbers, at)
        if changed:
            self._revise(session, at, {point for edit in changed for point in edit.points})

    def drop_stage(self, session_id: str) -> None:
        """Called between steps. Drops the session's stage: its positions run again from the first block when the
        session next runs, and stop at the same breakpoint. No effect if the session has no stage or is closed."""
        session = self._sessions.get(session_id)
        if session is not None:
            self.queues[session.model].drop_stage(session)

    def _revise(self, session: Session, first: int, points: Iterable[Point]) -> None:
        """Takes back the KV from position `first` on, because edits at `points` have changed it.

        A stage is kept if all of these points are still ahead of its positions, and if no position before the stage has
        changed.
        """
        stage, computed = session.stage, session.computed
        if session.left_stage is not None:
            stage, computed, _ = session.left_stage
        if stage is not None and first < len(session.tokens) and (first < computed or not stage.stands(points)):
            session.lose_stage()
        session.due_from = min(session.due_from, first)
        session.foreign_tokens = min(session.foreign_tokens, first)
        self.queues[session.model].revise(session, first)

    def set_class(self, session_id: str, priority: Class) -> None:
        """Sets the class of a session and of its request. No effect if the session is closed."""
        session = self._sessions.get(session_id)
        if session is not None and session.priority != priority:
            self.queues[session.model].set_class(session, priority)

    def why(self, session_id: str) -> Explanation:
        """Explains why the session runs or what it waits for. Raises SessionNotFound."""
        session = self.session(session_id)
        return self.queues[session.model].why(session, self._now)

    def set_policy(self, policy: Policy) -> None:
        self.policy = policy
        for queue in self.queues.values():
            queue.batch_builder.set_policy(policy)

    def set_tenant(self, tenant: int, weight: float, device_kv: int | None) -> None:
        """`weight` sets the tenant's share of device time within each class. `device_kv` is the number of bytes of
        pages that it may hold on the device; None means any number."""
        self.shares.set_weight(tenant, weight)
        self._quotas.set(tenant, device_kv)

    # --- requests ---------------------------------------------------------------------------------------------------

    def submit(self, session_id: str, request: Request, new_tokens: Sequence[int]) -> None:
        """Appends `new_tokens` to the session, which must be idle, and queues the request.

        Raises SessionNotFound, PromptTooLong, OutOfMemory or QuotaExceeded, and has then changed nothing.
        """
        session = self.session(session_id)
        length = len(session.tokens) + len(new_tokens)
        assert session.request is None and request.id not in self._in_progress
        assert request.state is RequestState.QUEUED
        assert request.first <= request.prompt_end <= length, "its prompt, and what an earlier engine has generated"
        wants = new_tokens or (session.tokens and (request.max_tokens or request.capture)) or session.remaining
        assert wants, f"request {request.id} has nothing to run"
        queue = self.queues[session.model]
        queue.check_fits(session.tenant, length + min(1, request.max_tokens))
        if request.resume_block is not None:
            assert not new_tokens, f"request {request.id} resumes at a breakpoint and has a prompt"
            assert all(stop.block > request.resume_block or stop.position >= length for stop in request.stops), (
                f"request {request.id} would stop again where the last one stopped"
            )
        if session.stage is not None and session.stage.first != request.resume_block:
            queue.residency.rewind(session, session.computed)
        session.tokens.extend(new_tokens)
        # The last token is always run again: the next token is sampled from its logits.
        again = min(length - 1, request.seen_from)
        if (stop := next_stop(request.stops, length)) is not None:
            again = min(again, stop.position)
        left = session.left_stage
        if left is not None and (left.stage.first != request.resume_block or left.computed > again):
            queue.residency.lower_tiers.lose_stage(session)
        if session.computed > again:
            queue.residency.rewind(session, again)
        if again < request.first:
            session.foreign_tokens = min(session.foreign_tokens, again)
        session.request = request
        self._in_progress[request.id] = (session, request)
        queue.join(session, self._now)

    def cancel(self, request_id: int) -> Request | None:
        """Ends the request as cancelled; its session keeps all tokens. Returns None if the request has already
        ended."""
        if request_id not in self._in_progress:
            return None
        return self._finish(self._in_progress[request_id][0], "cancelled")

    def halt(self, request_id: int, keep: int) -> Request | None:
        """Ends the request as stopped; its session keeps its first `keep` generated tokens. Returns None if the request
        has already ended."""
        if request_id not in self._in_progress:
            return None
        session, request = self._in_progress[request_id]
        assert keep >= 0
        session.truncate(request.prompt_end + keep)
        return self._finish(session, "stop")

    def rollback(self, request_id: int) -> Request | None:
        """Ends a request after its step failed. The session keeps its tokens from before the request. Returns None if
        the request has already ended."""
        if request_id not in self._in_progress:
            return None
        session, request = self._in_progress[request_id]
        session.truncate(request.first)
        return self._finish(session, None)

    def hold(self, request_id: int, holder: str = "client") -> None:
        """Gives the request no row until each of its holders has released it. No effect if it has ended."""
        if request_id in self._in_progress:
            session, request = self._in_progress[request_id]
            request.holders.add(holder)
            if request.runnable:
                request.move("hold")
                self.queues[session.model].hold(session)

    def release(self, request_id: int, holder: str = "client") -> None:
        """Removes a holder. A request without holders joins the queue again, behind the others. No effect if it is not
        held."""
        if request_id in self._in_progress:
            session, request = self._in_progress[request_id]
            request.holders.discard(holder)
            if not request.runnable and not request.holders:
                request.move("release")
                self.queues[session.model].release(session, self._now)

    def force(self, request_id: int, tokens: Sequence[int]) -> tuple[list[int], Request | None]:
        """Called between steps. Appends tokens that the request's output must continue with, as if steps had sampled
        them; the model runs them in one chunk.

        Returns the appended tokens and, if the request ends with them, the request. Appends none while the session is
        not active or its pages are moving.
        """
        session, request = self._in_progress[request_id]
        queue = self.queues[session.model]
        if session.id not in queue.active or queue.residency.is_moving(session):
            return [], None
        appended: list[int] = []
        for token in tokens:
            appended.append(token)
            reason = StepResults(queue).append(session, request, token)
            if reason is not None:
                return appended, self._finish(session, reason)
        return appended, None

    # --- where pages are --------------------------------------------------------------------------------------------

    def wait(self, session_id: str, until: float = 0.0) -> None:
        """Notes that the session's client waits for something else, expected until time `until` (0: unknown). If a
        request runs, the wait begins when it ends. No effect if the session is closed."""
        session = self._sessions.get(session_id)
        if session is not None:
            session.wakes_at = until
            self.queues[session.model].wait(session)
            if until and session.request is None:
                self.next_wake = min(self.next_wake, until)

    def expect(self, session_id: str, until: float) -> None:
        """Sets when a waiting session is expected back, if that was unknown, so that the host
        can tell which pages it will need first.

        The pages still come back only when the session asks: the time has been learned late, and may have passed
        already for many sessions at once. No effect on a session that does not wait or has a time.
        """
        session = self._sessions.get(session_id)
        if session is not None and session.waits and not session.wakes_at:
            self.queues[session.model].residency.expect(session, until)

    def wake(self, session_id: str) -> None:
        """Notes that the session's client is about to send a request."""
        session = self._sessions.get(session_id)
        if session is not None:
            self.queues[session.model].wake(session)

    def pause(self, session_id: str) -> Transfer | None:
        """Gives the session no row until `resume`, and moves its pages off the device. While a step runs, call this
        only for a session without a request. Returns the transfer after which its pages can be found on the host, if
        there is one. Raises SessionNotFound."""
        session = self.session(session_id)
        return self.queues[session.model].pause(session)

    def resume(self, session_id: str) -> None:
        """Ends a pause. No effect if the session is closed or not paused."""
        session = self._sessions.get(session_id)
        if session is not None and session.paused:
            self.queues[session.model].resume(session, self._now)

    def tend(self, now: float) -> None:
        """Does the periodic work; called a few times a second, also while a step runs. `now` is in seconds."""
        for queue in self.queues.values():
            queue.tend(now)
        self.next_wake = min((s.wakes_at for s in self._sessions.values() if _is_expected(s)), default=math.inf)

    def depart(self) -> bool:
        """Lets one idle session of each model leave the device, if it was marked to leave and the host has room for its
        pages. May be called while a step runs. Returns True if more sessions are marked."""
        more = [queue.residency.depart() for queue in self.queues.values()]
        return any(more)

    @property
    def nobody_waits(self) -> bool:
        """True if every active session had a row in the last step, and no session waits for room before it can
        come back."""
        ran = {row.session.id for row in self._ran}
        return all(queue.active.keys() <= ran and not queue.awaited for queue in self.queues.values())

    def _finish(self, session: Session, reason: FinishReason | None) -> Request:
        request = session.request
        assert request is not None
        request.move("finish")
        request.finish_reason = reason
        session.request = None
        if reason is not None:
            session.due_from = FOREVER if request.stopped is None else request.stopped.position
        if reason != "breakpoint":
            session.stage = None
        self.queues[session.model].leave(session)
        del self._in_progress[request.id]
        return request

    # --- the step ---------------------------------------------------------------------------------------------------

    def next_batch(self) -> Batch | None:
        """Composes the next step from the sessions of one model: the most urgent model that has rows. Returns None if
        nothing can run now."""
        builders = {name: queue.batch_builder for name, queue in self.queues.items()}
        for priority in CLASSES:
            self.shares.catch_up(priority, set().union(*[some.tenants(priority) for some in builders.values()]))
        urgencies = [(urgency, name) for name, some in builders.items() if (urgency := some.urgency(self._now))]
        for _, name in sorted(urgencies):
            rows = builders[name].compose(self._step + 1, self.max_batch_tokens, self.max_rows, self._now)
            if rows:
                self._followed = 0
                self._step += 1
                return Batch(name, rows, self._step, builders[name].room)
        return None

    def follow(self, batch: Batch) -> Batch | None:
        """Composes the step after `batch`, which is the last one composed and still runs: each session with a row gets
        the next one, with the token that `batch` samples for it. None if the next step may be another: some session
        waits for a row, or a row needs more than its next token."""
        assert self._completed < batch.step == self._step
        if sum([len(queue.active) for queue in self.queues.values()]) != len(batch.rows):
            return None
        rows = self.queues[batch.model].batch_builder.follow(batch.rows, self._step + 1, self._now)
        if not rows:
            return None
        self._followed = self._step
        self._step += 1
        return Batch(batch.model, rows, self._step)

    def complete(
        self,
        batch: Batch,
        next_tokens: Sequence[int | None],
        seconds: float = 0.0,
        further: Mapping[int, Sequence[int]] = NO_FURTHER,
    ) -> list[Request]:
        """Applies the results of a step and returns the requests that it ended.

        Batches complete in the order in which they were composed. `next_tokens` has one token for each of the batch's
        rows that samples, in order, or None if none could be sampled. `further` has the tokens after these, by index in
        `next_tokens`, where guesses were right. `seconds` is the step's time on the device (0: see BatchBuilder.ran).
        """
        in_order = batch.step in (self._step, self._followed)
        assert in_order, f"step {batch.step} completes after step {self._step} was composed"
        sampling = sum([row.samples for row in batch.rows])
        assert len(next_tokens) == sampling, f"{len(next_tokens)} tokens for {sampling} rows that sample"
        assert batch.step > self._completed, f"step {batch.step} completes twice"
        self._completed, self._ran = batch.step, batch.rows
        queue = self.queues.get(batch.model)
        if queue is None:  # the model was unloaded while the step ran, so all requests of the step have ended
            return []
        queue.batch_builder.ran(batch.rows, seconds)
        tokens = iter(enumerate(next_tokens))
        apply = StepResults(queue).apply
        finished = []
        for row in batch.rows:
            index, token = next(tokens) if row.samples else (-1, None)
            reason = apply(row, token, further.get(index, ()))
            if reason is not None:
                finished.append(self._finish(row.session, reason))
        return finished

    def check_integrity(self) -> None:
        """Asserts that sessions, requests, queues, block tables and pools agree."""
        sessions = {id: session for queue in self.queues.values() for id, session in queue.sessions.items()}
        assert sessions == self._sessions, f"{sorted(sessions.keys() ^ self._sessions.keys())} are not in their queue"
        busy = {session.request.id: (session, session.request) for session in sessions.values() if session.request}
        assert busy == self._in_progress, f"requests {sorted(busy)} are in progress, not {sorted(self._in_progress)}"
        for queue in self.queues.values():
            queue.check_integrity()


def _is_expected(session: Session) -> bool:
    return session.waits and session.wakes_at > 0 and session.request is None and not session.paused
