"""A token bucket: limits how much may be taken of something that flows in at a rate."""

from __future__ import annotations


class Bucket:
    """`rate` per second flows in, up to `size`; the bucket begins full. A caller is admitted while the level is above 0
    and may take more than the level; the next caller waits until the level is above 0 again. So in t seconds at most
    size + t * rate is taken, plus the excess of the last callers. Callers give the times, in seconds."""

    def __init__(self, rate: float, size: float, at: float) -> None:
        self._rate = rate
        self._size = self._level = size
        self._at = at

    def resize(self, rate: float, size: float, at: float) -> None:
        """Changes rate and size. Keeps the level, up to the new size."""
        self._fill(at)
        self._rate, self._size = rate, size
        self._level = min(self._level, size)

    def take(self, amount: float, at: float) -> None:
        self._fill(at)
        self._level -= amount

    def level(self, at: float) -> float:
        """The present level. Below 0 it is the amount that must flow in first."""
        self._fill(at)
        return self._level

    def wait_s(self, at: float) -> float:
        """Seconds until more may be taken; 0 if it may be now."""
        return max(0.0, -self.level(at) / self._rate)

    def _fill(self, at: float) -> None:
        if at > self._at:
            self._level = min(self._level + (at - self._at) * self._rate, self._size)
            self._at = at
