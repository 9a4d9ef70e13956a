"""Full collections of cyclic garbage, when nobody waits.

A full one walks all that a served model is made of, and takes tens of milliseconds, in which no step is launched. Young
objects are collected as ever; what has grown old lies until a quiet moment.
"""

from __future__ import annotations

import gc

WORTH = 10  # collections of the middle generation, after which Python would begin a full one
LONGEST = 600.0  # seconds until a full one is made anyway
_NEVER = 1 << 30


class Collector:
    """Of the process. `now` in seconds."""

    def __init__(self, now: float) -> None:
        self._threshold = gc.get_threshold()
        gc.set_threshold(*self._threshold[:2], _NEVER)
        self._last = now

    def turn(self, quiet: bool, now: float) -> None:
        """`quiet`: nobody has asked for anything for a while."""
        if gc.get_count()[2] >= WORTH and (quiet or now - self._last >= LONGEST):
            gc.collect()
            self._last = now

    def close(self) -> None:
        """Python decides again."""
        gc.set_threshold(*self._threshold)
