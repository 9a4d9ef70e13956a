"""The probe of a pass in which one row captures and nothing is edited: the usual case at a breakpoint, so it is fast.

The row's tokens are contiguous in the pass, and so are its captured rows. Nothing is looked up and nothing is sent to
the device, as it must be if several sessions capture or edit (step_probe.py). Each point is one copy.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property

from torch import Tensor

from djinn_client.protocol.fields.points import Point


class SoleCapture:
    """A Probe (model/whitebox/probe.py) of the prologue and the blocks."""

    def __init__(
        self, into: Tensor, row: int, shifts: Mapping[Point, int], first_block: int, first_token: int, count: int
    ) -> None:
        """Copies `count` tokens of the pass, from `first_token` on, to `into`, from row `row` plus the point's shift
        on. No point is after the last block or in a block before `first_block`."""
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
