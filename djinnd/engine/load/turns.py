"""Turns on the device for loads: one load at a time, in the order in which the loads queued.

A load that waits for its files gives up its turn and queues again when they are there. So slow files, and files
that a client holds back, delay only their own load.
"""

from __future__ import annotations

import threading


class DeviceQueue:
    """The loads that wait for the device, in order. The first of `turns` may use the device."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.turns: list[DeviceTurn] = []
        self.is_closed = False

    def close(self) -> None:
        """Ends all waiting: every `take` returns."""
        with self.changed:
            self.is_closed = True
            self.changed.notify_all()


class DeviceTurn:
    """One load's place in the queue. `take` and `give_way` may be called in any state."""

    def __init__(self, queue: DeviceQueue) -> None:
        """Queues at once."""
        self._queue = queue
        with queue.changed:
            queue.turns.append(self)

    def take(self) -> None:
        """Blocks until it is this load's turn, or the queue is closed."""
        queue = self._queue
        with queue.changed:
            if self not in queue.turns:
                queue.turns.append(self)
            queue.changed.wait_for(lambda: queue.is_closed or queue.turns[0] is self)

    def give_way(self) -> None:
        queue = self._queue
        with queue.changed:
            if self in queue.turns:
                queue.turns.remove(self)
                queue.changed.notify_all()
