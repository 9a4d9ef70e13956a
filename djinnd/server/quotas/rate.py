"""The recent rate of events."""

from __future__ import annotations

import math

_LEAST = 1.0  # seconds: the shortest time over which the first events are averaged


class Rate:
    """Events per second, averaged over the last `window` seconds with exponentially decreasing weights, or over the
    time since `at` if that is shorter. Callers give the times, in seconds."""

    def __init__(self, window: float, at: float) -> None:
        self._window = window
        self._began = self._at = at
        self._events = 0.0  # weighted, as of `_at`

    def count(self, events: int, at: float) -> None:
        self._advance(at)
        self._events += events

    def per_second(self, at: float) -> float:
        self._advance(at)
        weights = -math.expm1((self._began - self._at) / self._window) * self._window
        return self._events / max(weights, _LEAST)

    def _advance(self, at: float) -> None:
        if at > self._at:
            self._events *= math.exp((self._at - at) / self._window)
            self._at = at
