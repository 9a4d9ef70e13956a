"""The breakpoints of a session as the server keeps them, where its last call has stopped, and where the next one will.

What a breakpoint is about depends on the call: which positions are its prompt's, and which are generated. So each call
brings the engine its own stops.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import msgspec

from djinn_client.breakpoints import BreakpointInfo, HitInfo, When
from djinnd.core.edits import Extent
from djinnd.core.stops import Stop


class Breakpoint(msgspec.Struct, frozen=True, array_like=True):
    """`block`: before which it stops. `extents`: positions at which it does, if they are what `when` and `every` say;
    ascending, apart."""

    number: int
    point: str  # as it was asked for
    block: int
    when: When = "always"
    every: int = 1
    extents: tuple[Extent, ...] | None = None  # None: at all

    @property
    def count(self) -> int:
        """As limits.breakpoints_per_session counts: of its spans."""
        return 1 if self.extents is None else len(self.extents)

    @property
    def info(self) -> BreakpointInfo:
        spans = None if self.extents is None else [(each.start, each.end) for each in self.extents]
        return BreakpointInfo(id=self.number, point=self.point, when=self.when, every=self.every, spans=spans)


@dataclass(frozen=True, slots=True)
class Reach:
    """Positions [first, end) that a call may run, if it generates as much as it may: up to `prompt_end` the prompt's,
    then generated ones, of which there are some before `length` where the call goes on from a `hit`."""

    first: int
    prompt_end: int
    length: int  # of the session when the call begins
    end: int
    hit: HitInfo | None = None


class BreakpointList(msgspec.Struct, array_like=True):
    """`given`: the last number. `hit`: where the session's last call has stopped, for as long as nothing has happened
    to its tokens since."""

    breakpoints: tuple[Breakpoint, ...] = ()
    given: int = 0
    hit: HitInfo | None = None

    def add(self, breakpoint: Breakpoint) -> None:
        assert breakpoint.number > self.given
        self.breakpoints = (*self.breakpoints, breakpoint)
        self.given = breakpoint.number

    def end(self, numbers: Collection[int]) -> None:
        self.breakpoints = tuple(each for each in self.breakpoints if each.number not in numbers)

    def copy(self) -> BreakpointList:
        """Of a fork, which is at no hit."""
        return BreakpointList(self.breakpoints, self.given)

    @property
    def count(self) -> int:
        return sum(each.count for each in self.breakpoints)

    def stops(self, reach: Reach) -> list[Stop]:
        """Of such a call, one for each block at which it may stop, ascending."""
        found: dict[int, int] = {}
        for each in self.breakpoints:
            position = _stops_at(each, reach)
            if position is not None:
                found[each.block] = min(position, found.get(each.block, position))
        return [Stop(block, position) for block, position in sorted(found.items())]

    def met(self, block: int, end: int, reach: Reach) -> Breakpoint:
        """The first of them for which a call has stopped before that block, with positions up to `end`."""
        for each in self.breakpoints:
            if each.block == block and (position := _stops_at(each, reach)) is not None and position < end:
                return each
        raise AssertionError(f"no breakpoint before block {block} and position {end}: {self.breakpoints}")


def _stops_at(breakpoint: Breakpoint, reach: Reach) -> int | None:
    """The first position at which it stops such a call, which ends there. None: it does not. Positions that wait at a
    hit stop at later blocks only."""
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
