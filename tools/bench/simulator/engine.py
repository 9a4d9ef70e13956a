"""An engine in virtual time: the daemon's own scheduler, over a device that is a table of costs.

    hear events ─► end copies ─► begin copies ─► compose ─► the step takes its time ─► complete

The order is the one of Engine.serve. All other events have their time. Nothing is computed: tokens are numbers without
a meaning, and pages have no bytes.
"""

from __future__ import annotations

import heapq
import math
import time
from bisect import bisect_left
from collections import Counter, defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass
from itertools import count, cycle

import msgspec

from djinn_client.protocol.fields.scheduling import CLASSES, Class
from djinnd.core.batch import Batch
from djinnd.core.request import Request
from djinnd.core.session import Session
from djinnd.kvcache.copy_queue import CopyQueue
from djinnd.kvcache.manager import KvManager
from djinnd.kvcache.moves import Direction, Move
from djinnd.kvcache.paging import Paging
from djinnd.kvcache.tier import Tier
from djinnd.scheduler.policy import TARGETS, Policy, Target
from djinnd.scheduler.scheduler import Scheduler
from djinnd.scheduler.tuning import STEP
from djinnd.scheduler.waits import Waits, back_at, is_worth_leaving

MODEL = "m"
TEND_S = 0.25
TOKEN = 1
FIRST_TOKEN_S = 0.4  # the target beside `between_tokens`
IN_FLIGHT = 512 << 20  # bytes in each direction, as in Transfers

Curve = tuple[tuple[float, float], ...]  # points of rising x with straight lines between; the last line continues


