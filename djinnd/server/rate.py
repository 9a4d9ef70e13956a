"""How often something happens, of late."""

from __future__ import annotations

import math

_LEAST = 1.0  # seconds that a first event is taken to be of


class Rate:
    """Events a second, averaged over the last `window` seconds with exponentially smaller weights, or over the time
    since `at`, while that is shorter. Times come from the caller."""

    def __init__(self, window: float, at: float) -> None:
        self._window = window
        self._began = self._at = at
        self._events = 0.0  # as of `_at`, weighted

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
