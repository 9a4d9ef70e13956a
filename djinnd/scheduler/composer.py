"""Who of one model's active sessions has a row in the next step: their order, the room that they share, and what each
is charged with when the step has run."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from itertools import chain

from djinn_client.protocol import CLASSES, Class
from djinnd.core.batch import Row, blocks_of
from djinnd.core.request import Request, RequestState
from djinnd.core.session import Session
from djinnd.core.stops import Stage
from djinnd.scheduler.ageing import Ageing
from djinnd.scheduler.company import Company, Way, way_of, whole_way
from djinnd.scheduler.device_quotas import Claim, DeviceQuotas
from djinnd.scheduler.line import Line
from djinnd.scheduler.policy import BRIEF, LEAST_CHUNK, Policy, Room
from djinnd.scheduler.residence import Residence
from djinnd.scheduler.shares import Shares
from djinnd.scheduler.step_times import StepTimes
from djinnd.scheduler.why import PAGES, QUOTA, ROOM

SHORT_STEPS = 64  # in which pages are taken to be short, after they were
ROW_S = 1e-3  # device seconds of a row, while nobody knows
Account = tuple[Class, int]  # of a tenant in a class
Order = list[list[Session]]  # class by class, see line.py
Decoders = dict[Class, set[Session]]  # who needs one token, by class
Evictable = Callable[[Iterable[Session]], Iterable[Session]]
Test = Callable[[Session], bool]


class Composer:
    """Of one model. `shares` and `quotas` are the device's, of all its models. `evictable`: whose pages make room,
    first to last; of the active, which it is given in their order, the last are the first."""

    def __init__(
        self,
        residence: Residence,
        num_blocks: int,
        shares: Shares,
        quotas: DeviceQuotas,
        policy: Policy,
        evictable: Evictable,
    ) -> None:
        self.times = StepTimes()
        self.served = 0  # the last step that was this model's
        self._residence = residence
        self._kv = residence.kv
        self._num_blocks = num_blocks
        self._whole = whole_way(num_blocks)
        self._shares = shares
        self._quotas = quotas
        self._policy = policy
        self._evictable = evictable
        self._line = Line()
        self._ageing = Ageing(policy.ageing)
        self._short_until = 0  # the last step of those in which pages are taken to be short
        self._takes_pages = False  # this step does, or tries to, from who waits for a row, too
        # While a step is composed, no place in line changes:
        self._seated: set[str] = set()  # who held pages before it, where they are short
        self._lengthy: set[str] = set()  # who had much to read
        self._order: Order = []  # of the step that is being composed
        self._victims: list[Session] | None = None  # likewise: most need none
        self._turn: Session | None = None  # of a step apart: the first of the step that is being composed
        self._apart: dict[str, tuple[Session, int]] = {}  # who waits for a step apart, longest first, and with how much

    def set_policy(self, policy: Policy) -> None:
        self._policy, self._ageing.after = policy, policy.ageing

    def join(self, session: Session, now: float) -> None:
        session.passed_over = ""
        self._line.join(session, self._latest_start(session))
        self._ageing.joined(session, now)

    def leave(self, session: Session) -> None:
        """Where it does not stand, nothing happens."""
        self._line.leave(session)
        self._ageing.left(session)
        self._apart.pop(session.id, None)

    def set_class(self, session: Session, klass: Class) -> None:
        """As the last of that class."""
        self._line.leave(session)
        session.klass = klass
        self._line.join(session, self._latest_start(session))

    def is_short(self, step: int) -> bool:
        """Of pages: for some time after somebody was refused some, or was given those of another who waits for a row.
        Two that took theirs from each other in turns would come to no end."""
        return step <= self._short_until

    def in_order(self, now: float) -> Iterator[Session]:
        """The sessions, first to last."""
        return chain.from_iterable(self._by_class(now))

    def _by_class(self, now: float) -> Order:
        row_s = self.times.predict(1) or ROW_S
        return self._line.in_order(self._shares, row_s, self._seated, self._lengthy, self._ageing.first(now))

    def _latest_start(self, session: Session) -> float:
        """When it has to be served in every step, to meet its deadline."""
        request = session.request
        assert request is not None
        missing = (request.expected_tokens or request.max_tokens) - (len(session.tokens) - request.prompt_end)
        return request.deadline - max(missing, 1) * self.times.predict(1)

    def tenants(self, klass: Class) -> Collection[int]:
        """Those with a session of that class that waits for a row."""
        return self._line.tenants(klass)

    def claim(self, tenant: int) -> Claim | None:
        """Of the tenant's foremost session here, by which its sessions on several models go before each other."""
        aged = self._ageing.chosen
        if aged is not None and aged.tenant == tenant:
            return -1, _number(aged)
        own = self._line.foremost_of(tenant)
        return None if own is None else (own[0], min(map(_number, own[1])))

    def urgency(self, now: float) -> tuple[int, float, int] | None:
        """By this, models take turns: the highest class that waits for a row, and the clock of its tenant that is
        furthest behind, or that ageing has put one first, whatever its class; and when the model was served last.
        None: nobody waits. Whose pages are moving cannot have a row, and does not count."""
        aged = self._ageing.first(now)
        if aged is not None and not self._residence.is_moving(aged):
            return -1, 0.0, self.served
        is_moving = self._residence.is_moving if self._residence.sessions_move else None
        for rank, klass in enumerate(CLASSES):
            clocks = [self._shares.clock(klass, tenant) for tenant in self._line.tenants(klass, is_moving)]
            if clocks:
                return rank, min(clocks), self.served
        return None

    def compose(self, step: int, max_tokens: int, max_rows: int, now: float = 0.0) -> tuple[Row, ...]:
        """Serves the active sessions in their order while pages and room last. Rows of one token come first. Nobody,
        where all wait for pages that are being copied.

        A chunk that goes through a part of the blocks has a step apart where that takes less time; who is passed over
        for that is the first of the next step.

        Once pages are short, nobody who holds none starts: those further back must not live on what the first in
        line waits for.
        """
        residence, kv, holders = self._residence, self._kv, self._kv.sessions
        residence.claimed, self._takes_pages, self._victims = 0, False, None
        aged = self._ageing.first(now)
        is_moving = residence.is_moving if residence.sessions_move else None
        decoders = self._survey(is_moving)
        self._seated = set(holders) if self.is_short(step) else set()
        self._order = self._by_class(now)
        turn, its_count = self._next_apart()
        self._turn = turn
        closed: set[Class] = set()  # of which nobody more can have a row
        order = self._to_ask(is_moving, closed)
        first = next(order, None)
        if first is None:
            return ()
        room = self._room(decoders, max_tokens, max_rows)
        rows: list[Row] = []
        company = Company(rows, self.times, self._num_blocks)
        short = is_part = False  # is_part: somebody goes through a part of the blocks
        at_quota: set[int] = set()  # tenants
        for session in chain((first,), order):
            if room.is_full:
                break
            tokens = len(session.tokens)
            if not is_part and self._merely_decodes(session, aged, is_moving):
                decoders[session.klass].discard(session)
                if room.take_one(session.klass, shields=not session.bulk):
                    rows.append(self._one(session, step))
                else:
                    session.passed_over = ROOM
                    if self._is_closed(session.klass, room, decoders):
                        closed.add(session.klass)
                continue
            remaining = session.remaining
            count = room.share(session.klass, remaining)
            if remaining == 1:
                decoders[session.klass].discard(session)
            if session is aged:
                count = min(count, LEAST_CHUNK)
            if session is turn:
                count = min(count, its_count)
            if count == 0:
                session.passed_over = ROOM
                if session is not aged and session is not turn and self._is_closed(session.klass, room, decoders):
                    closed.add(session.klass)
            elif (short and session.id not in holders) or (is_moving is not None and is_moving(session)):
                session.passed_over = PAGES
            elif session.tenant in at_quota and session.id not in holders:
                session.passed_over = QUOTA
            elif (remaining > 1 or not kv.fits(session.id, tokens)) and not self._secured(session):
                if session.passed_over == QUOTA:
                    at_quota.add(session.tenant)
                elif not residence.is_arriving(session):
                    short = True
                is_moving = residence.is_moving
            else:
                way, request = self._whole, session.request
                if remaining > 1:  # fewer, if it has been spared some
                    count = min(count, session.remaining)
                if session.stage is not None or (request is not None and request.stops):
                    way, is_part = way_of(session, self._whole), True
                    count = min(count, way.end - session.next_position)
                if is_part and company.is_slower_with(way, count):
                    self._apart.setdefault(session.id, (session, count))
                    session.passed_over = ROOM
                    continue
                shields = not session.bulk and session is not aged
                room.take(remaining, count, shields=shields)
                rows.append(self._row(session, way, count, step))
        assert rows or self._quotas.pages_move or residence.anything_moves or first.passed_over == QUOTA, (
            f"step {step}: nobody of the active sessions goes on, {first.id} first"
        )
        residence.claimed = None
        if short or self._takes_pages:
            self._short_until = step + SHORT_STEPS
        self._ageing.served([row.session for row in rows], now)
        if rows:
            self.served = step
        rows.sort(key=_is_chunk)
        return tuple(rows)

    def _merely_decodes(self, session: Session, aged: Session | None, is_moving: Test | None) -> bool:
        """It needs room for one token, which goes through all blocks, and nothing else: most, in most steps."""
        request, tokens = session.request, len(session.tokens)
        assert request is not None
        return (
            tokens - session.computed == 1
            and session.stage is None
            and not request.stops
            and session is not aged
            and session is not self._turn
            and self._kv.fits(session.id, tokens)
            and (is_moving is None or not is_moving(session))
        )

    def _survey(self, is_moving: Test | None) -> Decoders:
        """Those that can have a row. Notes who has much to read, too."""
        decoders: Decoders = {klass: set() for klass in CLASSES}
        self._lengthy = set()
        for klass, some in decoders.items():
            for session in self._line.of(klass):
                stage = session.stage  # session.remaining, spelt out: in every step, for all that stand in line
                remaining = len(session.tokens) - (session.computed if stage is None else stage.done)
                if remaining > BRIEF:
                    self._lengthy.add(session.id)
                elif remaining == 1 and (is_moving is None or not is_moving(session)):
                    some.add(session)
        return decoders

    def _to_ask(self, is_moving: Test | None, closed: Collection[Class]) -> Iterator[Session]:
        """The sessions, first to last, but those that `is_moving` is true of; lazily, as classes are closed meanwhile:
        of these, nobody more."""
        turn = self._turn
        if turn is not None:
            yield turn
        for sessions in self._order:
            for session in sessions:
                if session is turn or (is_moving is not None and is_moving(session)):
                    continue
                yield session
                if session.klass in closed:
                    break

    def _is_closed(self, klass: Class, room: Room, decoders: Decoders) -> bool:
        """Nobody more of the class that is being asked can have a row: there is no room for who reads, and who decodes
        has been asked, or has given up its pages meanwhile. `decoders`: who have not been asked."""
        left, is_moving = decoders[klass], self._residence.is_moving
        if (left and not self._takes_pages) or room.share(klass, 2):
            return False
        return all(other.remaining > 1 or is_moving(other) for other in left)

    def _secured(self, session: Session) -> bool:
        """Whether it has the pages for a row."""
        if not self._quotas.make_way(session, self._residence, lambda: self._behind(session)):
            session.passed_over = QUOTA
            return False
        session.passed_over = PAGES
        return self._residence.secure(session, self._behind(session))

    def _behind(self, session: Session) -> Iterator[Session]:
        """Whose pages make room for it: nobody's who stands before it, or has a row out of turn. So the first in line
        can have every page there is, and always goes on."""
        holders = self._kv.sessions
        if self._victims is None:
            self._victims = list(self._evictable(chain.from_iterable(self._order)))
        for other in self._victims:
            if other is session:
                return
            if other.id in holders and other is not self._turn and not self._is_spared(other, session):
                self._takes_pages = self._takes_pages or other in self._line
                yield other

    def _is_spared(self, other: Session, session: Session) -> bool:
        """Where what leaves is lost, as a stage is anywhere, two long prompts would be interrupted by each other for
        ever, by turns of their tenants or by ageing: no other of its class or a lower one interrupts one that is being
        read. Nobody else begins meanwhile."""
        return (
            (self._residence.paging.host is None or other.stage is not None)
            and session.remaining > 1
            and other in self._line
            and len(other.tokens) - other.computed > 1
            and other.touched == self.served
            and self._kv.fits(other.id, len(other.tokens))
            and CLASSES.index(other.klass) <= CLASSES.index(session.klass)
        )

    def _room(self, decoders: Decoders, max_tokens: int, max_rows: int) -> Room:
        """Before anybody is asked."""
        decoding = {klass: len(some) for klass, some in decoders.items()}
        protected = {klass: sum([not session.bulk for session in some]) for klass, some in decoders.items()}
        protected[CLASSES[-1]] = 0
        return Room(max_tokens, max_rows, self.times, self._policy, decoding, protected)

    def _next_apart(self) -> tuple[Session | None, int]:
        """Whose turn it is of those who wait for a step apart, and its tokens. It holds its pages, so that it can go
        on; if there is no room for it, it comes after the others."""
        for session, count in self._apart.values():
            if self._kv.fits(session.id, len(session.tokens)) and not self._residence.is_moving(session):
                del self._apart[session.id]
                return session, count
        return None, 0

    def _one(self, session: Session, step: int) -> Row:
        """Of a session that merely decodes."""
        request = self._begun(session, step)
        return Row(session, request, session.computed, 1, 0, self._num_blocks, request.max_tokens > 0, None)

    def _row(self, session: Session, way: Way, count: int, step: int) -> Row:
        request, last = self._begun(session, step), way.last
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

    def _begun(self, session: Session, step: int) -> Request:
        """It has a row in this step; for this request."""
        request = session.request
        assert request is not None
        if request.state is RequestState.QUEUED:
            request.move("start")
        session.touched, session.passed_over = step, ""
        if self._apart:
            self._apart.pop(session.id, None)
        return request

    def ran(self, rows: Sequence[Row], seconds: float) -> None:
        """A step with these rows took so long on the device: what each brought to it, its tenant is charged with. 0:
        nobody has waited for it, and the seconds of the next step, of whichever model, are of both."""
        shares = self._shares
        if not seconds or shares.owes:
            for row in rows:
                shares.defer(row.session.klass, row.session.tenant, row.count)
            if seconds:
                shares.settle(seconds)
            return
        tokens = sum([row.count for row in rows])
        further = tokens - len(rows)
        if len(blocks_of(rows)) == self._num_blocks:
            self.times.note(len(rows), further, seconds)
        alike = min(seconds, self.times.predict(len(rows)) or seconds * len(rows) / tokens) if further else seconds
        a_row, a_token = alike / len(rows), (seconds - alike) / max(further, 1)
        charges: dict[Account, float] = defaultdict(float)
        for row in rows:
            charges[row.session.klass, row.session.tenant] += a_row + (row.count - 1) * a_token
        for (klass, tenant), charge in charges.items():
            shares.charge(klass, tenant, charge)

    def check_integrity(self, active: dict[str, Session]) -> None:
        self._line.check_integrity(active)
        assert {s.id for s in self._ageing} == active.keys(), "the line and those who age in it differ"
        assert self._apart.keys() <= active.keys(), "somebody waits for a step apart, and not in line"


def _number(session: Session) -> int:
    assert session.request is not None
    return session.request.id


def _is_chunk(row: Row) -> bool:
    return row.count > 1
