"""The guesses of one model's sessions from the head of its checkpoint.

    step of the target ─► hidden states ─► a session has many tokens to run: at once, for their KV
                                     └───► few, or the next one is not known: kept
    batch without guesses ─► first pass: tokens with kept hidden states ─► further passes ─► batch with guesses

The head runs behind its target in the same order of the device. The host waits for guesses only.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from djinnd.core.batch import Row
from djinnd.core.drafted import Drafted
from djinnd.core.guesser import Record
from djinnd.core.headed import Headed
from djinnd.core.session import Session
from djinnd.core.tuning import HEADS
from djinnd.engine.drafts.draft_passes import DraftPasses
from djinnd.engine.drafts.drafter import Drafter
from djinnd.engine.drafts.head_passes import HeadPasses
from djinnd.engine.run.model_runner import ModelRunner
from djinnd.scheduler.batch.batch_builder import BatchBuilder


class Seen(NamedTuple):
    """A row of the target's last step. The head guesses for its session."""

    row: Row
    headed: Headed


class HeadDrafter(Drafter):
    """`draft` is the head. Sees every step of the target until `release`."""

    def __init__(self, draft: ModelRunner, target: ModelRunner, builder: BatchBuilder) -> None:
        super().__init__(draft, target.model.vocab, builder)
        assert draft.hidden is not None
        self._hidden = draft.hidden
        self._target = target
        self._norm = target.model.adapter.model.get_submodule(target.model.skeleton.points.norm)
        self._begin_step()
        target.passes.behind = self._note_step

    def launched(self) -> None:
        """Runs what can be run at once, and keeps the other hidden states."""
        seen, error = self._seen, self._error
        self._begin_step()
        if error is not None:
            raise error
        if not seen:
            return
        self._note_losses()
        self._run_at_once([one for one in seen if one.headed.runnable >= HEADS.at_once])
        with self.draft.device.computing():
            self._keep([one.headed for one in seen])

    def failed(self) -> None:
        for one in self._seen:
            one.headed.skip()
        self._begin_step()

    def close(self, session_id: str) -> None:
        session = self._sessions.get(session_id)
        if session is not None and isinstance(session.drafted, Headed):
            session.drafted.close()
        super().close(session_id)

    def release(self) -> None:
        self._target.passes.behind = None
        super().release()

    def _make_passes(self, vocab: int) -> DraftPasses:
        self._reading = HeadPasses(self.draft, vocab, self._pages)
        return self._reading

    def _begin_with(self, session: Session, record: Record) -> Drafted:
        return Headed(session.tokens, record, self._hidden.give_back)

    def _begin_step(self) -> None:
        """The next step of the target is launched after this."""
        self._seen: list[Seen] = []  # its rows
        self._tokens = 0  # of its passes that have been launched
        self._error: Exception | None = None  # of the head, within the step

    # --- a step of the target -----------------------------------------------------------------------------------------

    def _note_step(self, rows: Sequence[Row], hidden: Tensor) -> None:
        """Called within a step of the target, for each of its passes. The step does not fail with the head."""
        if self._error is None and not self.is_off:
            try:
                self._note_pass(rows, hidden)
            except Exception as error:
                self._error = error

    def _note_pass(self, rows: Sequence[Row], hidden: Tensor) -> None:
        first = self._tokens
        self._tokens += sum(row.count for row in rows)
        place, seen = self._hidden.step + first, len(self._seen)
        for row in rows:
            if row.request.may_guess and row.stage is None and row.last_block == self._target.model.num_blocks:
                headed = self._drafted(row.session)
                assert isinstance(headed, Headed)
                if headed.idle_steps < HEADS.idle_steps:
                    needed = headed.arrive(row.start, row.end)
                    headed.kept += range(place + needed.start - row.start, place + row.count)
                    self._seen.append(Seen(row, headed))
            place += row.count
        if len(self._seen) > seen:
            self._hidden.note(first, self._norm(hidden[0, : self._tokens - first]))

    def _run_at_once(self, seen: Sequence[Seen]) -> None:
        """Runs all tokens of these sessions that can be run, for their KV."""
        sessions = {one.row.session.id for one in seen}
        waiting = deque((one, one.headed.runnable) for one in seen if self._has_pages(one, sessions))
        while waiting:
            parts, room = list[tuple[Row, Headed, int]](), self.draft.max_tokens
            while waiting and room:
                one, count = waiting.popleft()
                now = min(count, room)
                parts.append((one.row, one.headed, now))
                room -= now
                if count > now:
                    waiting.appendleft((one, count - now))
            self._reading.read(parts)
            for _, headed, count in parts:
                headed.ran(headed.computed + count)

    def _has_pages(self, one: Seen, sessions: set[str]) -> bool:
        """Gives the session pages for its next tokens. Without, its text begins again behind them."""
        has = self._may_run(one.row.session, one.headed.runnable, 0, sessions)
        if not has:
            one.headed.skip()
        return has

    def _keep(self, headed: Sequence[Headed]) -> None:
        """Moves the hidden states that are still needed out of the step, which the next one overwrites."""
        step, moved, sources = self._hidden.step, list[Headed](), list[int]()
        for each in headed:
            of_step = [place for place in each.kept if place >= step]
            if len(sources) + len(of_step) > self._hidden.free:
                each.skip()
            else:
                moved.append(each)
                sources += of_step
        if not sources:
            return
        kept = iter(self._hidden.keep(sources))
        for each in moved:
            each.kept = [next(kept) if place >= step else place for place in each.kept]
