"""Applies the results of a step to its rows' sessions: KV, the next token, or a stage if they stop inside the model."""

from __future__ import annotations

from collections.abc import Sequence

from djinn_client.protocol import FinishReason
from djinnd.core.batch import LATE, Row
from djinnd.core.request import Request
from djinnd.core.session import Session
from djinnd.core.stops import Stage, Stop
from djinnd.scheduler.model_queue import ModelQueue


class StepResults:
    """Applies the results of one step of a model."""

    def __init__(self, queue: ModelQueue) -> None:
        self._queue = queue
        self._advance = queue.residency.advance
        self._limits: dict[int, int] = {}  # longest session in tokens, by tenant

    def apply(self, row: Row, token: int | None, further: Sequence[int] = ()) -> FinishReason | None:
        """Applies one row. `token` is the token that the step sampled for it, if it samples and its logits were finite.
        `further` are the tokens after it, if the row's guess was right. Returns the reason for which its request ends
        with this, if it does.

        A row has no effect if its request has ended while the step ran, or if it continued a stage that is lost.
        """
        session, request = row.session, row.request
        if session.request is not request or session.stage is not row.stage:
            return None
        tokens, end = session.tokens, row.end - len(row.guess)
        is_late = token == LATE
        if is_late:
            end, token = end - 1, None
            request.may_guess = request.may_guess and not row.guess
        if len(tokens) == request.prompt_end:
            request.computed += end - row.start
        if row.stage is not None:
            row.stage.done = end
            if row.stage.last <= self._queue.num_blocks:
                return self._stopped(session, request, row.stage)
            if session.remaining == 0:
                session.stage = None
                self._queue.kv.set_state(session.id, end)
        if row.guess:
            end += self._keep(session, request, row, token, further)
        self._advance(session, end)
        if request.seen_from < end:
            request.seen_from = end
        if token is None:
            if row.samples:
                return None if is_late else "not_finite"
            return "length" if request.max_tokens == 0 and session.remaining == 0 else None
        return self.append(session, request, further[-1] if further else token)

    def _keep(self, session: Session, request: Request, row: Row, token: int | None, further: Sequence[int]) -> int:
        """Appends the sampled tokens that the row's guess has. Returns how many: their KV is that of the session. No
        request ends with one of them, see `with_guesses`."""
        request.guessed += len(row.guess)
        if token is None or not further:
            return 0
        request.kept += len(further)
        session.tokens += row.guess[: len(further)]
        return len(further)

    def append(self, session: Session, request: Request, token: int) -> FinishReason | None:
        """Appends a token to the session. Returns the reason for which its request ends with this, if it does."""
        tokens = session.tokens
        tokens.append(token)
        session.given = session.touched
        if token in request.stop_tokens:
            return "stop"
        limit = self._limits.get(session.tenant)
        if limit is None:
            limit = self._limits[session.tenant] = self._queue.limit_of(session.tenant)
        length = len(tokens)
        return "length" if length - request.prompt_end == request.max_tokens or length >= limit else None

    def _stopped(self, session: Session, request: Request, stage: Stage) -> FinishReason | None:
        """Notes that the row has reached the block before which its stage stops. The request ends when all positions
        have reached it."""
        if session.remaining:
            return None
        request.stopped = Stop(stage.last, session.computed)
        stage.first, stage.last, stage.done = stage.last, self._queue.num_blocks + 1, session.computed
        return "breakpoint"
