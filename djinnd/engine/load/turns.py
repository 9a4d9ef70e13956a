"""Turns on the device for loads: one load at a time, in the order in which the loads got in line.

A load that waits for its files gives up its turn and gets in line again when they are there. So slow files, and files
that a client holds back, delay only their own load.
"""

from __future__ import annotations

import threading


class Line:
    """The loads in line. The first of `turns` may use the device."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.turns: list[Turn] = []
        self.is_closed = False

    def close(self) -> None:
        """Ends all waiting: every `take` returns."""
        with self.changed:
            self.is_closed = True
            self.changed.notify_all()


class Turn:
    """One load's place in the line. `take` and `give_way` may be called in any state."""

    def __init__(self, line: Line) -> None:
        """Gets in line at once."""
        self._line = line
        with line.changed:
            line.turns.append(self)

    def take(self) -> None:
        """Blocks until it is this load's turn, or the line is closed."""
        line = self._line
        with line.changed:
            if self not in line.turns:
                line.turns.append(self)
            line.changed.wait_for(lambda: line.is_closed or line.turns[0] is self)

    def give_way(self) -> None:
        line = self._line
        with line.changed:
            if self in line.turns:
                line.turns.remove(self)
                line.changed.notify_all()
