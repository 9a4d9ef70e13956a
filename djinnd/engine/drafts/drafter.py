"""The guesses of one model's sessions from its draft.

    batch without guesses ─► choose ─► first pass: what the draft has not run yet ─┐ sampled tokens stay on the device
                                       a pass for each further token of the guesses ◄┘
    batch with guesses ◄──────────── the host reads all guesses at once

The draft's passes run between two steps, on the engine's thread. It samples with the session's own parameters and
random numbers, so that a draft that thinks as its target does guesses right at any temperature.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from msgspec import structs

from djinnd.core.batch import Batch, Row, in_step_order
from djinnd.core.drafted import Drafted, record_of_draft
from djinnd.core.guesser import Record
from djinnd.core.session import Session
from djinnd.core.tuning import DRAFTS, GUESSES
from djinnd.engine.drafts.choice import Candidate, Choice, Costs, best_lengths, choose, within_vocabulary
from djinnd.engine.drafts.draft_pages import DraftPages
from djinnd.engine.drafts.draft_passes import DraftPasses
from djinnd.engine.run.model_runner import ModelRunner
from djinnd.scheduler.batch.batch_builder import BatchBuilder
from djinnd.scheduler.batch.guesses import before_stop, that_may_guess
from djinnd.scheduler.timing.step_times import StepTimes


class Drafter:
    """`vocab`: the target's. `builder`: composes the target's steps."""

    def __init__(self, draft: ModelRunner, vocab: int, builder: BatchBuilder) -> None:
        self.draft = draft
        self._builder = builder
        self._pages = DraftPages(draft.kv)
        self._passes = self._make_passes(vocab)
        self._times = StepTimes()  # of passes
        self._sessions: dict[str, Session] = {}  # sessions that have a Drafted
        self._recent = record_of_draft()  # of all sessions
        self._opened = 0  # sessions that the draft has begun with
        self._steps_without = 0  # steps since the last one for which the draft has guessed
        self._had_room = True  # for guesses, in the last step

    @property
    def is_off(self) -> bool:
        """True if the draft's weights stream now: each of its passes would wait for the bus."""
        return self.draft.model.placement.streams

    @property
    def sessions(self) -> set[str]:
        """Ids of the sessions that it knows. No other has pages of the draft."""
        return {*self._sessions}

    def added(self, batch: Batch, meanwhile: Callable[[], bool]) -> Batch:
        """The batch, some of its rows with guesses. `meanwhile`: called while the device works."""
        self._had_room = batch.room > 0
        if self.is_off or not batch.room:
            return batch
        self._note_losses()
        choice = self._with_pages(batch.rows, self._choose(batch))
        if not choice:
            return batch
        began = time.monotonic()
        guesses = self._passes.run(batch.rows, choice, meanwhile)
        self._note(batch.rows, choice, time.monotonic() - began)
        rows = list(batch.rows)
        for (candidate, length), guess in zip(choice.guesses, guesses, strict=True):
            row = rows[candidate.row]
            candidate.drafted.guessed(guess)
            if not guess:
                candidate.drafted.record.note(0, wrong=True)
            own = before_stop(tuple(guess[:length]), row.request.stop_tokens)
            rows[candidate.row] = structs.replace(row, count=1 + len(own), guess=own)
        for candidate, tokens in choice.behind:
            candidate.drafted.ran(candidate.drafted.computed + tokens)
        return replace(batch, rows=in_step_order(rows))

    def goes_on(self, rows: Sequence[Row]) -> bool:
        """True if the draft is likely to guess for a row in the step after one with these rows, so that the step should
        be composed when its tokens are known."""
        may_guess = that_may_guess(rows) if self._had_room and not self.is_off else []
        if not may_guess:
            return False
        known = [drafted for at in may_guess if (drafted := rows[at].session.drafted) is not None]
        rates = [drafted.record.rate for drafted in known]
        most = [GUESSES.longest] * len(rates)
        return any(best_lengths(rates, most, self._costs(len(rows), len(may_guess))))

    def close(self, session_id: str) -> None:
        """The session is closed. No effect if the draft does not know it."""
        session = self._sessions.pop(session_id, None)
        if session is not None:
            session.drafted = None
            self._pages.drop(session_id)
            self._passes.forget(session_id)

    def release(self) -> None:
        """Gives the draft's pages back. No guess may follow."""
        for session_id in list(self._sessions):
            self.close(session_id)

    def launched(self) -> None:
        """Called when a step of the target has been launched."""

    def failed(self) -> None:
        """Called when a step of the target could not be launched."""

    def _make_passes(self, vocab: int) -> DraftPasses:
        return DraftPasses(self.draft, vocab, self._pages)

    def _begin_with(self, session: Session, record: Record) -> Drafted:
        return Drafted(session.tokens, record)

    def _note_losses(self) -> None:
        """Notes which sessions have lost pages of the draft."""
        for name in self._pages.lost():
            if (drafted := self._sessions[name].drafted) is not None:
                drafted.lose()

    # --- what is guessed ----------------------------------------------------------------------------------------------

    def _choose(self, batch: Batch) -> Choice:
        """With a good draft each step would have guesses, and the cost of a token without them would stay unknown. So a
        few steps of each number of rows run without."""
        rows, times = batch.rows, self._builder.times
        candidates = [self._candidate(at, rows[at]) for at in that_may_guess(rows) if rows[at].stage is None]
        count = len(candidates)
        if not count:
            return Choice()
        if batch.decode_only and times.wants(len(rows)):
            times.ask(len(rows))
            return Choice()
        self._steps_without += 1
        if self._steps_without % DRAFTS.again == 0:
            self._recent = record_of_draft()
        step_s, pass_s = times.predict(len(rows)), self._times.predict(count)
        longest = GUESSES.longest
        if not self._is_known(count):
            longest = GUESSES.usual
        elif step_s and count < len(rows):  # the others wait
            longest = max(min(longest, int(DRAFTS.longest_share * step_s / pass_s)), 1)
        limit = pass_s + DRAFTS.catch_up_share * step_s if step_s else math.inf
        reading = self._times.further_within(limit, count)
        most = self.draft.max_tokens
        reading = min(max(reading, DRAFTS.least_tokens), DRAFTS.most_tokens, most // 2)
        return choose(candidates, self._costs(len(rows), count), longest, batch.room, reading, most)

    def _candidate(self, at: int, row: Row) -> Candidate:
        session = row.session
        drafted = self._drafted(session)
        right, wrong = drafted.settle()
        if right or wrong:
            self._recent.note(right, wrong)
        beyond = self.draft.plan.max_context - len(session.tokens) + drafted.first
        most = min(self._builder.guesses.most(row), beyond) if drafted.is_ready else 0
        return Candidate(at, drafted, max(most, 0))

    def _drafted(self, session: Session) -> Drafted:
        """The session as the draft knows it. The draft begins with it if it did not know it."""
        drafted = session.drafted
        if drafted is None:
            self._opened += 1
            rate = DRAFTS.first_rate if self._opened % DRAFTS.hopeful == 0 else self._recent.rate
            drafted = session.drafted = self._begin_with(session, record_of_draft(rate))
            self._sessions[session.id] = session
        return drafted

    def _costs(self, rows: int, may_guess: int) -> Costs:
        """A pass seems to take no time until some have been measured, and again when the draft has not run for long: a
        busy machine may have made it slow."""
        step_s = self._builder.times.predict(rows)
        if not step_s:
            return Costs(1.0, rows, 0.0, GUESSES.least_chance / rows)
        pass_s = self._times.predict(may_guess) if self._is_known(may_guess) else 0.0
        least = DRAFTS.least_cost * step_s / rows - pass_s / may_guess
        any_guess, a_token = self._builder.guesses.costs(may_guess)
        return Costs(step_s, rows, pass_s, max(a_token, least), any_guess)

    def _is_known(self, rows: int) -> bool:
        return self._times.is_sure(rows) and self._steps_without < DRAFTS.measured_again

    def _with_pages(self, rows: Sequence[Row], choice: Choice) -> Choice:
        """Gives pages to the chosen sessions. The draft leaves out sessions for which it has too few pages, those that
        are too long for its passes, and those with tokens that it does not know."""
        keep = {rows[candidate.row].session.id for candidate, _ in (*choice.guesses, *choice.behind)}
        passes = choice.passes
        guesses = [
            (candidate, length)
            for candidate, length in choice.guesses
            if self._may_run(rows[candidate.row].session, candidate.drafted.missing, passes, keep)
        ]
        behind = [
            (candidate, tokens)
            for candidate, tokens in choice.behind
            if self._may_run(rows[candidate.row].session, tokens, 0, keep)
        ]
        return Choice(guesses, behind)

    def _may_run(self, session: Session, count: int, passes: int, keep: set[str]) -> bool:
        drafted, most = session.drafted, self.draft.plan.max_context
        assert drafted is not None
        start = drafted.computed
        tokens = start - drafted.first + count + max(passes - 1, 0)
        if tokens > most or not within_vocabulary(session.tokens, start, count, self.draft.model.vocab):
            return False
        return self._pages.reserve(session.id, session.tenant, tokens, keep)

    # --- what it took -------------------------------------------------------------------------------------------------

    def _note(self, rows: Sequence[Row], choice: Choice, seconds: float) -> None:
        """Notes the time of the passes, and charges it to the sessions for which they ran."""
        guessing, passes = len(choice.guesses), choice.passes
        chosen = [rows[candidate.row] for candidate, _ in (*choice.guesses, *choice.behind)]
        self._builder.charge_draft(chosen, seconds)
        if guessing:
            self._steps_without = 0
        if choice.behind:
            others = max(passes - 1, 0) * self._times.predict(max(guessing, 1))
            self._times.note(len(chosen), sum([tokens for _, tokens in choice.behind]), max(seconds - others, 0.0))
        else:
            self._times.note(guessing, 0, seconds / passes)
