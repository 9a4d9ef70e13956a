"""A scheduler on a virtual clock: the time of a step comes from a curve, and a log records the tokens of each session.

Each step is checked as it runs. No session may wait longer than ageing allows, no step may be slower than the policy
allows, and a session without a row must have a reason for it.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from itertools import count

from djinn_client.protocol import CLASSES, Class
from djinnd.core.batch import Batch, Row
from djinnd.core.request import Request
from djinnd.core.session import Session
from djinnd.kvcache.manager import KvManager
from djinnd.scheduler.batch.batch_builder import BatchBuilder
from djinnd.scheduler.batch.step_budget import step_limits
from djinnd.scheduler.policy import DEFAULT, Policy, Target
from djinnd.scheduler.scheduler import Scheduler
from djinnd.scheduler.timing.step_times import StepTimes
from djinnd.scheduler.tuning import FAIRNESS, STEP

PAGE = 16  # tokens
MAX_CONTEXT = 1 << 14
UNLIMITED = Policy(dict.fromkeys(CLASSES, Target()))  # no step is limited
FOREVER = 1 << 13  # tokens: no test runs that long
EVERY = 16  # steps between two audits


def rising(base: float, token: float) -> Callable[[int], float]:
    """Steps take `base` seconds, and `token` more for each token."""
    return lambda tokens: base + token * tokens


STEPS = rising(0.01, 0.0001)


def measured(times: StepTimes, seconds: Callable[[int], float]) -> None:
    """Records measured steps of all sizes, with seconds by their tokens."""
    for size in sorted({round(2 ** (bucket / 2)) for bucket in range(27)}) * 4:
        times.note(size, 0, seconds(size))
        times.note(1, size, seconds(1 + size))


class VirtualDevice:
    """Serves requests until they end.

    `used`: device time by class and tenant. The time of a step with decode rows only is divided equally between the
    rows; the additional time of further tokens is divided by tokens.
    """

    def __init__(
        self,
        *models: str,
        seconds: Callable[[int], float] = STEPS,
        pages: int = 1 << 12,
        max_tokens: int = 512,
        max_rows: int = 64,
        policy: Policy = DEFAULT,
        weights: Mapping[int, float] | None = None,
    ) -> None:
        """Starts with measured step times."""
        self.scheduler = Scheduler(max_tokens, max_rows, policy)
        self.seconds = seconds
        self.kv = {name: KvManager(pages + 1, PAGE, 1 << 20, MAX_CONTEXT) for name in models or ("m",)}
        for name, kv in self.kv.items():
            self.scheduler.add_model(name, kv, MAX_CONTEXT, num_blocks=2)
            measured(self.batch_builder(name).times, seconds)
        for tenant, weight in (weights or {}).items():
            self.scheduler.set_tenant(tenant, weight, None)
        self.now = 0.0
        self.used: defaultdict[tuple[Class, int], float] = defaultdict(float)
        self.rows: defaultdict[str, int] = defaultdict(int)  # by session
        self.batches: list[list[tuple[str, int]]] = []  # sessions and tokens
        # by model and class: when a session with a target last had a request, and the tightest target then
        self.last_target: dict[tuple[str, Class], tuple[float, float]] = {}
        self._due: dict[str, float] = {}  # time by which a session must have its next row
        self._ids = count(1)

    def batch_builder(self, model: str = "m") -> BatchBuilder:
        return self.scheduler.queues[model].batch_builder

    def active(self, model: str = "m") -> list[Session]:
        return list(self.scheduler.queues[model].active.values())

    def open(
        self,
        name: str,
        priority: Class = "agent",
        tenant: int = 1,
        prompt: int = 1,
        max_tokens: int = FOREVER,
        model: str = "m",
        **more: object,
    ) -> Session:
        """Opens a session with a request for a prompt that no other session has."""
        session = Session(name, model, tenant, priority)
        self.scheduler.open(session)
        self.ask(session, prompt, max_tokens, **more)
        return session

    def ask(self, session: Session, prompt: int = 1, max_tokens: int = FOREVER, **more: object) -> Request:
        first = len(session.tokens)
        request = Request(next(self._ids), first, first + prompt, max_tokens, **more)  # type: ignore[arg-type]
        self.scheduler.tick(self.now)
        self.scheduler.submit(session.id, request, [request.id] * prompt)
        self._waits(session)
        return request

    def idle(self, seconds: float) -> None:
        self.now += seconds
        self.scheduler.tick(self.now)

    def release(self, request: Request) -> None:
        self.scheduler.tick(self.now)
        self.scheduler.release(request.id)
        for session in self.scheduler.sessions():
            if session.request is request:
                self._waits(session)

    def step(self) -> Batch | None:
        self.scheduler.tick(self.now)
        aged = {name: self.batch_builder(name)._ageing.first(self.now) for name in self.kv}
        pages_are_short = {name: kv.pool.free < self._pages_to_come(name) for name, kv in self.kv.items()}
        remaining = {session.id: session.remaining for session in self.scheduler.sessions()}
        lateness = {name: self._lateness(name) for name in self.kv}
        batch = self.scheduler.next_batch()
        if batch is None:
            assert not any(self.active(name) for name in self.kv), "somebody waits, and nobody runs"
            return None
        self._note_targets(batch.model)
        step = Step(self, batch, aged[batch.model], remaining, lateness[batch.model])
        step.check_targets()
        if not pages_are_short[batch.model]:
            step.check_left_out()
        self._take(batch)
        return batch

    def _note_targets(self, model: str) -> None:
        for priority in CLASSES:
            sessions = [session for session in self.active(model) if session.priority == priority]
            target = min([self.scheduler.policy.target(one).between_tokens for one in sessions], default=math.inf)
            if target < math.inf:
                self.last_target[model, priority] = self.now, target

    def _lateness(self, model: str) -> dict[Class, float]:
        """By class: the longest wait without a row of a session that reads a prompt, as a multiple of its target."""
        lateness: dict[Class, float] = dict.fromkeys(CLASSES, 0.0)
        for session in self.active(model):
            if session.remaining > 1 and not self.scheduler.queues[model].residency.is_moving(session):
                late = (self.now - session.row_at) / self.scheduler.policy.target(session).first_token
                lateness[session.priority] = max(lateness[session.priority], late)
        return lateness

    def _pages_to_come(self, model: str) -> int:
        kv = self.kv[model]
        return sum(kv.pages_for(len(s.tokens)) - kv.pages_held(s.id) for s in self.active(model))

    def _take(self, batch: Batch) -> None:
        self.batches.append([(row.session.id, row.count) for row in batch.rows])
        seconds = self.seconds(batch.tokens)
        each = self.seconds(len(batch.rows)) / len(batch.rows)
        extra = (seconds - each * len(batch.rows)) / max(batch.tokens - len(batch.rows), 1)
        for row in batch.rows:
            self.used[row.session.priority, row.session.tenant] += each + (row.count - 1) * extra
            self.rows[row.session.id] += 1
            self._waits(row.session)
        for session in self.active(batch.model):
            assert self.now <= self._due[session.id], f"{session.id} starves"
        self.now += seconds
        self.scheduler.tick(self.now)
        self.scheduler.complete(batch, [0] * sum(row.samples for row in batch.rows), seconds)
        if len(self.batches) % EVERY == 0:
            self.scheduler.check_integrity()

    def _waits(self, session: Session) -> None:
        """Sets the time by which the session must have its next row: an ageing period for each session, because ageing
        first serves sessions that have waited longer. Without lower tiers, a session in prefill keeps its pages."""
        active = self.active(session.model)
        longest = self.seconds(self.scheduler.max_batch_tokens) * len(self.kv)
        period = max(self.scheduler.policy.ageing, FAIRNESS.aged_rows * longest) + longest
        self._due[session.id] = self.now + len(active) * period
        if self._pages_to_come(session.model) > self.kv[session.model].pool.free:
            self._due[session.id] += longest * max([len(other.tokens) for other in active], default=0)

    def run(self, seconds: float) -> None:
        """Runs steps for so many seconds, or until no request is left."""
        until = self.now + seconds
        while self.now < until and self.step() is not None:
            pass


class Step:
    """A composed step that has not run."""

    def __init__(
        self,
        device: VirtualDevice,
        batch: Batch,
        aged: Session | None,
        remaining: dict[str, int],
        lateness: dict[Class, float],
    ) -> None:
        self.batch = batch
        self.remaining = remaining  # tokens by session, before the step was composed
        self.times: StepTimes = device.batch_builder(batch.model).times
        self.most = (device.scheduler.max_batch_tokens, device.scheduler.max_rows)
        served = {row.session for row in batch.rows}
        self.left_out = [session for session in device.active(batch.model) if session not in served]
        self.rows = [row for row in batch.rows if row.session is not aged]
        self.aged = [row for row in batch.rows if row.session is aged]
        targets: dict[Class, list[float]] = {priority: [] for priority in CLASSES}
        for session in device.active(batch.model):
            if remaining[session.id] == 1:
                targets[session.priority].append(device.scheduler.policy.target(session).between_tokens)
        self.decoding = {priority: len(some) for priority, some in targets.items()}
        recent = {
            priority: target
            for (name, priority), (at, target) in device.last_target.items()
            if name == batch.model and device.now - at < STEP.recent_s
        }
        tightest = {priority: min(some, default=math.inf) for priority, some in targets.items()}
        self.limits = step_limits(recent, tightest, lateness)

    def of(self, *classes: Class) -> list[Row]:
        return [row for row in self.rows if row.session.priority in classes]

    def reads(self, row: Row) -> bool:
        return self.remaining[row.session.id] > 1

    def takes(self, rows: Sequence[Row]) -> float:
        return self.times.predict(max(len(rows), 1), sum(row.count - 1 for row in rows))

    def check_targets(self) -> None:
        """No class makes the step longer than the targets of higher classes allow, nor its prompts longer than the
        targets of its own class allow. Rows that miss their targets by themselves may be overrun a little."""
        for place, priority in enumerate(CLASSES):
            before, own = [*self.aged, *self.of(*CLASSES[:place])], self.of(priority)
            limits, chunks = self.limits[priority], sum(row.count for row in own if self.reads(row))
            longest = max(limits.rows, STEP.overrun * self.takes(before)) + 1e-9
            is_least = not before and sum(row.count for row in own) == 1
            is_small = not before and chunks <= STEP.least_chunk
            if own and not is_least and not is_small:
                assert self.takes([*before, *own]) <= longest, f"{priority}: higher classes wait"
            alone = self.times.predict(len(before) + self.decoding[priority], sum(row.count - 1 for row in before))
            if chunks > STEP.least_chunk:
                may = max(limits.chunks, STEP.overrun * alone) + 1e-9
                assert self.takes([*before, *own]) <= may, f"{priority}: its own sessions wait"

    def check_left_out(self) -> None:
        """For steps in which pages are not short."""
        if self.batch.tokens == self.most[0] or len(self.batch.rows) == self.most[1]:
            return
        rows, further = len(self.batch.rows), self.batch.tokens - len(self.batch.rows)
        for session in self.left_out:
            reads = self.remaining[session.id] > 1
            limits = self.limits[session.priority]
            with_it = self.times.predict(rows + 1, further + reads)
            may = min(limits.rows, limits.chunks) if reads else limits.rows
            assert with_it >= may - 1e-6, f"{session.id} is left out though there is room"
