"""Decides, step by step, which active sessions of one model have a row, and charges tenants for the steps that ran.

It keeps the serving order and the measured step times. State of a single step is in step_builder.py and step_pages.py.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from itertools import chain

from djinn_client.protocol import CLASSES, Class
from djinnd.core.batch import Row, in_step_order
from djinnd.core.session import Session
from djinnd.scheduler.batch.following import following_rows
from djinnd.scheduler.batch.guesses import Guesses
from djinnd.scheduler.batch.step_budget import StepBudget, step_limits
from djinnd.scheduler.batch.step_builder import Decoders, StepBuilder
from djinnd.scheduler.batch.step_pages import Evictable, Order, StepPages
from djinnd.scheduler.policy import Policy
from djinnd.scheduler.residency.kv_residency import KvResidency
from djinnd.scheduler.timing.step_times import StepTimes
from djinnd.scheduler.tuning import STEP
from djinnd.scheduler.turns.ageing import Ageing
from djinnd.scheduler.turns.device_quotas import Claim, DeviceQuotas
from djinnd.scheduler.turns.run_queue import RunQueue
from djinnd.scheduler.turns.shares import Shares
from djinnd.scheduler.why import QUOTA

Account = tuple[Class, int]  # a class, and a tenant in it


class BatchBuilder:
    """Composes the steps of one model. `shares` and `quotas` are shared by all models of the device. `evictable` takes
    the active sessions in serving order. It returns sessions in eviction order, with the active ones last and
    reversed. `limit_of`: the length in tokens that a tenant's session can reach."""

    def __init__(
        self,
        residency: KvResidency,
        num_blocks: int,
        shares: Shares,
        quotas: DeviceQuotas,
        policy: Policy,
        evictable: Evictable,
        limit_of: Callable[[int], int],
    ) -> None:
        self.times = StepTimes()
        self.served = 0  # number of this model's last step
        self.room = 0  # how many further tokens of guesses that step may run
        self._residency = residency
        self._kv = residency.kv
        self._num_blocks = num_blocks
        self._shares = shares
        self._quotas = quotas
        self._policy = policy
        self._evictable = evictable
        self._limit_of = limit_of
        self.guesses = Guesses(self.times, self._kv, limit_of)
        self._run_queue = RunQueue()
        self._ageing = Ageing(policy.ageing)
        # by class: when a step was last composed while a session with a target had a request, and the tightest target
        self._last_target: dict[Class, tuple[float, float]] = {}
        self._own_targets: set[str] = set()  # sessions in the queue whose requests have targets of their own
        self._short_until = 0  # pages count as short up to this step
        # These two are as of the last step. Callers between steps get an order based on them.
        self._seated: set[str] = set()  # sessions that held pages before the step, if pages are short
        self._lengthy: set[str] = set()  # sessions with more than STEP.brief tokens to read that are not late
        # by class: the longest wait without a row of a session that reads a prompt, as a multiple of its target
        self._lateness: dict[Class, float] = {}
        # sessions that wait for a step of their own, in order, each with its tokens
        self._awaiting_own_step: dict[str, tuple[Session, int]] = {}
        # sessions of a hybrid model that have joined or had a row since their state was last compared with their KV
        self._unsettled: dict[str, Session] = {}

    def set_policy(self, policy: Policy) -> None:
        self._policy, self._ageing.after = policy, policy.ageing

    def join(self, session: Session, now: float) -> None:
        session.passed_over = ""
        self._run_queue.join(session, self._latest_start(session))
        self._ageing.joined(session, now)
        if self._kv.keeps_states:
            self._unsettled[session.id] = session
        if session.request is not None and session.request.has_target:
            self._own_targets.add(session.id)

    def leave(self, session: Session) -> None:
        """Removes the session from the queue. No effect if it is not in the queue."""
        self._run_queue.leave(session)
        self._ageing.left(session)
        self._awaiting_own_step.pop(session.id, None)
        self._own_targets.discard(session.id)
        self._unsettled.pop(session.id, None)

    def set_class(self, session: Session, priority: Class) -> None:
        """The session joins the queue of its new class as the last."""
        self._run_queue.leave(session)
        session.priority = priority
        self._run_queue.join(session, self._latest_start(session))

    def is_short(self, step: int) -> bool:
        """True for a number of steps after a session was refused pages, or got the pages of another active session.
        Otherwise, two sessions could take each other's pages in turns and neither would finish."""
        return step <= self._short_until

    def in_order(self, now: float) -> Iterator[Session]:
        """The active sessions in serving order."""
        return chain.from_iterable(self._by_class(now))

    def _by_class(self, now: float) -> Order:
        row_s = self.times.predict(1) or STEP.row_s
        return self._run_queue.in_order(self._shares, row_s, self._seated, self._lengthy, self._ageing.first(now))

    def _latest_start(self, session: Session) -> float:
        """The time from which the session has to be in every step to meet its deadline."""
        request = session.request
        assert request is not None
        missing = (request.expected_tokens or request.max_tokens) - (len(session.tokens) - request.prompt_end)
        return request.deadline - max(missing, 1) * self.times.predict(1)

    def tenants(self, priority: Class) -> Collection[int]:
        """Tenants with an active session of the class."""
        return self._run_queue.tenants(priority)

    def claim(self, tenant: int) -> Claim | None:
        """The rank of the tenant's foremost session here. Claims order a tenant's sessions across models. None if it
        has no active session here."""
        aged = self._ageing.chosen
        if aged is not None and aged.tenant == tenant:
            return -1, _number(aged)
        own = self._run_queue.highest_of(tenant)
        return None if own is None else (own[0], min(map(_number, own[1])))

    def urgency(self, now: float) -> tuple[int, float, int] | None:
        """Sort key by which models take turns; None if no session can have a row now.

        A model with a session that ageing has put first comes first. Then come models by the highest class that waits
        for a row, by the clock of that class's tenant that is furthest behind, and by the step at which they last ran.
        Sessions whose pages are moving do not count.
        """
        aged = self._ageing.first(now)
        if aged is not None and not self._residency.is_moving(aged):
            return -1, 0.0, self.served
        is_moving = self._residency.is_moving if self._residency.sessions_move else None
        for rank, priority in enumerate(CLASSES):
            clocks = [self._shares.clock(priority, tenant) for tenant in self._run_queue.tenants(priority, is_moving)]
            if clocks:
                return rank, min(clocks), self.served
        return None

    def compose(self, step: int, max_tokens: int, max_rows: int, now: float = 0.0) -> tuple[Row, ...]:
        """Gives rows to the active sessions in serving order, while pages and room last. Rows of one token come first.
        Returns no rows if all sessions wait for pages that are being copied.

        A chunk that passes only some of the blocks gets a step of its own if that takes less time. It is then the first
        of the next step.
        """
        self._unsettled = {name: one for name, one in self._unsettled.items() if not self._residency.keep_to_state(one)}
        decoders = self._survey(now)
        self._seated = set(self._kv.sessions) if self.is_short(step) else set()
        order, turn, room = self._by_class(now), self._next_own_step(), (max_tokens, max_rows)
        first, made, pages = self._composed(step, order, turn, decoders, room, now)
        if self._is_stuck(first, made):  # room was kept for sessions that decode, and these cannot get pages
            decoders = {
                priority: set(filter(self._holds_its_pages, some)) for priority, some in self._survey(now).items()
            }
            first, made, pages = self._composed(step, order, turn, decoders, room, now)
            # it waits for pages of its tenant on another model
            waits_elsewhere = first is not None and first.passed_over == QUOTA
            assert waits_elsewhere or not self._is_stuck(first, made), f"step {step}: no active session can run"
        if first is None:
            return ()
        spare = min(made.spare, max_rows - len(made.rows))  # logits have memory for `max_rows` rows
        rows = self.guesses.added(made.rows, spare)
        self.room = spare - sum([len(row.guess) for row in rows])
        if pages.are_short:
            self._short_until = step + STEP.short_steps
        self._ageing.served([row.session for row in rows], now, self._aged_reader(step))
        if rows:
            self.served = step
        self._update_own_steps(made)
        if self._kv.keeps_states:
            for row in rows:
                self._kv.set_state(row.session.id, row.end if row.stage is None else None)
                self._unsettled[row.session.id] = row.session
        return in_step_order(rows)

    def follow(self, rows: Sequence[Row], step: int, now: float) -> tuple[Row, ...]:
        """The rows of the step after one with `rows`, which still runs: see `following_rows`. Empty if there is no such
        step, if guesses seem to pay more, and for a hybrid model: the state of a session that turns out to have ended
        could not be taken back."""
        if self._kv.keeps_states or self._residency.sessions_move or self.guesses.go_further(rows):
            return ()
        found = following_rows(rows, self._kv, self._quotas, self._limit_of)
        if found is None:
            return ()
        for row in found:
            row.session.touched = step
        self._ageing.served([row.session for row in found], now)
        self.served = step
        return tuple(found)

    def _composed(
        self,
        step: int,
        order: Order,
        turn: tuple[Session | None, int],
        decoders: Decoders,
        most: tuple[int, int],
        now: float,
    ) -> tuple[Session | None, StepBuilder, StepPages]:
        """Composes the step with room kept for `decoders`, and at most `most` = (tokens, rows). Returns the session
        that was considered first."""
        pages = StepPages(self._residency, self._quotas, self._evictable, self._run_queue, order, turn[0])
        budget, aged = self._budget(decoders, *most, now), self._ageing.first(now)
        made = StepBuilder(step, order, decoders, budget, pages, self.times, self._num_blocks, aged, turn)
        first = made.compose()
        pages.close()
        return first, made, pages

    def _is_stuck(self, first: Session | None, made: StepBuilder) -> bool:
        """True if no session has a row, and no copy is under way that could change that."""
        if made.rows or first is None:
            return False
        return not (self._quotas.pages_move or self._residency.anything_moves)

    def _aged_reader(self, step: int) -> Session | None:
        """The session that ageing has put first, if pages are short and it reads a prompt whose KV would be lost if the
        session left."""
        aged = self._ageing.chosen
        if aged is None or aged.remaining == 1 or not self.is_short(step):
            return None
        return aged if self._residency.loses_by_leaving(aged) else None

    def _holds_its_pages(self, session: Session) -> bool:
        return self._kv.fits(session.id, len(session.tokens))

    def _survey(self, now: float) -> Decoders:
        """Returns the sessions that decode and can have a row. Also notes which of the others have much to read, and
        how late their first tokens are."""
        is_moving = self._residency.is_moving if self._residency.sessions_move else None
        decoders: Decoders = {priority: set() for priority in CLASSES}
        self._lengthy, own = set(), self._own_targets
        for priority, some in decoders.items():
            target, lateness = self._policy.of_class(priority).first_token, 0.0
            for session in self._run_queue.of(priority):
                stage, tokens = session.stage, session.tokens
                # This is session.remaining, inlined: it runs in every step for every session in the queue.
                length = len(tokens)
                remaining = length - (session.computed if stage is None else stage.done)
                if remaining == 1:
                    if is_moving is None or not is_moving(session):
                        some.add(session)
                    continue
                first = self._policy.target(session).first_token if session.id in own else target
                late = (now - session.row_at) / first
                # otherwise little remains to read once its KV is back
                if late < 1.0 and remaining > STEP.brief and length - session.left_at > STEP.brief:
                    self._lengthy.add(session.id)
                if late > lateness and (is_moving is None or not is_moving(session)):
                    lateness = late
            self._lateness[priority] = lateness
        return decoders

    def _next_own_step(self) -> tuple[Session | None, int]:
        """The session whose turn it is to have a step of its own, and its tokens. It must hold its pages, so that it
        can run. If the step has no room for it, it comes after the others."""
        for session, count in self._awaiting_own_step.values():
            if self._holds_its_pages(session) and not self._residency.is_moving(session):
                del self._awaiting_own_step[session.id]
                return session, count
        return None, 0

    def _update_own_steps(self, made: StepBuilder) -> None:
        """Adds the sessions that were left out for a step of their own; removes those that have a row now."""
        for session, count in made.apart:
            self._awaiting_own_step.setdefault(session.id, (session, count))
        if self._awaiting_own_step:
            for row in made.rows:
                self._awaiting_own_step.pop(row.session.id, None)

    def _budget(self, decoders: Decoders, max_tokens: int, max_rows: int, now: float) -> StepBudget:
        """The budget of a step before any session is considered."""
        for priority in CLASSES:
            target = self._tightest(priority, self._run_queue.of(priority))
            if target < math.inf:
                self._last_target[priority] = now, target
        recent = {name: target for name, (at, target) in self._last_target.items() if now - at < STEP.recent_s}
        decoding = {priority: self._tightest(priority, some) for priority, some in decoders.items()}
        counts = {priority: len(some) for priority, some in decoders.items()}
        return StepBudget(max_tokens, max_rows, self.times, step_limits(recent, decoding, self._lateness), counts)

    def _tightest(self, priority: Class, sessions: Iterable[Session]) -> float:
        """The tightest target between tokens of these sessions of a class; inf if none has one."""
        if self._own_targets:
            return min([self._policy.target(session).between_tokens for session in sessions], default=math.inf)
        return self._policy.of_class(priority).between_tokens if any(True for _ in sessions) else math.inf

    def ran(self, rows: Sequence[Row], seconds: float) -> None:
        """Charges the tenants for a step with these rows that took `seconds` on the device. 0 means that the step's
        time was not measured: the next measured time then covers both steps, even if it is a step of another model.

        The time that the rows would take with one token each is divided evenly among them, and the rest by their tokens
        beyond one.
        """
        shares = self._shares
        if not seconds or shares.owes:
            for row in rows:
                shares.defer(row.session.priority, row.session.tenant, row.count)
            if seconds:
                shares.settle(seconds)
            return
        chunks = [row for row in rows if row.count > 1]
        further = sum([row.count for row in chunks]) - len(chunks)
        if any(row.first_block == 0 for row in rows) and any(row.last_block == self._num_blocks for row in rows):
            self.times.note(len(rows), further, seconds)
        alone = seconds * len(rows) / (len(rows) + further)
        alike = min(seconds, self.times.predict(len(rows)) or alone) if further else seconds
        a_row, a_token = alike / len(rows), (seconds - alike) / max(further, 1)
        by_account: Counter[Account] = Counter([(row.session.priority, row.session.tenant) for row in rows])
        charges = {account: count * a_row for account, count in by_account.items()}
        for row in chunks:
            charges[row.session.priority, row.session.tenant] += (row.count - 1) * a_token
        for (priority, tenant), charge in charges.items():
            shares.charge(priority, tenant, charge)

    def charge_draft(self, rows: Sequence[Row], seconds: float) -> None:
        """Charges the tenants of these rows, each alike, for the time in which a draft has guessed for them."""
        for row in rows:
            self._shares.charge(row.session.priority, row.session.tenant, seconds / len(rows))

    def check_integrity(self, active: dict[str, Session]) -> None:
        self._run_queue.check_integrity(active)
        assert {s.id for s in self._ageing} == active.keys(), "the queue and the sessions of Ageing differ"
        assert self._awaiting_own_step.keys() <= active.keys(), (
            "a session waits for a step of its own and is not in the queue"
        )


def _number(session: Session) -> int:
    assert session.request is not None
    return session.request.id
