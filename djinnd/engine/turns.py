"""Who may use the device for a load: one at a time, in the order in which they got in line.

A load that waits for its files gives way and gets in line again when they are there, so that slow files, and files
that somebody keeps from coming, hold up no load but their own.
"""

from __future__ import annotations

import threading


class Line:
    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.turns: list[Turn] = []
        self.is_closed = False

    def close(self) -> None:
        """Nobody waits any more."""
        with self.changed:
            self.is_closed = True
            self.changed.notify_all()


class Turn:
    """One load's place. Its methods do nothing where there is nothing to do."""

    def __init__(self, line: Line) -> None:
        """It stands in line from now on."""
        self._line = line
        with line.changed:
            line.turns.append(self)

    def take(self) -> None:
        """Returns when it is this load's turn, or the line is closed."""
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
