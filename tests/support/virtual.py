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
from djinnd.scheduler.policy import (
    BUSY_STEPS,
    CROWDED_BY_LOWER,
    CROWDED_SLOWDOWN,
    DEFAULT,
    INDULGENCE,
    LATELY_S,
    LEAST_CHUNK,
    PATIENCE_S,
    KvRead,
    Policy,
)
from djinnd.scheduler.scheduler import Scheduler
from djinnd.scheduler.timing.kv_time import SLOPES, TELLING
from djinnd.scheduler.timing.step_times import StepTimes
from djinnd.scheduler.turns.ageing import ROWS

PAGE = 16  # tokens
MAX_CONTEXT = 1 << 14
FOREVER = 1 << 13  # tokens: no test runs that long
LONGEST = 1 << 10  # tokens: most growth of a session before its next row is due, where reading KV takes time
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


def measured_kv(times: StepTimes, seconds: float, kv_s: float) -> None:
    """Records measured steps of one row with short and long KV: `seconds`, and `kv_s` more for each token of KV."""
    for number in range(2 * SLOPES):
        kv = number % 2 * TELLING
        times.note(1, 0, seconds + kv * kv_s, kv)


class VirtualDevice:
    """Serves requests until they end. `kv_s`: seconds that a step takes for each token of KV read by rows of one token.

    `used`: device time by class and tenant. The time of a step with decode rows only is divided equally between the
    rows; the additional time of further tokens is divided by tokens.
    """

    def __init__(
        self,
        *models: str,
        seconds: Callable[[int], float] = STEPS,
        pages: int = 1 << 14,
        max_tokens: int = 512,
        max_rows: int = 64,
        policy: Policy = DEFAULT,
        weights: Mapping[int, float] | None = None,
        kv_s: float = 0.0,
    ) -> None:
        """Starts with measured step times."""
        self.scheduler = Scheduler(max_tokens, max_rows, policy)
        self.seconds = seconds
        self.kv_s = kv_s
        self.kv = {name: KvManager(pages + 1, PAGE, 1 << 20, MAX_CONTEXT) for name in models or ("m",)}
        for name, kv in self.kv.items():
            self.scheduler.add_model(name, kv, MAX_CONTEXT, num_blocks=2)
            measured(self.batch_builder(name).times, seconds)
            if kv_s:
                measured_kv(self.batch_builder(name).times, seconds(1), kv_s)
        for tenant, weight in (weights or {}).items():
            self.scheduler.set_tenant(tenant, weight, None)
        self.now = 0.0
        self.used: defaultdict[tuple[Class, int], float] = defaultdict(float)
        self.rows: defaultdict[str, int] = defaultdict(int)  # by session
        self.batches: list[list[tuple[str, int]]] = []  # sessions and tokens
        self.called_at: dict[tuple[str, Class], float] = {}  # by model: the time of the class's last call
        self._due: dict[str, float] = {}  # time by which a session must have its next row
        self._ids = count(1)

    def batch_builder(self, model: str = "m") -> BatchBuilder:
        return self.scheduler._queues[model].batch_builder

    def active(self, model: str = "m") -> list[Session]:
        return list(self.scheduler._queues[model].active.values())

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
        for name in self.kv:
            self.called_at.update({(name, s.priority): self.now for s in self.active(name) if not s.bulk})
        waited = {name: self._waited(name) for name in self.kv}
        batch = self.scheduler.next_batch()
        if batch is None:
            assert not any(self.active(name) for name in self.kv), "somebody waits, and nobody runs"
            return None
        step = Step(self, batch, aged[batch.model], remaining, waited[batch.model])
        step.check_protection()
        if not pages_are_short[batch.model]:
            step.check_left_out()
        self._take(batch)
        return batch

    def _waited(self, model: str) -> dict[Class, float]:
        """By class: the longest time that a session with prompt tokens left has had no row."""
        waited: dict[Class, float] = dict.fromkeys(CLASSES, 0.0)
        for session in self.active(model):
            if session.remaining > 1 and not self.scheduler.residency(model).is_moving(session):
                waited[session.priority] = max(waited[session.priority], self.now - session.row_at)
        return waited

    def _pages_to_come(self, model: str) -> int:
        kv = self.kv[model]
        return sum(kv.pages_for(len(s.tokens)) - kv.pages_held(s.id) for s in self.active(model))

    def _take(self, batch: Batch) -> None:
        self.batches.append([(row.session.id, row.count) for row in batch.rows])
        reading = self.kv_s * sum(row.start for row in batch.rows if row.count == 1)
        seconds = self.seconds(batch.tokens) + reading
        each = (self.seconds(len(batch.rows)) + reading) / len(batch.rows)
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
        kv = max((len(other.tokens) for other in active), default=0) + LONGEST
        reading = self.kv_s * self.scheduler.max_rows * kv
        longest = (self.seconds(self.scheduler.max_batch_tokens) + reading) * len(self.kv)
        period = max(self.scheduler.policy.ageing, ROWS * longest) + longest
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
        waited: dict[Class, float],
    ) -> None:
        self.batch = batch
        self.waited = waited  # see VirtualDevice._waited
        self.remaining = remaining  # tokens by session, before the step was composed
        self.times: StepTimes = device.batch_builder(batch.model).times
        self.kv = device.batch_builder(batch.model)._kv_read
        self.reads_kv = bool(device.kv_s)
        self.policy = device.scheduler.policy
        calls = ((priority, at) for (name, priority), at in device.called_at.items() if name == batch.model)
        self.lately = {priority for priority, at in calls if device.now - at < LATELY_S}
        self.limits = (device.scheduler.max_batch_tokens, device.scheduler.max_rows)
        served = {row.session for row in batch.rows}
        self.left_out = [session for session in device.active(batch.model) if session not in served]
        self.rows = [row for row in batch.rows if row.session is not aged]
        self.aged = [row for row in batch.rows if row.session is aged]

    def of(self, *classes: Class) -> list[Row]:
        return [row for row in self.rows if row.session.priority in classes]

    def reads(self, row: Row) -> bool:
        return self.remaining[row.session.id] > 1

    def takes(self, rows: Sequence[Row], *, kv: bool = True) -> float:
        """Seconds of a step with these rows, if each reads its class's average KV, or none."""
        tokens = sum(self.reading(row.session.priority).now for row in rows if not self.reads(row)) if kv else 0.0
        return self.times.predict(len(rows), sum(row.count - 1 for row in rows), tokens) if rows else 0.0

    def reading(self, priority: Class) -> KvRead:
        return self.kv.get(priority, KvRead())

    def protected(self, priority: Class) -> int:
        """The number of the class's sessions that decode and must not be slowed down."""
        here = [row.session for row in self.rows] + self.left_out
        return sum(s.priority == priority and not s.bulk and self.remaining[s.id] == 1 for s in here)

    def allowed(self, *classes: Class, own: int = 0) -> float:
        """Seconds that a step may take for the sake of these classes' decode rows, and of `own` decode rows of the next
        class. Without decode rows: for the sake of the rows in prefill."""
        shielded = [row for row in self.of(*classes) if not row.session.bulk]
        decode = [row.session.priority for row in shielded if not self.reads(row)] + own * [CLASSES[len(classes)]]
        kv = sum(self.reading(priority).usual for priority in decode)
        alone = self.times.predict(len(decode), kv=kv) if decode else self.takes(shielded, kv=False)
        slowdown, usual = self.policy.slowdown, self.times.predict(1, kv=kv / len(decode)) if decode else alone
        crowded = min(slowdown, CROWDED_SLOWDOWN if own else CROWDED_BY_LOWER)
        longest = max(slowdown * usual, crowded * alone, self.policy.between_tokens)
        return longest + 1e-9 if alone else math.inf

    def indulgence(self, priority: Class) -> float:
        """The factor by which decode rows wait longer for waiting prompts of their own class."""
        return min(max(1.0, self.waited[priority] / PATIENCE_S), INDULGENCE) if priority != "interactive" else 1.0

    def until_free(self, priority: Class) -> float:
        """Seconds for which rows of the class may use the device while higher classes have none."""
        above = CLASSES[: CLASSES.index(priority)]
        if self.lately.isdisjoint(above) or not all(row.session.bulk for row in self.of(*above)):
            return math.inf
        least = self.times.predict(1, LEAST_CHUNK - 1)
        return max(BUSY_STEPS * self.times.predict(1), least, self.policy.between_tokens) + 1e-9

    def check_protection(self) -> None:
        took = self.takes(self.batch.rows)
        highest = min((row.session.priority for row in self.rows), key=CLASSES.index, default=CLASSES[0])
        first = self.of(highest)  # rows that join them are held to the slowdown, see below
        is_least = sum(row.count for row in first) == 1  # a session has a token in any case
        assert is_least or self.takes(first) <= self.until_free(highest), (
            "a call of a higher class would find the device taken"
        )
        for place, priority in enumerate(CLASSES[:-1]):
            above, below = CLASSES[: place + 1], CLASSES[place + 1 :]
            assert not self.of(*below) or took <= self.allowed(*above), f"{priority}: lower classes"
            own = self.protected(priority)
            chunks = sum(row.count for row in self.of(priority) if self.reads(row))
            may = self.allowed(*above[:-1], own=own) * self.indulgence(priority) if own else math.inf
            through = self.takes([*self.aged, *self.of(*above)])
            assert chunks <= LEAST_CHUNK or through <= may, f"{priority}: its own prompts"

    def check_left_out(self) -> None:
        """For steps in which pages are not short."""
        if self.batch.tokens == self.limits[0] or len(self.batch.rows) == self.limits[1]:
            return
        rows, further = len(self.batch.rows), self.batch.tokens - len(self.batch.rows)
        for session in self.left_out:
            above = CLASSES[: CLASSES.index(session.priority)]
            may = min((self.allowed(*above[: end + 1]) for end in range(len(above))), default=math.inf)
            may = min(may, self.until_free(session.priority))
            own = self.protected(session.priority) if session.priority != CLASSES[-1] else 0
            reads = self.remaining[session.id] > 1
            if reads and self.reads_kv:
                continue  # room was kept for the average KV of decoding sessions that have not been considered yet
            if reads and own:
                may = min(may, self.allowed(*above, own=own) * self.indulgence(session.priority))
            kv = sum(self.reading(row.session.priority).now for row in self.batch.rows if not self.reads(row))
            kv += 0.0 if reads else self.reading(session.priority).now
            with_it = self.times.predict(rows + 1, further + reads, kv)
            assert with_it >= may - 1e-6, f"{session.id} is left out though there is room"
