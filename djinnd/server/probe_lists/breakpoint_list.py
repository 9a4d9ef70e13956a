"""The breakpoints of a session as the server stores them, where the last call has stopped, and where the next one will.

A breakpoint may apply to prompt positions or to generated positions only. Which positions these are depends on the
call, so each call brings the engine its own stops.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import msgspec

from djinn_client.protocol.fields.breakpoints import BreakpointInfo, HitInfo, When
from djinnd.core.edits import Extent
from djinnd.core.stops import Stop


class SessionBreakpoint(msgspec.Struct, frozen=True, array_like=True):
    """Stops calls before block `block`. `extents`: the positions where it stops, if `when` and `every` select them too;
    ascending, without overlap."""

    number: int
    point: str  # as the client has named it
    block: int
    when: When = "every"
    every: int = 1
    extents: tuple[Extent, ...] | None = None  # None: all positions

    @property
    def count(self) -> int:
        """Number of its spans, as limits.breakpoints_per_session counts."""
        return 1 if self.extents is None else len(self.extents)

    @property
    def info(self) -> BreakpointInfo:
        spans = None if self.extents is None else [(each.start, each.end) for each in self.extents]
        return BreakpointInfo(id=self.number, point=self.point, when=self.when, every=self.every, spans=spans)


@dataclass(frozen=True, slots=True)
class CallSpan:
    """The positions [first, end) that a call may compute if it generates as many tokens as it may. Positions before
    `prompt_end` are the prompt's, the others are generated. A call that continues from a `hit` has generated positions
    before `length` too."""

    first: int
    prompt_end: int
    length: int  # the session's tokens when the call begins
    end: int
    hit: HitInfo | None = None


class BreakpointList(msgspec.Struct, array_like=True):
    """All breakpoints of a session. `given` is the last number given. `hit` is where the last call has stopped, unless
    the tokens have changed since."""

    breakpoints: tuple[SessionBreakpoint, ...] = ()
    given: int = 0
    hit: HitInfo | None = None

    def add(self, breakpoint: SessionBreakpoint) -> None:
        assert breakpoint.number > self.given
        self.breakpoints = (*self.breakpoints, breakpoint)
        self.given = breakpoint.number

    def end(self, numbers: Collection[int]) -> None:
        self.breakpoints = tuple(each for each in self.breakpoints if each.number not in numbers)

    def copy(self) -> BreakpointList:
        """The breakpoints for a fork, which is at no hit."""
        return BreakpointList(self.breakpoints, self.given)

    @property
    def count(self) -> int:
        return sum(each.count for each in self.breakpoints)

    def stops(self, reach: CallSpan) -> list[Stop]:
        """The places where such a call may stop: the first position of each block, in ascending order of blocks."""
        found: dict[int, int] = {}
        for each in self.breakpoints:
            position = _stops_at(each, reach)
            if position is not None:
                found[each.block] = min(position, found.get(each.block, position))
        return [Stop(block, position) for block, position in sorted(found.items())]

    def met(self, block: int, end: int, reach: CallSpan) -> SessionBreakpoint:
        """The first breakpoint that has stopped a call before this block, at a position before `end`."""
        for each in self.breakpoints:
            if each.block == block and (position := _stops_at(each, reach)) is not None and position < end:
                return each
        raise AssertionError(f"no breakpoint before block {block} and position {end}: {self.breakpoints}")


def _stops_at(breakpoint: SessionBreakpoint, reach: CallSpan) -> int | None:
    """The first position at which the breakpoint stops such a call; None if it does not. Positions that wait at a hit
    stop only at later blocks."""
    hit, prompt_end = reach.hit, reach.prompt_end
    low = prompt_end if breakpoint.when == "decode" else 0
    high = prompt_end if breakpoint.when == "prefill" else reach.end
    position = max(low, reach.first)
    if hit is not None and breakpoint.block <= hit.block:
        position = max(position, hit.end)
    if breakpoint.extents is not None:
        position = next((max(position, each.start) for each in breakpoint.extents if each.end > position), high)
    elif position >= prompt_end:
        position += -(position - prompt_end + 1) % breakpoint.every
    return position if position < min(high, reach.end) else None
