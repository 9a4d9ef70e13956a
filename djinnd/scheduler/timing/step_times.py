"""Predicts how long steps take, from measurements and without a model of the device.

    seconds = rows(number of rows) + further(tokens beyond one each)

`rows` is the time if each row brings one token, with the KV that recent rows have read. `further` is the time that
further tokens of prompts add.

With few rows, a step takes the time of reading the weights; with many, the time of multiplying with them; with a
streamed model, the time of the bus. A device that runs prompts with other kernels than single tokens shows it in
`further`. Both are curves that never fall, known at the sizes of recent steps.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from statistics import median_low

from djinnd.scheduler.tuning import TIMES

NO_LIMIT = 1 << 31


class StepTimes:
    """The step times of one model."""

    def __init__(self) -> None:
        self._rows = Curve()
        self._further = Curve()
        self._asked: Counter[int] = Counter()  # steps kept to a number of rows to measure it, by bucket

    def note(self, rows: int, further: int, seconds: float) -> None:
        """Notes a step of `rows` rows that brought `further` tokens beyond one each."""
        if further:
            self._further.note(further, max(seconds - self._rows.at(rows), 0.0))
            return
        known = self._rows.largest
        for forgotten in self._rows.note(rows, seconds):
            del self._asked[forgotten]
        if self._rows.largest > known:
            self._further.forget()

    def predict(self, rows: int, further: int = 0) -> float:
        """Seconds. Beyond the largest known size: the time of that size. 0 if unknown."""
        return self._rows.at(rows) + self._further_seconds(further)

    def _further_seconds(self, further: int) -> float:
        return self._further.at(further) if further else 0.0

    def of_guess(self, tokens: int) -> float:
        """Seconds that this many tokens of guesses add to a step. 0 until `TIMES.sure` steps with so few further tokens
        have been measured: some have to be tried, and one may be slow by chance."""
        return self._further.at(tokens) if self._further.measured_to(tokens) >= TIMES.sure else 0.0

    def is_sure(self, rows: int) -> bool:
        """True if enough steps of at most so many rows and nothing else have been measured."""
        return self._rows.measured_to(rows) >= TIMES.sure

    def rows_within(self, seconds: float, further: int = 0) -> int:
        """How many rows a step of at most `seconds` may have if it brings `further` further tokens."""
        return self._rows.within(seconds - self._further_seconds(further))

    def further_within(self, seconds: float, rows: int) -> int:
        """How many tokens beyond one each `rows` rows may bring in a step of at most `seconds`."""
        return self._further.within(seconds - self._rows.at(rows))

    def wants(self, rows: int) -> bool:
        """True if a step of this many rows and nothing else should run, to measure it: if others always join, its time
        is never seen. False after enough tries: see `ask`."""
        bucket = _bucket(rows)
        return self._rows.measured(bucket) < TIMES.sure and self._asked[bucket] < TIMES.patience

    def ask(self, rows: int) -> None:
        """Notes that a step is kept to this many rows. After `TIMES.patience` such steps, `wants` is False."""
        self._asked[_bucket(rows)] += 1


class Curve:
    """Seconds by size. Two buckets cover a doubling of the size."""

    def __init__(self) -> None:
        self._measured: dict[int, deque[float]] = {}  # the last few measurements, by bucket
        self._medians: dict[int, float] = {}  # medians of these
        self._seen: dict[int, int] = {}  # number of the last measurement in each bucket
        self._notes = 0
        self._points: list[tuple[int, float]] = []  # size and seconds, both rising

    def note(self, count: int, seconds: float) -> list[int]:
        """Notes a measurement; returns the buckets that were forgotten. The first measurement of a bucket is dropped:
        its step may have compiled kernels or captured graphs."""
        self._notes += 1
        bucket = _bucket(count)
        if bucket in self._seen:
            measured = self._measured.setdefault(bucket, deque(maxlen=TIMES.kept))
            measured.append(seconds)
            self._medians[bucket] = median_low(measured)
        self._seen[bucket] = self._notes
        forgotten = []
        if self._notes % TIMES.forgotten == 0:
            forgotten = [old for old in self._measured if self._notes - self._seen[old] >= TIMES.forgotten]
            for old in forgotten:
                del self._measured[old], self._medians[old]
        self._rebuild_points()
        return forgotten

    def forget(self) -> None:
        self._measured.clear()
        self._medians.clear()
        self._points.clear()

    @property
    def largest(self) -> int:
        """The largest known size; 0 if none is known."""
        return self._points[-1][0] if self._points else 0

    def measured(self, bucket: int) -> int:
        return len(self._measured.get(bucket, ()))

    def measured_to(self, count: int) -> int:
        """How many measurements of sizes up to `count` are kept."""
        last = _bucket(count)
        return sum([len(some) for bucket, some in self._measured.items() if bucket <= last])

    def _rebuild_points(self) -> None:
        """Makes the curve monotonic: a size takes at most what a larger one took. So a size that was slow by chance
        does not affect larger ones that were fast."""
        self._points.clear()
        fastest = math.inf
        for bucket in sorted(self._medians, reverse=True):
            fastest = min(fastest, self._medians[bucket])
            self._points.append((_middle(bucket), fastest))
        self._points.reverse()

    def at(self, count: int) -> float:
        """Seconds, by linear interpolation. Outside the known sizes: the time of the nearest. 0 if none is known."""
        below = (0, 0.0)
        for point in self._points:
            if count <= point[0]:
                return point[1] if not below[0] else _between(below, point, count)
            below = point
        return below[1]

    def within(self, seconds: float) -> int:
        """The largest size that takes at most `seconds`. Beyond the largest known size, twice that size is tried as if
        it took no longer. Below the smallest, size and time are proportional."""
        if seconds < 0.0:
            return 0
        if seconds == math.inf:
            return NO_LIMIT
        below = (0, 0.0)
        for count, takes in self._points:
            if takes > seconds:
                return int(below[0] + (count - below[0]) * (seconds - below[1]) / (takes - below[1]))
            below = (count, takes)
        return max(2 * below[0], TIMES.first)


def _bucket(count: int) -> int:
    return round(2 * math.log2(count))


def _middle(bucket: int) -> int:
    return round(2 ** (bucket / 2))


def _between(below: tuple[int, float], above: tuple[int, float], count: int) -> float:
    share = (count - below[0]) / (above[0] - below[0])
    return below[1] + share * (above[1] - below[1])
