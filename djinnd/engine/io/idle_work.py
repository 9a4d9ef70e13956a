"""Work of the host that overlaps with the steps of the device.

    a turn of    messages ─► pages ─► step launched ─► parts, again while one has more to do ─► results ─► …
    the loop     └────────┴─ leave to the parts what can overlap, if the step of the turn before had time for them

The device idles while the host works between two steps, so whatever can overlap with a step is a part.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

Part = Callable[[], bool | None]  # → True if it has more to do during this step


class IdleWork:
    """Parts of bounded duration: a step's results wait until the part that runs has ended."""

    def __init__(self, parts: Sequence[Part]) -> None:
        self._parts = list(parts)
        self.has_run = False  # in this turn
        self.is_expected = False  # in this turn, because the parts have run in the one before

    def turn(self) -> None:
        """A turn of the engine's loop begins."""
        self.is_expected, self.has_run = self.has_run, False

    def run(self) -> bool:
        """Calls every part once, in order. → True if one has more to do during this step."""
        self.has_run = True
        more: bool | None = False
        for part in self._parts:
            more = part() or more
        return bool(more)
