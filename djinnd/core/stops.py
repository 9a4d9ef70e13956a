"""Breakpoints inside the model, and the positions that have passed only some of its blocks.

                    blocks   0 ……… first ……… last ……… N
    positions  0 … computed  ─────────────────────────►   have KV in every block
    computed … done          ──────────────────►          of a stage: have passed [first, last), and wait before `last`
    done … end               ────────►                    wait before `first`

A position that waits before `first` has KV in the blocks before it and in no later one. A stage only saves running
those blocks again. If it is lost, positions from `computed` on are run from the first block, with the edits that were
made meanwhile. A parked session that leaves the device takes its stage along.

Only positions that a stop names stop. Earlier positions are first run to the last block. So the positions that stop
depend on the stops and the session's tokens alone, and not on the pages that were present.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

import msgspec

from djinn_client.protocol.fields.points import Point


class Stop(msgspec.Struct, frozen=True, array_like=True):
    """All positions from `position` on stop before `block`. If `block` is the number of blocks, they stop behind the
    last one."""

    block: int
    position: int


@dataclass(slots=True, eq=False)
class Stage:
    """Progress of positions [session.computed, len(session.tokens)), all of which have pages.

    They have passed the blocks before `first`. Positions before `done` have also passed the blocks before `last` and
    stop there. `last` is the number of blocks if they stop behind the last block. It is one more if they do not stop;
    then `computed` advances with `done`. A session with a stage and no request is parked before `first`, and its `done`
    is `computed`.

    One object serves from the first row until the positions are through or the stage is lost.
    """

    first: int
    last: int
    done: int

    def stands(self, points: Iterable[Point]) -> bool:
        """True if all of these points are still ahead of the positions that wait before `first`."""
        return all(point.is_behind or point.block >= self.first for point in points)


class LeftStage(NamedTuple):
    """The stage of a session that has left the device. The session gets it back when all of its pages are back."""

    stage: Stage
    computed: int  # the session's `computed` when its pages left
    length: int  # the session's number of tokens when its pages left


def next_stop(stops: Iterable[Stop], end: int) -> Stop | None:
    """The next stop of positions before `end`, or None if they do not stop. All positions from the first one that a
    stop names stop before the lowest of the named blocks. Positions that have stopped already are not among `stops`."""
    due = [stop for stop in stops if stop.position < end]
    if not due:
        return None
    return Stop(min([stop.block for stop in due]), min([stop.position for stop in due]))
