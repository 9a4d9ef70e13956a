"""The rows of one step while they are chosen: sessions are asked in their order, and each has a row or is told what it
is passed over for."""

from __future__ import annotations

from itertools import chain

from djinn_client.protocol import Class
from djinnd.core.batch import Row
from djinnd.core.request import Request, RequestState
from djinnd.core.session import Session
from djinnd.core.stops import Stage
from djinnd.scheduler.company import Company, Way, way_of, whole_way
from djinnd.scheduler.policy import LEAST_CHUNK, Room
from djinnd.scheduler.step_pages import Order, StepPages, Test
from djinnd.scheduler.step_times import StepTimes
from djinnd.scheduler.why import ROOM

_RUNNING = RequestState.RUNNING  # looked up for every row
Decoders = dict[Class, set[Session]]  # who needs one token, by class


class Composition:
    """While it is made, no place in line changes."""

    def __init__(
        self,
        step: int,
        order: Order,
        decoders: Decoders,
        room: Room,
        pages: StepPages,
        times: StepTimes,
        num_blocks: int,
        aged: Session | None,
        turn: tuple[Session | None, int],
    ) -> None:
        """`decoders`: those that can have a row. `aged`: the first of the order, if ageing has put it there. `turn`:
        who comes before all, as it waited for a step apart, and its tokens."""
        self.rows: list[Row] = []
        self.apart: list[tuple[Session, int]] = []  # who is passed over for a step apart, and with how many tokens
        self._step = step
        self._order = order
        self._decoders = decoders  # that have not been asked
        self._room = room
        self._pages = pages
        self._page_size = pages.kv.page_size
        self._company = Company(self.rows, times, num_blocks)
        self._num_blocks = num_blocks
        self._whole = whole_way(num_blocks)
        self._aged = aged
        self._turn, self._turn_tokens = turn
        self._closed: set[Class] = set()  # of which nobody more can have a row
        self._is_part = False  # somebody goes through a part of the blocks

    def compose(self) -> Session | None:
        """→ the first that was asked. None: nobody can be."""
        moves = self._pages.moves
        in_order = chain.from_iterable(self._order)
        first = self._turn or next((session for session in in_order if moves is None or not moves(session)), None)
        if self._turn is not None:
            self._ask(self._turn)
        for sessions in self._order:
            if sessions and not self._room.is_full:
                self._serve(sessions, moves)
        return first

    def _serve(self, sessions: list[Session], moves: Test | None) -> None:
        """Those of one class, first to last, but those that moved when the first of all was asked. In most steps most
        decode, and have all it takes: they get their rows here, and `room` hears of them together. The others are
        asked."""
        room, pages, rows, num_blocks, page_size = self._room, self._pages, self.rows, self._num_blocks, self._page_size
        step, turn, klass = self._step, self._turn, sessions[0].klass
        decodes_no_more = self._decoders[klass].discard
        is_part, moves_now = self._is_part, pages.moves
        ones = 0  # rows that there is room for; 0: the first is asked, as the aged one has to be, alone in its list
        taken = shielding = 0  # of these, and how many of them shield
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
                or (start % page_size == 0 and not pages.grow(session))  # else it holds the page
            ):
                room.take_ones(klass, taken, shielding)
                taken = shielding = 0
                if room.is_full:
                    return
                self._ask(session)
                if klass in self._closed:
                    return
                ones, is_part, moves_now = room.ones(klass), self._is_part, pages.moves
                continue
            decodes_no_more(session)
            taken += 1
            shielding += not session.bulk
            session.touched, session.passed_over = step, ""
            rows.append(Row(session, request, start, 1, 0, num_blocks, request.max_tokens > 0, None))
        room.take_ones(klass, taken, shielding)

    def _ask(self, session: Session) -> None:
        """One that may need anything."""
        remaining = session.remaining
        if remaining == 1:
            self._decoders[session.klass].discard(session)
        count = self._share(session, remaining)
        if count == 0:
            self._pages.bring_back(session, remaining)
            self._leave_out(session)
        elif self._pages.suffice(session, remaining):
            self._join(session, remaining, count)

    def _share(self, session: Session, remaining: int) -> int:
        """Tokens that there is room for."""
        count = self._room.share(session.klass, remaining)
        if session is self._aged:
            count = min(count, LEAST_CHUNK)
        if session is self._turn:
            count = min(count, self._turn_tokens)
        return count

    def _leave_out(self, session: Session) -> None:
        """There is no room for it. Who has come out of turn says nothing of the others of its class."""
        session.passed_over = ROOM
        if session is not self._aged and session is not self._turn and self._is_closed(session.klass):
            self._closed.add(session.klass)

    def _is_closed(self, klass: Class) -> bool:
        """Nobody more of the class that is being asked can have a row: there is no room for who reads, and who decodes
        has been asked, or has given up its pages meanwhile."""
        left = self._decoders[klass]
        if (left and not self._pages.are_taken) or self._room.share(klass, 2):
            return False
        return all(map(self._pages.are_given_up_by, left))

    def _join(self, session: Session, remaining: int, count: int) -> None:
        """It has a row of so many tokens at most, unless one in a step apart takes less time. `remaining`: of when it
        was asked."""
        way, request = self._whole, session.request
        if remaining > 1:  # fewer, if it has been spared some
            count = min(count, session.remaining)
        if session.stage is not None or (request is not None and request.stops):
            way, self._is_part = way_of(session, way), True
            count = min(count, way.end - session.next_position)
        if session.edits and count > 1:
            count = session.together(session.next_position, count)
        if self._is_part and self._company.is_slower_with(way, count):
            self.apart.append((session, count))
            session.passed_over = ROOM
            return
        self._room.take(remaining, count, shields=not session.bulk and session is not self._aged)
        self.rows.append(self._row(session, way, count))

    def _row(self, session: Session, way: Way, count: int) -> Row:
        request, last = self._begun(session), way.last
        start, stage = session.next_position, session.stage
        if last > self._num_blocks:
            last, samples = self._num_blocks, request.max_tokens > 0 and start + count == len(session.tokens)
        else:
            samples = False
        if stage is not None:
            stage.last = way.last
        elif way.last <= self._num_blocks:
            stage = session.stage = Stage(way.first, last, start)
        return Row(session, request, start, count, way.first, last, samples, stage)

    def _begun(self, session: Session) -> Request:
        """It has a row in this step; for this request."""
        request = session.request
        assert request is not None
        if request.state is RequestState.QUEUED:
            request.move("start")
        session.touched, session.passed_over = self._step, ""
        return request
