"""Where the run of a session stops inside the model, and what is on its way through the blocks in parts.

                    blocks   0 ……… first ……… last ……… N
    positions  0 … computed  ─────────────────────────►   have been through all: they have KV in every block
    computed … done          ──────────────────►          of a stage: have passed [first, last), and wait before `last`
    done … end               ────────►                    wait before `first`

Positions that have been through the blocks before `first` have KV in those blocks, and in no later one. A stage saves
running those blocks again, and nothing hangs on it: where it is lost, everything from `computed` on is run anew, and
edits that were made where it stopped apply then. A parked session that leaves the device takes its stage along.

Only positions that a stop names stop: what comes before is run to the end first. So what has stopped is a matter of
the stops and of the session's tokens, and not of which pages were there.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

import msgspec

from djinn_client.points import Point


class Stop(msgspec.Struct, frozen=True, array_like=True):
    """All positions from `position` on stop before `block` (the number of blocks: behind the last)."""

    block: int
    position: int


@dataclass(slots=True, eq=False)
class Stage:
    """Of positions [session.computed, len(session.tokens)), which have pages all. `last`: before which block they stop;
    the number of blocks where they stop behind the last one, and one more where they go to the end: then `computed`
    goes along with `done`. A session without a request that has a stage is parked before `first`: `done` is `computed`.

    One object from the first row until its positions are through, or it is lost."""

    first: int
    last: int
    done: int

    def stands(self, points: Iterable[Point]) -> bool:
        """Whether its positions have still all of these points before them, while they wait before `first`."""
        return all(point.is_behind or point.block >= self.first for point in points)


class LeftStage(NamedTuple):
    """Of a session whose pages have left the device: it has the stage again when all of them are back."""

    stage: Stage
    computed: int  # the session's, when they left
    length: int  # the session's, in tokens, likewise


def next_stop(stops: Iterable[Stop], end: int) -> Stop | None:
    """Where positions before `end` stop next: all from the first one on that is named by a stop, before the first of
    the blocks. None: nowhere. Those that have stopped already are named by none."""
    due = [stop for stop in stops if stop.position < end]
    if not due:
        return None
    return Stop(min([stop.block for stop in due]), min([stop.position for stop in due]))
