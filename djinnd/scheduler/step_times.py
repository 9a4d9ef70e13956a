"""How long steps take: as measured, without a model of the device.

A step takes what its rows take if each brings one token, more by the further tokens of those that read a prompt, and
more by the KV that the others read:

    seconds = rows(how many) + further(how many) + kv_time * tokens of KV

Few rows take the time of reading the weights, many that of multiplying with them, a streamed model's that of the bus;
a device that runs prompts otherwise than single tokens shows it in `further`. Both are curves that never fall, known at
the sizes that have run lately.
"""

from __future__ import annotations

import math
from collections import Counter, deque

from djinnd.scheduler.kv_time import KvTime

_KEPT = 5  # measurements of a size, of which the median counts: a hiccup does not
_FORGOTTEN = 1024  # measurements after which a size is tried again: what was slow once need not be so
_FIRST = 16  # that are tried where nothing is known
_SURE = 3  # measurements of so many rows alone that it takes to know what they take
_PATIENCE = 32  # times that these are asked for, at most
NO_LIMIT = 1 << 31


class StepTimes:
    """Of one model."""

    def __init__(self) -> None:
        self._rows = Curve()
        self._further = Curve()
        self._kv = KvTime()
        self._asked: Counter[int] = Counter()  # for how long so many rows alone take, by bucket

    def note(self, rows: int, further: int, seconds: float, kv: int = 0) -> None:
        """A step of so many rows, that brought so many tokens beyond one each. `kv`: tokens of KV that those of one
        token read."""
        if further:
            self._further.note(further, max(seconds - self._alone(rows, kv), 0.0))
            return
        if self._kv.note(rows, kv, seconds):
            self._rows.set_kv_token(self._kv.token_s)
        known = self._rows.largest
        for forgotten in self._rows.note(rows, seconds, kv):
            del self._asked[forgotten]
        if self._rows.largest > known:
            self._further.forget()

    def predict(self, rows: int, further: int = 0, kv: float = 0.0) -> float:
        """Seconds. Beyond what is known: what the largest took. 0: nobody knows, or nothing beside KV."""
        return self._alone(rows, kv) + self._beside(further)

    def _alone(self, rows: int, kv: float) -> float:
        """Rows may take nothing beside their KV, as when a device has become faster since that was learnt."""
        return self._rows.at(rows) + self._kv.token_s * kv if self._rows.largest else 0.0

    def _beside(self, further: int) -> float:
        return self._further.at(further) if further else 0.0

    def rows_within(self, seconds: float, further: int = 0, kv: float = 0.0, each: float = 0.0) -> int:
        """How many rows a step may have that brings so many further tokens, and take no longer than that. They read
        `kv` tokens of KV, and `each` of them so many more."""
        token_s = self._kv.token_s
        return self._rows.within(seconds - self._beside(further) - token_s * kv, token_s * each)

    def further_within(self, seconds: float, rows: int, kv: float = 0.0) -> int:
        """How many tokens beyond one each so many rows may bring in a step that takes no longer than that."""
        return self._further.within(seconds - self._alone(rows, kv))

    def wants(self, rows: int) -> bool:
        """Whether such a step should have so many rows and nothing else, so that it is known what they take: where
        others always join them, it is never seen. Not for ever: see `ask`."""
        bucket = _bucket(rows)
        return self._rows.measured(bucket) < _SURE and self._asked[bucket] < _PATIENCE

    def ask(self, rows: int) -> None:
        """A step is kept to so many rows: where nothing comes of that often enough, it is not wanted any more."""
        self._asked[_bucket(rows)] += 1


class Curve:
    """Seconds by how many, in buckets: two to a doubling. What reading KV took of them is not in it."""

    def __init__(self) -> None:
        self._kv_token_s = 0.0
        self._measured: dict[int, deque[tuple[float, int]]] = {}  # the last few, by bucket: seconds, and tokens of KV
        self._medians: dict[int, float] = {}  # likewise, without KV
        self._seen: dict[int, int] = {}  # the note that last was of such a size, by bucket
        self._notes = 0
        self._points: list[tuple[int, float]] = []  # both rising

    def note(self, count: int, seconds: float, kv: int = 0) -> list[int]:
        """The first of a size tells nothing: kernels were being compiled, graphs captured. → buckets that have been
        forgotten."""
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
        self._draw()
        return forgotten

    def set_kv_token(self, seconds: float) -> None:
        """What a token of KV takes, of those that have been measured, too."""
        self._kv_token_s = seconds
        self._medians = {bucket: self._median(bucket) for bucket in self._measured}
        self._draw()

    def forget(self) -> None:
        self._measured.clear()
        self._medians.clear()
        self._points.clear()

    @property
    def largest(self) -> int:
        """That is known; 0: nothing is."""
        return self._points[-1][0] if self._points else 0

    def measured(self, bucket: int) -> int:
        return len(self._measured.get(bucket, ()))

    def _median(self, bucket: int) -> float:
        """The lower of two."""
        measured = self._measured[bucket]
        without_kv = sorted([max(seconds - self._kv_token_s * kv, 0.0) for seconds, kv in measured])
        return without_kv[(len(measured) - 1) // 2]

    def _draw(self) -> None:
        """What more took, fewer take no more: so a size that was slow, for whatever reason, says nothing of larger ones
        that were not."""
        self._points.clear()
        fastest = math.inf
        for bucket in sorted(self._medians, reverse=True):
            fastest = min(fastest, self._medians[bucket])
            self._points.append((_middle(bucket), fastest))
        self._points.reverse()

    def at(self, count: int) -> float:
        """Below the smallest that is known, what that took; beyond the largest, likewise; 0 where nothing is known."""
        below = (0, 0.0)
        for point in self._points:
            if count <= point[0]:
                return point[1] if not below[0] else _between(below, point, count)
            below = point
        return below[1]

    def within(self, seconds: float, each: float = 0.0) -> int:
        """How many take no longer, as far as is known, if each takes so much more. Beyond the largest that is known
        twice as many are tried, as if they took no longer but for that; below the smallest, as many as if they took
        their part of its time."""
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
