"""How far windows have come, for calls that show it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

Direction = Literal["sending", "receiving"]
OnMoved = Callable[[Direction, int, int], None]  # with the bytes so far, and all bytes


@dataclass(slots=True)
class Transfer:
    """Bytes of windows in one direction. A sent byte is done when the other end has acknowledged it."""

    total: int = 0
    done: int = 0
    told: int = 0  # of `done`, when it was last told

    def begin(self) -> None:
        """Counts from 0 again; bytes that are still on their way stay counted."""
        self.total -= self.done
        self.done = self.told = 0

    def tell(self, direction: Direction, on_moved: OnMoved) -> None:
        """Calls `on_moved` if bytes have passed since it was last called."""
        if self.done != self.told:
            self.told = self.done
            on_moved(direction, self.done, self.total)
