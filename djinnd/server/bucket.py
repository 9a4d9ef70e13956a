"""A bucket: what may be taken of something that flows in at a rate, and is saved up only so far."""

from __future__ import annotations


class Bucket:
    """`rate` a second flow in, up to `size`; it begins full. Who is let in while there is something may take more than
    that, and the next has to wait until it is made up for: in t seconds no more than size + t x rate is taken, but for
    what the last that were let in took. Times come from the caller."""

    def __init__(self, rate: float, size: float, at: float) -> None:
        self._rate = rate
        self._size = self._level = size
        self._at = at

    def resize(self, rate: float, size: float, at: float) -> None:
        """What is there stays, as far as it fits."""
        self._fill(at)
        self._rate, self._size = rate, size
        self._level = min(self._level, size)

    def take(self, amount: float, at: float) -> None:
        self._fill(at)
        self._level -= amount

    def level(self, at: float) -> float:
        """What is there; below 0: what has to flow in before there is anything."""
        self._fill(at)
        return self._level

    def wait_s(self, at: float) -> float:
        """Until more may be taken; 0: at once."""
        return max(0.0, -self.level(at) / self._rate)

    def _fill(self, at: float) -> None:
        if at > self._at:
            self._level = min(self._level + (at - self._at) * self._rate, self._size)
            self._at = at
