"""Latencies that clients notice: histograms for each class, and small ones for each session.

    call received ─ queued ─► first row ──► first token ─► token ─► token
    └──────────── first token ────────────┘            └────────┘ between tokens
    COMPUTE, or the call ─── wake-up ─────┘                           of a session whose KV had left the device

The bounds of a histogram's buckets grow by a ratio, six buckets to a doubling, so a percentile is exact to an eighth at
any size. Only buckets with values take memory, so a session and a class can use the same type. prometheus_client is not
used: its `observe` took 1.1 µs here for one histogram. This runs for every token on the server's event loop, where
`SessionLatency.token` takes 0.4 µs for two histograms. metrics.py exports them.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass, field

from djinn_client.protocol.fields.scheduling import Class, Latency, Spread

_LEAST, _DOUBLINGS, _A_DOUBLING = 1e-4, 23, 6
BOUNDS = tuple(_LEAST * 2 ** (step / _A_DOUBLING) for step in range(_DOUBLINGS * _A_DOUBLING + 1))  # up to 839 s
_RANKS = (0.50, 0.90, 0.99)


class Histogram:
    """A histogram of times in seconds. Bucket i counts times up to BOUNDS[i]; the last bucket has no bound."""

    __slots__ = ("_counts", "_worst", "total")

    def __init__(self) -> None:
        self.total = 0.0  # seconds
        self._counts: dict[int, int] = {}  # by bucket
        self._worst = 0.0

    def add(self, seconds: float, bucket: int | None = None) -> None:
        """Adds a time. `bucket` is its bucket, if the caller has found it already."""
        if bucket is None:
            bucket = bisect_left(BOUNDS, seconds)
        counts = self._counts
        counts[bucket] = counts.get(bucket, 0) + 1
        self.total += seconds
        if seconds > self._worst:
            self._worst = seconds

    @property
    def count(self) -> int:
        return sum(self._counts.values())

    def below(self, every: int) -> list[tuple[float, int]]:
        """Pairs (bound, number of times up to it) for each `every`-th bound, and (inf, number of all times)."""
        found, so_far = [], 0
        for bucket, bound in enumerate(BOUNDS):
            so_far += self._counts.get(bucket, 0)
            if bucket % every == 0:
                found.append((bound, so_far))
        return [*found, (math.inf, self.count)]

    def spread(self) -> Spread:
        count = self.count
        if not count:
            return Spread()
        p50, p90, p99 = self._percentiles(count)
        return Spread(count, self.total / count, p50, p90, p99, self._worst)

    def _percentiles(self, count: int) -> list[float]:
        """The bounds of the buckets that contain the ceil(rank * count)-th smallest times."""
        found, so_far = [], 0
        buckets = iter(sorted(self._counts.items()))
        bucket = -1
        for rank in _RANKS:
            while so_far < rank * count:
                bucket, inside = next(buckets)
                so_far += inside
            found.append(min(BOUNDS[bucket], self._worst) if bucket < len(BOUNDS) else self._worst)
        return found


@dataclass(slots=True, eq=False)
class Latencies:
    """The histograms of one session, or of one class: of all sessions, for the times at which they had it."""

    queued: Histogram = field(default_factory=Histogram)
    first_token: Histogram = field(default_factory=Histogram)
    between_tokens: Histogram = field(default_factory=Histogram)
    wake_up: Histogram = field(default_factory=Histogram)

    def told(self) -> Latency:
        return Latency(*(getattr(self, kind).spread() for kind in Latency.__struct_fields__))


class SessionLatency:
    """Measures one session's calls, one at a time: called, started, then each token. Times count for the session and
    for the class that it has then. Callers give the times, by CLOCK_MONOTONIC.

    Delays by the client itself, which reads slowly or has paused the session, are not measured: see `interrupted`.
    """

    __slots__ = ("_asked", "_awaits_first", "_classes", "_last", "_own", "_received", "_woken")

    def __init__(self, classes: Mapping[Class, Latencies]) -> None:
        """`classes`: the histograms over all sessions, by class."""
        self._classes = classes
        self._own: Latencies | None = None  # None until something is measured, as for most sessions
        self._received = self._asked = 0.0
        self._woken = self._awaits_first = False
        self._last: float | None = None  # time of the previous token

    def called(self, received: float, asked: float) -> None:
        """Begins a call. `asked`: when the client first announced or made the call, at most `received`."""
        self._received, self._asked = received, min(asked, received)
        self._woken, self._awaits_first, self._last = False, True, None

    def started(self, at: float, woken: bool, priority: Class) -> None:
        """Records the first row of the call. `woken`: the session's KV had left the device."""
        if not self._awaits_first:
            return
        self._woken = woken
        queued = max(0.0, at - self._received)  # the engine uses the same clock, but is not trusted
        self._mine().queued.add(queued)
        self._classes[priority].queued.add(queued)

    def token(self, at: float, priority: Class) -> None:
        last, self._last = self._last, at
        if last is not None:
            gap = at - last
            bucket = bisect_left(BOUNDS, gap)
            self._mine().between_tokens.add(gap, bucket)
            self._classes[priority].between_tokens.add(gap, bucket)
        elif self._awaits_first:
            self._awaits_first = False
            self._first_token(at, priority)

    def _first_token(self, at: float, priority: Class) -> None:
        for kept in (self._mine(), self._classes[priority]):
            kept.first_token.add(at - self._received)
            if self._woken:
                kept.wake_up.add(at - self._asked)

    def interrupted(self) -> None:
        """Skips the time until the call's next token, after a delay that the client has caused."""
        self._awaits_first, self._last = False, None

    def told(self) -> Latency:
        return Latency() if self._own is None else self._own.told()

    def _mine(self) -> Latencies:
        if self._own is None:
            self._own = Latencies()
        return self._own
