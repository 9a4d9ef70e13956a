"""Chooses the rows of one step. Sessions are considered in serving order; each gets a row, or the reason why it has
none (`Session.passed_over`)."""

from __future__ import annotations

from itertools import chain

from djinn_client.protocol import Class
from djinnd.core.batch import Row
from djinnd.core.request import Request, RequestState
from djinnd.core.session import Session
from djinnd.core.stops import Stage
from djinnd.scheduler.batch.block_range import BlockRange, StepBlocks, range_of, whole_range
from djinnd.scheduler.batch.step_budget import StepBudget
from djinnd.scheduler.batch.step_pages import Order, StepPages, Test
from djinnd.scheduler.timing.step_times import StepTimes
from djinnd.scheduler.tuning import STEP
from djinnd.scheduler.why import ROOM

_RUNNING = RequestState.RUNNING  # A global, because it is looked up for every row.
Decoders = dict[Class, set[Session]]  # sessions that need one token, by class


class StepBuilder:
    """Composes one step. No session's place in the queue changes meanwhile."""

    def __init__(
        self,
        step: int,
        order: Order,
        decoders: Decoders,
        budget: StepBudget,
        pages: StepPages,
        times: StepTimes,
        num_blocks: int,
        aged: Session | None,
        turn: tuple[Session | None, int],
    ) -> None:
        """`decoders`: sessions that need one token and can have a row. `aged`: the session that ageing has put first,
        if there is one. `turn`: a session that comes before all others because it waited for a step of its own, and its
        tokens."""
        self.rows: list[Row] = []
        self.apart: list[tuple[Session, int]] = []  # sessions left out for a step of their own, with their tokens
        self._step = step
        self._order = order
        self._decoders = decoders  # not considered yet
        self._budget = budget
        self._pages = pages
        self._page_size = pages.kv.page_size
        self._step_blocks = StepBlocks(self.rows, times, num_blocks)
        self._num_blocks = num_blocks
        self._whole = whole_range(num_blocks)
        self._aged = aged
        self._turn, self._turn_tokens = turn
        self._closed: set[Class] = set()  # no further session of these classes can have a row
        self._has_partial_rows = False  # some row passes only some of the blocks

    @property
    def spare(self) -> int:
        """How many tokens of guesses the step has room for, when its rows have been chosen."""
        return 0 if self._has_partial_rows else self._budget.spare

    def compose(self) -> Session | None:
        """Chooses the rows. Returns the session that was considered first, or None if none could be."""
        moves = self._pages.moves
        in_order = chain.from_iterable(self._order)
        first = self._turn or next((session for session in in_order if moves is None or not moves(session)), None)
        if self._turn is not None:
            self._ask(self._turn)
        for sessions in self._order:
            if sessions and not self._budget.is_full:
                self._serve(sessions, moves)
        return first

    def _serve(self, sessions: list[Session], moves: Test | None) -> None:
        """Considers the sessions of one class in order, except those that were moving when the step was begun.

        In most steps, most sessions decode and need nothing: they get their rows here, and `budget` counts several at
        once. All others go through `_ask`. Measured with 1,000 sessions: if all went through `_ask`, composing a step
        would take 1.7 times as long.
        """
        budget, pages, rows, num_blocks, page_size = (
            self._budget,
            self._pages,
            self.rows,
            self._num_blocks,
            self._page_size,
        )
        step, turn, priority = self._step, self._turn, sessions[0].priority
        decodes_no_more = self._decoders[priority].discard
        is_part, moves_now = self._has_partial_rows, pages.moves
        # how many rows of one token there is room for; 0: `_ask` the first (the aged session is alone in its list)
        ones = 0
        taken = 0  # rows taken of these
        for session in sessions:
            if session is turn or (moves is not None and moves(session)):
                continue
            request, start = session.request, session.computed
            if (
                len(session.tokens) != start + 1
                or taken == ones
                or request is None
                or request.state is not _RUNNING
                or request.stops
                or session.stage is not None
                or is_part
                or (moves_now is not None and moves_now(session))
                or (start % page_size == 0 and not pages.grow(session))  # otherwise it holds the page
            ):
                budget.take_ones(priority, taken)
                taken = 0
                if budget.is_full:
                    return
                self._ask(session)
                if priority in self._closed:
                    return
                ones, is_part, moves_now = budget.ones(priority), self._has_partial_rows, pages.moves
                continue
            decodes_no_more(session)
            taken += 1
            session.touched, session.passed_over = step, ""
            rows.append(Row(session, request, start, 1, 0, num_blocks, request.max_tokens > 0, None))
        budget.take_ones(priority, taken)

    def _ask(self, session: Session) -> None:
        """Considers a session that may need pages, a chunk, or a part of the blocks."""
        remaining = session.remaining
        if remaining == 1:
            self._decoders[session.priority].discard(session)
        count = self._share(session, remaining)
        if count == 0:
            self._pages.bring_back(session, remaining)
            self._leave_out(session)
        elif self._pages.suffice(session, remaining):
            self._give_row(session, remaining, count)

    def _share(self, session: Session, remaining: int) -> int:
        """How many of its tokens the step has room for."""
        count = self._budget.share(session.priority, remaining)
        if session is self._aged:
            count = min(count, STEP.least_chunk)
        if session is self._turn:
            count = min(count, self._turn_tokens)
        return count

    def _leave_out(self, session: Session) -> None:
        """Notes that there is no room for the session. If it came in its own turn, the class may be closed for the
        others."""
        session.passed_over = ROOM
        if session is not self._aged and session is not self._turn and self._is_closed(session.priority):
            self._closed.add(session.priority)

    def _is_closed(self, priority: Class) -> bool:
        """True if no further session of the current class can have a row: there is no room for a chunk, and every
        session that decodes has been considered or has given up its pages."""
        left = self._decoders[priority]
        if (left and not self._pages.are_taken) or self._budget.share(priority, 2):
            return False
        return all(map(self._pages.are_given_up_by, left))

    def _give_row(self, session: Session, remaining: int, count: int) -> None:
        """Gives the session a row of at most `count` tokens, unless a step of its own takes less time. `remaining`:
        tokens that it had left before its pages were found or reserved."""
        blocks, request = self._whole, session.request
        if remaining > 1:  # fewer are left if pages with its KV were found meanwhile
            count = min(count, session.remaining)
        if session.stage is not None or (request is not None and request.stops):
            blocks, self._has_partial_rows = range_of(session, blocks), True
            count = min(count, blocks.end - session.next_position)
        if session.edits and count > 1:
            count = session.together(session.next_position, count)
        if self._has_partial_rows and self._step_blocks.is_slower_with(blocks, count):
            self.apart.append((session, count))
            session.passed_over = ROOM
            return
        self._budget.take(remaining, count)
        self.rows.append(self._row(session, blocks, count))

    def _row(self, session: Session, blocks: BlockRange, count: int) -> Row:
        request, last = self._start(session), blocks.last
        start, stage = session.next_position, session.stage
        if last > self._num_blocks:
            last, samples = self._num_blocks, request.max_tokens > 0 and start + count == len(session.tokens)
        else:
            samples = False
        if stage is not None:
            stage.last = blocks.last
        elif blocks.last <= self._num_blocks:
            stage = session.stage = Stage(blocks.first, last, start)
        return Row(session, request, start, count, blocks.first, last, samples, stage)

    def _start(self, session: Session) -> Request:
        """Marks the session as having a row in this step, and returns its request."""
        request = session.request
        assert request is not None
        if request.state is RequestState.QUEUED:
            request.move("start")
        session.touched, session.passed_over = self._step, ""
        return request
