"""How long steps take, by how many tokens they bring: as measured, without a model of the device.

A step of few tokens takes the time of reading the weights, one of many the time of multiplying with them, a streamed
model's the time of the bus; all are one curve that never falls, known at the sizes that have run lately.
"""

from __future__ import annotations

import math

_KEPT = 0.8  # of an average, when a new value comes
_FORGOTTEN = 4096  # steps after which a size is tried again: what was slow once need not be so


class StepTimes:
    """Of one model. Sizes are in buckets, two to a doubling."""

    def __init__(self) -> None:
        self._seconds: dict[int, float] = {}  # by bucket
        self._seen: dict[int, int] = {}  # the step that last had such a size, by bucket
        self._steps = 0
        self._curve: list[tuple[int, float]] = []  # tokens and seconds, both rising

    def note(self, tokens: int, seconds: float) -> None:
        """The first step of a size tells nothing: kernels were being compiled, graphs captured."""
        self._steps += 1
        bucket = _bucket(tokens)
        if bucket in self._seen:
            before = self._seconds.get(bucket, seconds)
            self._seconds[bucket] = _KEPT * before + (1 - _KEPT) * seconds
        self._seen[bucket] = self._steps
        if self._steps % _FORGOTTEN == 0:
            for old in [some for some, step in self._seen.items() if self._steps - step >= _FORGOTTEN]:
                del self._seen[old]
                self._seconds.pop(old, None)
        self._draw()

    def _draw(self) -> None:
        """What more tokens took, fewer take no more: so a size that was slow once, for whatever reason, says nothing
        of larger ones that are not."""
        self._curve.clear()
        fastest = math.inf
        for bucket in sorted(self._seconds, reverse=True):
            fastest = min(fastest, self._seconds[bucket])
            self._curve.append((_tokens(bucket), fastest))
        self._curve.reverse()

    def predict(self, tokens: int) -> float:
        """Seconds. Beyond the largest size that is known: what that took, so that larger ones are tried. 0: nobody
        knows."""
        below = (0, 0.0)
        for point in self._curve:
            if tokens <= point[0]:
                return point[1] if not below[0] else _between(below, point, tokens)
            below = point
        return below[1]

    def within(self, seconds: float) -> int | None:
        """Tokens that a step may bring and take no longer than that, as far as is known. None: any number."""
        below = (0, 0.0)
        for tokens, takes in self._curve:
            if takes > seconds:
                if not below[0]:
                    return 0
                return int(below[0] + (tokens - below[0]) * (seconds - below[1]) / (takes - below[1]))
            below = (tokens, takes)
        return None


def _bucket(tokens: int) -> int:
    return round(2 * math.log2(tokens))


def _tokens(bucket: int) -> int:
    return round(2 ** (bucket / 2))


def _between(below: tuple[int, float], above: tuple[int, float], tokens: int) -> float:
    share = (tokens - below[0]) / (above[0] - below[0])
    return below[1] + share * (above[1] - below[1])
