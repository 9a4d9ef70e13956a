"""Predicts how long steps take, from measurements and without a model of the device.

    seconds = rows(number of rows) + further(tokens beyond one each) + kv_time * tokens of KV

`rows` is the time if each row brings one token. `further` is what the further tokens of prompts add. The last term is
the KV that one-token rows read.

With few rows, a step takes the time of reading the weights; with many, the time of multiplying with them; with a
streamed model, the time of the bus. A device that runs prompts with other kernels than single tokens shows it in
`further`. Both are curves that never fall, known at the sizes that have run lately.
"""

from __future__ import annotations

import math
from collections import Counter, deque

from djinnd.scheduler.timing.kv_time import KvTime

_KEPT = 5  # Measurements of a size; their median is used, which ignores outliers.
_FORGOTTEN = 1024  # Measurements after which a size that has not run is forgotten, because it may be faster now.
_FIRST = 16  # size that is tried if nothing is known
_SURE = 3  # Measurements of a number of rows alone after which its time counts as known.
_PATIENCE = 32  # Steps, at most, that are kept to a number of rows to measure it.
NO_LIMIT = 1 << 31


class StepTimes:
    """The step times of one model."""

    def __init__(self) -> None:
        self._rows = Curve()
        self._further = Curve()
        self._kv = KvTime()
        self._asked: Counter[int] = Counter()  # steps kept to a number of rows to measure it, by bucket

    def note(self, rows: int, further: int, seconds: float, kv: int = 0) -> None:
        """Notes a step of `rows` rows that brought `further` tokens beyond one each. `kv`: tokens of KV that its
        one-token rows read."""
        if further:
            self._further.note(further, max(seconds - self._row_seconds(rows, kv), 0.0))
            return
        if self._kv.note(rows, kv, seconds):
            self._rows.set_kv_token(self._kv.token_s)
        known = self._rows.largest
        for forgotten in self._rows.note(rows, seconds, kv):
            del self._asked[forgotten]
        if self._rows.largest > known:
            self._further.forget()

    def predict(self, rows: int, further: int = 0, kv: float = 0.0) -> float:
        """Seconds. Beyond the largest known size: the time of that size. 0 if unknown."""
        return self._row_seconds(rows, kv) + self._further_seconds(further)

    def _row_seconds(self, rows: int, kv: float) -> float:
        """Rows without further tokens. Their time without KV may be 0, as when a device has become faster since the KV
        time was learned."""
        return self._rows.at(rows) + self._kv.token_s * kv if self._rows.largest else 0.0

    def _further_seconds(self, further: int) -> float:
        return self._further.at(further) if further else 0.0

    def rows_within(self, seconds: float, further: int = 0, kv: float = 0.0, each: float = 0.0) -> int:
        """How many rows a step of at most `seconds` may have if it brings `further` further tokens. They read `kv`
        tokens of KV, and each of them `each` more."""
        token_s = self._kv.token_s
        return self._rows.within(seconds - self._further_seconds(further) - token_s * kv, token_s * each)

    def further_within(self, seconds: float, rows: int, kv: float = 0.0) -> int:
        """How many tokens beyond one each `rows` rows may bring in a step of at most `seconds`."""
        return self._further.within(seconds - self._row_seconds(rows, kv))

    def wants(self, rows: int) -> bool:
        """True if a step of this many rows and nothing else should run, to measure it: if others always join, its time
        is never seen. False after enough tries: see `ask`."""
        bucket = _bucket(rows)
        return self._rows.measured(bucket) < _SURE and self._asked[bucket] < _PATIENCE

    def ask(self, rows: int) -> None:
        """Notes that a step is kept to this many rows. After `_PATIENCE` such steps, `wants` is False."""
        self._asked[_bucket(rows)] += 1


class Curve:
    """Seconds by size, in buckets of which two make a doubling. The time of reading KV is taken off."""

    def __init__(self) -> None:
        self._kv_token_s = 0.0
        # the last few measurements, by bucket: seconds, and tokens of KV
        self._measured: dict[int, deque[tuple[float, int]]] = {}
        self._medians: dict[int, float] = {}  # medians of these, without KV
        self._seen: dict[int, int] = {}  # number of the last measurement in each bucket
        self._notes = 0
        self._points: list[tuple[int, float]] = []  # size and seconds, both rising

    def note(self, count: int, seconds: float, kv: int = 0) -> list[int]:
        """Notes a measurement; returns the buckets that were forgotten. The first measurement of a bucket is dropped:
        its step may have compiled kernels or captured graphs."""
        self._notes += 1
        bucket = _bucket(count)
        if bucket in self._seen:
            self._measured.setdefault(bucket, deque(maxlen=_KEPT)).append((seconds, kv))
            self._medians[bucket] = self._median(bucket)
        self._seen[bucket] = self._notes
        forgotten = []
        if self._notes % _FORGOTTEN == 0:
            forgotten = [old for old in self._measured if self._notes - self._seen[old] >= _FORGOTTEN]
            for old in forgotten:
                del self._measured[old], self._medians[old]
        self._rebuild_points()
        return forgotten

    def set_kv_token(self, seconds: float) -> None:
        """Sets the seconds that a token of KV takes, also for past measurements."""
        self._kv_token_s = seconds
        self._medians = {bucket: self._median(bucket) for bucket in self._measured}
        self._rebuild_points()

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

    def _median(self, bucket: int) -> float:
        """The median; of two middle values, the lower."""
        measured = self._measured[bucket]
        without_kv = sorted([max(seconds - self._kv_token_s * kv, 0.0) for seconds, kv in measured])
        return without_kv[(len(measured) - 1) // 2]

    def _rebuild_points(self) -> None:
        """Makes the curve monotonic: a size takes at most what a larger one took. So a size that was slow for some
        reason says nothing of larger ones that were fast."""
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

    def within(self, seconds: float, each: float = 0.0) -> int:
        """The largest size that takes at most `seconds`, if each unit takes `each` seconds more. Beyond the largest
        known size, twice that size is tried as if it took no longer apart from `each`. Below the smallest, size and
        time are proportional."""
        if seconds < 0.0:
            return 0
        if seconds == math.inf:
            return NO_LIMIT
        below = (0, 0.0)
        for count, known in self._points:
            takes = known + each * count
            if takes > seconds:
                return int(below[0] + (count - below[0]) * (seconds - below[1]) / (takes - below[1]))
            below = (count, takes)
        further = int((seconds - below[1]) / each) if each else NO_LIMIT
        return min(max(2 * below[0], _FIRST), below[0] + further)


def _bucket(count: int) -> int:
    return round(2 * math.log2(count))


def _middle(bucket: int) -> int:
    return round(2 ** (bucket / 2))


def _between(below: tuple[int, float], above: tuple[int, float], count: int) -> float:
    share = (count - below[0]) / (above[0] - below[0])
    return below[1] + share * (above[1] - below[1])
