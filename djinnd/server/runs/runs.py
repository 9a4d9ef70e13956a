"""Runs: the server's side of the work that an engine does for one call on a session.

`done` gets the final answer or the error. The session's tokens then equal the engine's: the tokens that the run left,
or, after a failure, the tokens before the run. If the engine is lost, `done` raises Interrupted, the session keeps its
tokens, and the run can be submitted to the next engine: see failover.py.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import Literal

from djinn_client.errors import Cancelled, DjinnError
from djinn_client.protocol import CLASSES, Forward, Logits, Sampling, Timings
from djinn_client.protocol.fields.breakpoints import HitInfo
from djinnd.core.edits import FOREVER
from djinnd.messages import CancelRun, Finished, Hold, LogitsReady, Truncate
from djinnd.server.engines.blame import RunProgress, Suspect
from djinnd.server.engines.engine_client import EngineClient, EngineRun
from djinnd.server.quotas.queueing import QueuePlace
from djinnd.server.sessions.session import SessionRecord
from djinnd.server.wire.call import ClientCall, FinalReply

RunState = Literal["queued", "running", "held"]


class Interrupted(Exception):
    """The engine was lost before it had ended the run."""

    def __init__(self, error: DjinnError) -> None:
        super().__init__(error.message)
        self.error = error


class SessionRun(EngineRun):
    """The common part of all kinds of runs. A run is made in the same turn of the loop that finds the engine, so the
    engine lives. `proven` is done when the engine has given a token."""

    done: asyncio.Future[FinalReply]
    proven: asyncio.Future[None]

    def __init__(self, call: ClientCall, session: SessionRecord) -> None:
        self.deaths = 0  # of engines for which this run may be to blame
        self.is_cancelled = False
        self._call = call
        self._session = session
        self._session.called(call.received)
        self._was_due_from = session.due_from
        self._was_at = session.breakpoints.hit
        self._engine: EngineClient
        self._number = 0  # of the engine's request; 0: no engine has it
        self._first = len(session.tokens)
        self._started = False
        self._held = False
        self._is_new = True  # no engine has had it
        self._is_proven = False

    def submit(self, engine: EngineClient) -> None:
        """Sends the run to an engine: the first one, or the next one after a loss, which has the session open with all
        its tokens."""
        loop = asyncio.get_running_loop()
        is_new, self._is_new = self._is_new, False
        self.done = loop.create_future()
        self._engine = engine
        self._session.due_from = FOREVER
        if not is_new:  # it was opened before a text worker had found the stop string
            engine.send(Truncate(self._session.id, len(self._session.tokens)))
        self._number = self._send(engine, is_new)
        if is_new:
            self._send_off()
        self.proven = loop.create_future()
        if self._held:
            engine.send(Hold(self._number, True))

    def _send(self, engine: EngineClient, is_new: bool) -> int:
        """Sends the run and returns its number in the engine. Unless `is_new`, the engine's session has the run's
        tokens already."""
        raise NotImplementedError

    @property
    def session(self) -> SessionRecord:
        return self._session

    @property
    def state(self) -> RunState:
        if self._held:
            return "held"
        return "running" if self._started else "queued"

    @property
    def progress(self) -> RunProgress:
        if self._held or self._session.is_paused:
            return RunProgress.WAITS
        return RunProgress.PROVEN if self._is_proven else RunProgress.UNPROVEN

    @property
    def suspect(self) -> Suspect:
        return Suspect(self._session.model, self._session.user)

    @property
    def is_urgent(self) -> bool:
        return self._session.priority == CLASSES[0]

    def tell(self) -> None:
        self._session.journal.write_now()
        self._call.flush()

    def cancel(self) -> None:
        """Cancels the run. The engine's final word comes within a step; without an engine, the call ends at once."""
        self.is_cancelled = True
        if self._number:
            self._engine.send(CancelRun(self._number))
        else:
            self._call.task.cancel()

    def hold(self, held: bool) -> None:
        self._held = held
        self._session.latency.interrupted()
        if self._number:
            self._engine.send(Hold(self._number, held))

    def started(self, at: float, woken: bool) -> None:
        self._started = True
        self._session.latency.started(at, woken, self._session.priority)

    def failed(self, error: DjinnError) -> None:
        """Receives the engine's error. The engine has rolled the session back, to its hit if it was at one."""
        self._roll_back()
        self.done.set_exception(error)

    def lost(self, error: DjinnError, blamed: bool) -> None:
        """Notes that the engine was lost. `blamed`: this run may be the cause."""
        self.deaths += blamed
        self._number, self._started, self._is_proven = 0, False, False
        self._session.due_from = self._was_due_from
        self.done.set_exception(Interrupted(error))
        self.done.exception()  # its caller may have been cancelled

    def completed(self, context: int) -> FinalReply | None:
        """The final answer of a run that only lacked the last word of an engine that was lost. `context`: the most
        tokens that the session may have."""
        return None

    def cut_short(self) -> FinalReply | None:
        """Ends a run that is cancelled while no engine has it. None: it has no result."""
        self.give_up()
        return None

    def give_up(self) -> None:
        """Ends a run that no engine will run. The session keeps the tokens that the client has received, or is as it
        was before the call."""
        self._roll_back()

    def _roll_back(self) -> None:
        self._session.cut(self._first)
        self._session.breakpoints.hit, self._session.due_from = self._was_at, self._was_due_from

    def _send_off(self) -> None:
        """Sends the run to the engine at once instead of at the end of this turn of the loop, unless other calls are
        waiting: calls that come together should share a step."""
        if self._call.client.unfinished <= self._engine.runs:
            self._engine.flush()

    def _extend(self, tokens: Sequence[int]) -> None:
        """Extends the session by the run's tokens."""
        self._session.tokens.extend(tokens)
        self._session.breakpoints.hit = None
        self._session.tenant.charge(len(tokens), time.monotonic())

    def _ended_at(self, hit: HitInfo | None) -> None:
        """Records the hit at which the run has ended, or that it ended at none. Called before `session.changed`."""
        if hit is not None or self._was_at is not None:
            self._session.stopped(hit)

    def _undo(self, error: DjinnError) -> None:
        """Undoes a run that has ended in the engine."""
        self._engine.send(Truncate(self._session.id, self._first))
        self.failed(error)


class ForwardRun(SessionRun):
    """The run of a Forward. If it is cancelled, the session is unchanged."""

    def __init__(
        self, call: ClientCall, session: SessionRecord, engine: EngineClient, place: QueuePlace, request: Forward
    ) -> None:
        super().__init__(call, session)
        self._place = place
        self._request = request
        self._started_at = call.received
        self._extend(request.token_ids)
        self.submit(engine)

    def _send(self, engine: EngineClient, is_new: bool) -> int:
        return engine.run(
            self,
            session=self._session.id,
            tokens=self._request.token_ids if is_new else [],
            max_tokens=0,
            sampling=Sampling(seed=0),
            logits=True,
            first=None if is_new else self._first,
        )

    def started(self, at: float, woken: bool) -> None:
        super().started(at, woken)
        self._place.started(at)
        self._started_at = at

    def finished(self, message: Finished) -> None:
        self._undo(Cancelled("the request was cancelled"))

    def logits(self, message: LogitsReady, fd: int) -> None:
        received = self._call.received
        total = time.monotonic() - received
        timings = Timings(max(0.0, self._started_at - received), first_token=total, total=total)
        reply = Logits(id=self._call.id, tokens=message.tokens, vocab=message.vocab, timings=timings)
        self._ended_at(None)
        self._session.changed()
        self.done.set_result(FinalReply(reply, [fd]))
