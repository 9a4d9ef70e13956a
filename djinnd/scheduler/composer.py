"""What decides from step to step who of one model's active sessions has a row: their order, what steps have taken, and
what each is charged with when a step has run. What is of one step only is composition.py's and step_pages.py's."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from itertools import chain

from djinn_client.protocol import CLASSES, Class
from djinnd.core.batch import Row
from djinnd.core.session import Session
from djinnd.scheduler.ageing import Ageing
from djinnd.scheduler.composition import Composition, Decoders
from djinnd.scheduler.device_quotas import Claim, DeviceQuotas
from djinnd.scheduler.line import Line
from djinnd.scheduler.policy import BRIEF, LATELY_S, KvRead, Policy, Room
from djinnd.scheduler.residence import Residence
from djinnd.scheduler.shares import Shares
from djinnd.scheduler.step_pages import Evictable, Order, StepPages
from djinnd.scheduler.step_times import StepTimes
from djinnd.scheduler.why import QUOTA

SHORT_STEPS = 64  # in which pages are taken to be short, after they were
ROW_S = 1e-3  # device seconds of a row, while nobody knows
USUALLY = 256  # steps that what a class usually reads is learnt from
Account = tuple[Class, int]  # of a tenant in a class


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
        self._shares = shares
        self._quotas = quotas
        self._policy = policy
        self._evictable = evictable
        self._line = Line()
        self._ageing = Ageing(policy.ageing)
        self._called_at: dict[Class, float] = {}  # when a step was last composed while somebody of the class had a call
        self._short_until = 0  # the last step of those in which pages are taken to be short
        # The order that others are told between steps is that of the last one:
        self._seated: set[str] = set()  # who held pages before it, where they are short
        self._lengthy: set[str] = set()  # who had much to read
        self._waiting_since: dict[Class, float] = {}  # when a row was last had by who has waited longest to read on
        self._kv_read: dict[Class, KvRead] = {}  # of those who decode; of a class of which nobody does, what they did
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
        return request.deadline - max(missing, 1) * self.times.predict(1, kv=len(session.tokens))

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
        """
        decoders = self._survey()
        self._seated = set(self._kv.sessions) if self.is_short(step) else set()
        order, turn, room = self._by_class(now), self._next_apart(), (max_tokens, max_rows)
        first, made, pages = self._made(step, order, turn, decoders, room, now)
        if self._is_stuck(first, made):  # room is kept for who decodes, and has no pages for that
            decoders = {klass: set(filter(self._holds_its_pages, some)) for klass, some in self._survey().items()}
            first, made, pages = self._made(step, order, turn, decoders, room, now)
            waits_elsewhere = first is not None and first.passed_over == QUOTA  # for its tenant's, on another model
            assert waits_elsewhere or not self._is_stuck(first, made), f"step {step}: nobody of those active goes on"
        if first is None:
            return ()
        rows = made.rows
        if pages.are_short:
            self._short_until = step + SHORT_STEPS
        self._ageing.served([row.session for row in rows], now, self._aged_reader(step))
        if rows:
            self.served = step
        self._wait_apart(made)
        rows.sort(key=_is_chunk)
        return tuple(rows)

    def _made(
        self,
        step: int,
        order: Order,
        turn: tuple[Session | None, int],
        decoders: Decoders,
        most: tuple[int, int],
        now: float,
    ) -> tuple[Session | None, Composition, StepPages]:
        """With room kept for these `decoders`, of which those are left that were not asked, in a step of so many tokens
        and rows at `most`. → who was asked first."""
        pages = StepPages(self._residence, self._quotas, self._evictable, self._line, order, turn[0])
        room, aged = self._room(decoders, *most, now), self._ageing.first(now)
        made = Composition(step, order, decoders, room, pages, self.times, self._num_blocks, aged, turn)
        first = made.compose()
        pages.close()
        return first, made, pages

    def _is_stuck(self, first: Session | None, made: Composition) -> bool:
        """Nobody has a row, and nothing happens meanwhile that would let anybody have one."""
        if made.rows or first is None:
            return False
        return not (self._quotas.pages_move or self._residence.anything_moves)

    def _aged_reader(self, step: int) -> Session | None:
        """Whom ageing has put first, while it reads what it would lose to others if it were not."""
        aged = self._ageing.chosen
        if aged is None or aged.remaining == 1 or not self.is_short(step):
            return None
        return aged if self._residence.loses_by_leaving(aged) else None

    def _holds_its_pages(self, session: Session) -> bool:
        return self._kv.fits(session.id, len(session.tokens))

    def _survey(self) -> Decoders:
        """Those that decode and can have a row. Notes how much KV they read, and of the others who has much to read,
        and since when one has had no row."""
        is_moving = self._residence.is_moving if self._residence.sessions_move else None
        decoders: Decoders = {klass: set() for klass in CLASSES}
        self._lengthy, self._waiting_since = set(), {}
        for klass, some in decoders.items():
            since, kv = math.inf, 0
            for session in self._line.of(klass):
                stage, tokens = session.stage, session.tokens
                # session.remaining, spelt out: in every step, for all that stand in line
                length = len(tokens)
                remaining = length - (session.computed if stage is None else stage.done)
                if remaining == 1:
                    if is_moving is None or not is_moving(session):
                        some.add(session)
                        kv += length
                    continue
                if remaining > BRIEF and length - session.left_at > BRIEF:  # else little, once its KV is back
                    self._lengthy.add(session.id)
                if session.row_at < since and (is_moving is None or not is_moving(session)):
                    since = session.row_at
            self._waiting_since[klass] = since
            if some:
                self._note_kv(klass, kv / len(some))
        return decoders

    def _note_kv(self, klass: Class, now: float) -> None:
        usual = self._kv_read[klass].usual if klass in self._kv_read else now
        self._kv_read[klass] = KvRead(now, usual + (now - usual) / USUALLY)

    def _next_apart(self) -> tuple[Session | None, int]:
        """Whose turn it is of those who wait for a step apart, and its tokens. It holds its pages, so that it can go
        on; if there is no room for it, it comes after the others."""
        for session, count in self._apart.values():
            if self._holds_its_pages(session) and not self._residence.is_moving(session):
                del self._apart[session.id]
                return session, count
        return None, 0

    def _wait_apart(self, made: Composition) -> None:
        """Who is passed over for a step apart; who has a row does so no more."""
        for session, count in made.apart:
            self._apart.setdefault(session.id, (session, count))
        if self._apart:
            for row in made.rows:
                self._apart.pop(row.session.id, None)

    def _room(self, decoders: Decoders, max_tokens: int, max_rows: int, now: float) -> Room:
        """Before anybody is asked."""
        decoding = {klass: len(some) for klass, some in decoders.items()}
        protected = {klass: sum([not session.bulk for session in some]) for klass, some in decoders.items()}
        protected[CLASSES[-1]] = 0
        for klass in CLASSES[:-1]:
            if any(not session.bulk for session in self._line.of(klass)):
                self._called_at[klass] = now
        waited = {klass: max(now - since, 0.0) for klass, since in self._waiting_since.items()}
        lately = [klass for klass, at in self._called_at.items() if now - at < LATELY_S]
        return Room(max_tokens, max_rows, self.times, self._policy, decoding, protected, lately, waited, self._kv_read)

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
        chunks = [row for row in rows if row.count > 1]
        further = sum([row.count for row in chunks]) - len(chunks)
        kv = sum([row.start for row in rows if row.count == 1])
        if any(row.first_block == 0 for row in rows) and any(row.last_block == self._num_blocks for row in rows):
            self.times.note(len(rows), further, seconds, kv)
        alone = seconds * len(rows) / (len(rows) + further)
        alike = min(seconds, self.times.predict(len(rows), kv=kv) or alone) if further else seconds
        a_row, a_token = alike / len(rows), (seconds - alike) / max(further, 1)
        by_account: Counter[Account] = Counter([(row.session.klass, row.session.tenant) for row in rows])
        charges = {account: count * a_row for account, count in by_account.items()}
        for row in chunks:
            charges[row.session.klass, row.session.tenant] += (row.count - 1) * a_token
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
