"""Runs full garbage collections in quiet moments.

A full collection walks all objects of a served model and takes tens of milliseconds, in which no step can be launched.
Collections of the young generations run as usual; the old generation waits for a quiet moment.
"""

from __future__ import annotations

import gc

from djinnd.engine.tuning import LONGEST, WORTH

_NEVER = 1 << 30


class Collector:
    """Controls the process's garbage collector. `now` is in seconds."""

    def __init__(self, now: float) -> None:
        self._threshold = gc.get_threshold()
        gc.set_threshold(*self._threshold[:2], _NEVER)
        self._last = now

    def turn(self, quiet: bool, now: float) -> None:
        """`quiet`: no message has come for a while, and no request runs."""
        if gc.get_count()[2] >= WORTH and (quiet or now - self._last >= LONGEST):
            gc.collect()
            self._last = now

    def close(self) -> None:
        """Restores Python's own thresholds."""
        gc.set_threshold(*self._threshold)
