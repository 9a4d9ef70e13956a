"""What a pass does at points of the model where one of its rows captures, and nothing else is to be done: the usual
thing, where somebody stands at a breakpoint, and then nobody is to wait for it.

Its tokens lie side by side in the pass, and the rows that they are captured in do, too. So there is nothing to look up
and nothing to send, as there is where sessions and edits mix (step_probe.py): each point is one copy.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property

from torch import Tensor

from djinn_client.points import Point


class SoleCapture:
    """A Probe (model/probe.py), of prologue and blocks."""

    def __init__(
        self, into: Tensor, row: int, shifts: Mapping[Point, int], first_block: int, first_token: int, count: int
    ) -> None:
        """So many tokens of the pass go to `into` from `row` on, and as much further as the point says. No point lies
        behind the blocks, or is of one below `first_block`."""
        self.first = first_block
        self._into = into
        self._row = row
        self._shifts = shifts
        self._tokens = slice(first_token, first_token + count)

    @cached_property
    def points(self) -> frozenset[Point]:
        return frozenset(self._shifts)

    def at(self, point: Point, value: Tensor) -> None:
        """See Probe."""
        row = self._row + self._shifts[point]
        tokens = value[0, self._tokens]
        self._into[row : row + len(tokens)].copy_(tokens)