class Machine(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Costs of a device with its model: seconds, pages of `page_size` tokens, bytes."""

    name: str
    rows: Curve  # seconds of a step, by its rows of one token
    chunk: Curve  # further seconds, by the tokens beside the first one of each row
    another: float = 0.0  # further seconds for each row of several tokens after the first such row
    kv_token: float = 0.0  # further seconds for each token of KV that a row of one token reads
    jitter: tuple[float, ...] = (1.0,)  # factors of a step's time, for one step after another, repeated
    call: float = 0.0  # seconds that a call and its answer's first token travel, together
    page_size: int
    page_bytes: int
    pages: int
    host_pages: int = 0
    up: float = math.inf  # bytes a second to the device, also while the other direction is busy
    down: float = math.inf
    moving: float = 0.0  # further seconds of a page's copy, until it begins and until its end is noticed
    beside: float = 0.0  # further seconds of a step for each byte on the bus meanwhile
    hearing: float = 0.0  # further seconds of a step for each call that is heard before it
    synchronous: bool = False  # copies begin after a step and not beside it, as on the CPU, which computes the step
    max_context: int
    max_tokens: int  # of a step
    max_rows: int

    def seconds(self, batch: Batch) -> tuple[float, float, float]:
        """Seconds of a step: of its rows, of the tokens beside the first of each row, and of reading KV."""
        rows = len(batch.rows)
        extra, singles = batch.tokens - rows, [row.end for row in batch.rows if row.count == 1]
        further = at(self.chunk, extra) + (rows - len(singles) - 1) * self.another if extra else 0.0
        return at(self.rows, rows), further, sum(singles) * self.kv_token


def at(curve: Curve, x: float) -> float:
    """The curve's value at x; before the first point it is level."""
    if x <= curve[0][0]:
        return curve[0][1]
    above = min(max(bisect_left(curve, (x, -math.inf)), 1), len(curve) - 1)
    if len(curve) == 1:
        return curve[0][1]
    (x0, y0), (x1, y1) = curve[above - 1], curve[above]
    return y0 + (y1 - y0) * (x - x0) / (x1 - x0)


@dataclass(slots=True)
class Answer:
    """Receives the answer of a call. `token` is called for each token, and `done` after the last one."""

    token: Callable[[float, float | None], object]  # now, and the time of the token before
    done: Callable[[], object]
    last: float | None = None
    started: float | None = None


class SimulatedEngine:
    def __init__(self, machine: Machine, between_tokens: float | None = None) -> None:
        """`between_tokens`: the target of all classes in seconds; None: the default targets."""
        targets = TARGETS if between_tokens is None else dict.fromkeys(CLASSES, Target(between_tokens, FIRST_TOKEN_S))
        self.machine = machine
        self.now = 0.0
        self.busy_s = 0.0  # device time of steps
        self.steps = self.rows = self.tokens = 0
        self.composed_s = self.completed_s = 0.0  # processor time of this thread in the scheduler
        self.moved: Counter[Direction] = Counter()  # moved pages
        self.device_s: Callable[[int, float], object] = lambda tenant, seconds: None  # called with shares of a step
        self.ran: Callable[[Batch, float], object] = lambda batch, seconds: None  # called with each step
        self._kv = KvManager(machine.pages + 1, machine.page_size, machine.page_bytes, machine.max_context)
        self._paging = Paging(self._kv)
        if machine.host_pages:
            table = memoryview(bytearray(Tier.table_bytes(machine.host_pages)))
            self._paging.use_host(Tier(table, machine.host_pages, page_bytes=machine.page_bytes))
        self.scheduler = Scheduler(machine.max_tokens, machine.max_rows, Policy(targets))
        self.scheduler.add_model(MODEL, self._kv, machine.max_context, 1, self._paging)
        self._residency = self.scheduler.queues[MODEL].residency
        self._residency.lower_tiers.costs.bus = machine.up if machine.up < math.inf else 0.0
        self._waits = Waits()
        self._requests = count(1)
        self.unseen = count(TOKEN + 1)  # tokens that no call has used, so that no two prompts begin alike
        self._answers: dict[int, Answer] = {}  # by request
        self._events: list[tuple[float, int, Callable[[], object]]] = []
        self._order = count()
        self._jitter = cycle(machine.jitter)
        self._heard = 0  # calls, since the last step
        self._tend_at = 0.0
        self._lanes: dict[Direction, deque[tuple[float, Move]]] = {
            Direction.DEMOTE: deque(),
            Direction.PROMOTE: deque(),
        }
        self._queues = {way: CopyQueue() for way in self._lanes}
        self._copying_rate = math.inf  # see CopyQueue.pace

    # --- what clients do --------------------------------------------------------------------------------------------

    def at(self, when: float, do: Callable[[], object]) -> None:
        heapq.heappush(self._events, (when, next(self._order), do))

    def open(self, name: str, tenant: int, priority: Class) -> None:
        self.scheduler.open(Session(name, MODEL, tenant, priority))

    def close(self, name: str) -> None:
        self._end_wait(name)
        self.scheduler.close(name)

    def clear(self) -> None:
        """Closes all sessions with their work, and drops all events."""
        self._events.clear()
        for session in list(self.scheduler.sessions()):
            self._end_wait(session.id)
            if (request := self.scheduler.close(session.id)) is not None:
                del self._answers[request.id]

    def call(self, name: str, prompt: list[int], max_tokens: int, answer: Answer) -> None:
        """A call of a session. Raises PromptTooLong, OutOfMemory."""
        self._end_wait(name)
        first = len(self.scheduler.session(name).tokens)
        request = Request(next(self._requests), first, first + len(prompt), max_tokens)
        self.scheduler.submit(name, request, prompt)
        self._answers[request.id] = answer
        self._heard += 1

    def truncate(self, name: str, length: int) -> None:
        self.scheduler.truncate(name, length)

    def wait(self, name: str, expected_s: float | None, tool: str) -> None:
        """A session's IO_WAIT, as Tiers handles it."""
        session = self.scheduler.session(name)
        self._waits.begin(name, session.tenant, tool, self.now)
        expected = self._waits.expected(session.tenant, tool) if expected_s is None else expected_s
        held = self._kv.pages_held(name)
        pages = held or self._kv.pages_for(min(session.left_at, len(session.tokens)))
        copying = pages * self.machine.page_bytes / self.machine.up
        if session.waits or not held or is_worth_leaving(expected, copying):
            self.scheduler.wait(name, back_at(self.now, expected, copying))

    def wake(self, name: str) -> None:
        self._end_wait(name)
        self.scheduler.wake(name)

    def _end_wait(self, name: str) -> None:
        for other, since, expected in self._waits.end(name, self.now):
            self.scheduler.expect(other, since + expected)

    # --- the loop ---------------------------------------------------------------------------------------------------

    def run(self, until: float) -> None:
        """Runs until that time, or until no event is left. Events during a step are heard at its end."""
        while self.now < until:
            if self.turn():
                continue
            following = self._next_event()
            if following == math.inf:
                return
            self.now = max(self.now, min(following, until))

    def turn(self) -> bool:
        """One turn of the loop. Returns whether it ran a step."""
        self.scheduler.tick(self.now)
        while self._events and self._events[0][0] <= self.now:
            heapq.heappop(self._events)[2]()
        if self.now >= self._tend_at or self.now >= self.scheduler.next_wake:
            self._tend_at = self.now + TEND_S
            self.scheduler.tend(self.now)
        self._end_copies()
        self._queue_copies()
        if not self.machine.synchronous:
            self._begin_copies()
        began = time.thread_time()
        batch = self.scheduler.next_batch()
        self.composed_s += time.thread_time() - began
        while self.scheduler.depart():
            pass
        if batch is None:
            self._copying_rate = math.inf
            self._queue_copies()  # the decision has requested them
            self._begin_copies()
            return False
        self._step(batch)
        if self.machine.synchronous:
            self._begin_copies()
        return True

    def _next_event(self) -> float:
        copies = [lane[0][0] for lane in self._lanes.values() if lane]
        called = [self._events[0][0]] if self._events else []
        tended = [max(self._tend_at, self.now), max(self.scheduler.next_wake, self.now)] if called or copies else []
        return min([*copies, *called, *tended], default=math.inf)

    def _step(self, batch: Batch) -> None:
        alike, beside, reading = self.machine.seconds(batch)
        if self.machine.beside:
            alike += self._crossing(alike + beside + reading) * self.machine.beside
        alike += self._heard * self.machine.hearing
        self._heard = 0
        jitter = next(self._jitter)
        is_paced = any(map(self.scheduler.policy.protects, batch.rows))
        self._copying_rate = self.scheduler.policy.paging * self.machine.up if is_paced else math.inf
        seconds = (alike + beside + reading) * jitter
        self._share_out(batch, (alike + reading) * jitter, beside * jitter)
        for row in batch.rows:
            answer = self._answers[row.request.id]
            if answer.started is None:
                answer.started = self.now
        self.ran(batch, seconds)
        self.now += seconds
        self.busy_s += seconds
        self.steps += 1
        self.rows += len(batch.rows)
        self.tokens += batch.tokens
        if batch.tokens - len(batch.rows) >= STEP.least_chunk:
            costs, seen = self._residency.lower_tiers.costs, batch.tokens / seconds
            costs.prefill = seen if not costs.prefill else 0.8 * costs.prefill + 0.2 * seen
        sampling = [row for row in batch.rows if row.samples]
        for row in sampling:
            answer = self._answers[row.request.id]
            answer.token(self.now, answer.last)
            answer.last = self.now
        began = time.thread_time()
        ended = self.scheduler.complete(batch, [TOKEN] * len(sampling), seconds)
        self.completed_s += time.thread_time() - began
        for request in ended:
            self._answers.pop(request.id).done()

    def _share_out(self, batch: Batch, alike: float, beside: float) -> None:
        extra = max(batch.tokens - len(batch.rows), 1)
        shares: defaultdict[int, float] = defaultdict(float)
        for row in batch.rows:
            shares[row.session.tenant] += alike / len(batch.rows) + beside * (row.count - 1) / extra
        for tenant, seconds in shares.items():
            self.device_s(tenant, seconds)

    def _end_copies(self) -> None:
        """Ends the copies that have arrived."""
        for way, lane in self._lanes.items():
            while lane and lane[0][0] <= self.now:
                move = lane.popleft()[1]
                self.moved[way] += 1
                over = self._paging.moves.landed(move)
                if way is Direction.DEMOTE:
                    over = over + self._paging.moves.sealed(move, 0)
                self.scheduler.queues[MODEL].over(over)

    def _queue_copies(self) -> None:
        """Queues the copies that the scheduler has requested."""
        for move in self._paging.moves.take(self._paging.moves.waiting):
            self._queues[move.direction].add(move)

    def _begin_copies(self) -> None:
        """Begins copies, one after another in each direction."""
        have_dropped, self._paging.moves.has_dropped = self._paging.moves.has_dropped, False
        for way, queue in self._queues.items():
            if have_dropped:
                queue.drop()
            queue.hurry()
            queue.pace(self._copying_rate, self.now)
            lane, seconds = self._lanes[way], self.machine.page_bytes / self._rate(way)
            while (queued := queue.next) and len(lane) * self.machine.page_bytes < IN_FLIGHT:
                move = queued.popleft()
                queue.began(queued, [move], self.machine.page_bytes)
                may_begin = self.now + self.machine.moving
                lane.append((max(lane[-1][0], may_begin) + seconds if lane else may_begin + seconds, move))

    def _rate(self, way: Direction) -> float:
        return self.machine.up if way is Direction.PROMOTE else self.machine.down

    def _crossing(self, seconds: float) -> float:
        """Bytes that cross the bus in the next `seconds`, in both directions together."""
        return sum(self._crossing_by(way, self.now + seconds) for way in self._lanes)

    def _crossing_by(self, way: Direction, until: float) -> float:
        rate, now = self._rate(way), self.now
        took = self.machine.page_bytes / rate
        moves = [min(end, until) - max(end - took, now) for end, _ in self._lanes[way]]
        seconds = [one for one in moves if one > 0]
        return sum(seconds) * rate if seconds else 0.0
