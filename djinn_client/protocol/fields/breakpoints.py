"""Breakpoints of sessions, and the hits at which calls have stopped."""

from __future__ import annotations

from typing import Literal

import msgspec

from djinn_client.protocol.fields.bounds import Name, Whole

When = Literal["every", "prefill", "decode", "always"]  # "always" is "every" in the words of older clients


class BreakpointInfo(msgspec.Struct, kw_only=True, omit_defaults=True):
    """A breakpoint of a session. Of generated positions, it stops at each `every`th. With `spans` it stops only at
    those positions: from the first up to, but not including, the second."""

    id: int
    point: str
    when: When = "every"
    every: int = 1
    spans: list[tuple[int, int]] | None = None


class HitInfo(msgspec.Struct, frozen=True, kw_only=True):
    """A call has stopped: the positions from `first` up to, but not including, `end` have passed the blocks before
    `block`, and wait there."""

    breakpoint: Whole | None  # None: a capture has brought them here, and no breakpoint
    point: Name  # as the breakpoint names it
    block: Whole  # the next block to run; the number of blocks behind the last one
    first: Whole
    end: Whole
    prompt_end: Whole  # tokens that the session had before the first one that the call generated
