"""Where clients ask the model to stop, and what they are told when it has."""

from __future__ import annotations

from typing import Literal

import msgspec

from djinn_client.protocol.fields.bounds import Name, Whole

When = Literal["every", "prefill", "decode", "always"]  # "always" is "every" in the words of older clients


class BreakpointInfo(msgspec.Struct, kw_only=True, omit_defaults=True):
    """A breakpoint of a session. It stops of generated positions at each `every`th; with `spans` only at those
    positions, from the first up to and without the second."""

    id: int
    point: str
    when: When = "every"
    every: int = 1
    spans: list[tuple[int, int]] | None = None


class HitInfo(msgspec.Struct, frozen=True, kw_only=True):
    """A call has stopped: the positions from `first` up to and without `end` have been through the blocks before
    `block`, and wait there."""

    breakpoint: Whole | None  # None: a capture has brought them here, and no breakpoint
    point: Name  # as the breakpoint names it
    block: Whole  # that they would be given to next; the number of blocks for what the last one gives
    first: Whole
    end: Whole
    prompt_end: Whole  # tokens that the session had before the first one that the call generated
