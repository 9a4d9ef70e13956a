"""Edits: changes that a session makes to its activations, at points of the model and at positions of the session.

An edit is plain data that depends only on the position. A position that is computed again is edited again in the same
way. So KV is a function of the session's tokens and edits, and its pages can be dropped, shared and found as usual
(names.py).

The last position of a session is always computed, or computed again, to sample the next token. An edit that begins
"now" therefore begins at that position, and an edit that ends "now" ends there.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable
from functools import cached_property
from hashlib import blake2b
from typing import TYPE_CHECKING

import msgspec

from djinn_client.protocol.fields.edits import Op
from djinn_client.protocol.fields.image import Dtype
from djinn_client.protocol.fields.points import Point

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

FOREVER = 1 << 40  # a position that no session reaches
WILD = 1024.0  # An edit that adds or sets a value larger than this may cause an overflow there or in a later block.


class Extent(msgspec.Struct, frozen=True, array_like=True):
    """Positions [start, end) of an edit. `row` is the row of the edit's values that applies at `start`, and the
    following rows apply at the following positions. An edit with a single row uses it for all positions."""

    start: int
    end: int = FOREVER
    row: int = 0


class Edit(msgspec.Struct, frozen=True, array_like=True, dict=True):
    """One edit of a session. `values` is a row-major array of `rows` rows of the points' width: no row, one row for all
    positions, or one row for each position. `low` and `high` are the bounds of `clamp`."""

    number: int  # unique in the session; edits apply in ascending order
    points: tuple[Point, ...]
    op: Op
    extents: tuple[Extent, ...]  # ascending, without overlap
    scale: float = 1.0
    low: float = -math.inf
    high: float = math.inf
    dtype: Dtype = "float32"
    rows: int = 0
    values: bytes = b""
    # it was ended: positions that it has changed are changed again when they are recomputed, and no others
    over: bool = False

    @property
    def first(self) -> int:
        """The first position that the edit changes; FOREVER if it changes none."""
        return self.extents[0].start if self.extents else FOREVER

    @property
    def end(self) -> int:
        """One past the last position that the edit changes; 0 if it changes none."""
        return self.extents[-1].end if self.extents else 0

    @cached_property
    def mark(self) -> int:
        """A 64-bit hash of the operation and its values, without the positions."""
        what = (self.points, self.op, self.scale, self.low, self.high, self.dtype, self.rows)
        digest = blake2b(msgspec.msgpack.encode(what), digest_size=8)
        digest.update(self.values)
        return int.from_bytes(digest.digest(), "little")

    @cached_property
    def wild_from(self) -> int:
        """The first position at which the edit may produce a value that is not finite; FOREVER if there is none.

        An edit that scales by more than 1 counts from its first position on, however small the factor: over many blocks
        the factor becomes a power.
        """
        if self.op in ("scale", "project_out"):
            largest = abs(self.scale) if self.op == "scale" else abs(1.0 - self.scale)
            return self.first if largest > 1.0 else FOREVER
        if any(WILD < abs(bound) < math.inf for bound in (self.low, self.high)):
            return self.first
        wild = self._wild_rows(WILD / abs(self.scale) if self.scale else math.inf)
        if self.rows == 1:
            return self.first if len(wild) else FOREVER
        for each in self.extents:
            index = int(wild.searchsorted(each.row))
            if index < len(wild) and each.start + int(wild[index]) - each.row < each.end:
                return each.start + int(wild[index]) - each.row
        return FOREVER

    def _wild_rows(self, limit: float) -> npt.NDArray[np.intp]:
        """Indices, ascending, of the rows of `values` that hold a value of at least `limit` in magnitude or NaN."""
        import numpy as np  # imported here because the server makes edits too, and has no other use for numpy

        if self.dtype == "bfloat16":
            values = (np.frombuffer(self.values, np.uint16).astype(np.uint32) << 16).view(np.float32)
        else:
            values = np.frombuffer(self.values, self.dtype).astype(np.float32, copy=False)
        are_tame = np.abs(values.reshape(self.rows, -1)) < limit  # a comparison with NaN is False
        return np.flatnonzero(~are_tame.all(axis=1))


def now(length: int) -> int:
    """The first position that an edit made now applies to, in a session of `length` tokens."""
    return max(length - 1, 0)


def ended(edits: Iterable[Edit], numbers: Collection[int], at: int) -> tuple[Edit, ...]:
    """Ends the edits with these numbers: from position `at` on they change nothing. Returns all edits, without those
    that are left with no position."""
    return tuple(kept for edit in edits if (kept := _ended(edit, at) if edit.number in numbers else edit).extents)


def cut(edits: Iterable[Edit], length: int) -> tuple[Edit, ...]:
    """The edits of a session that is truncated to its first `length` tokens.

    An edit that is still open (it has no end) stays open, from `length` on if it began later. An edit with an end keeps
    its positions and applies again when the session reaches them.
    """
    return tuple(kept for edit in edits if (kept := _cut(edit, length)).extents)


def _cut(edit: Edit, length: int) -> Edit:
    if edit.over:
        return _ended(edit, length)
    *closed, last = edit.extents
    if last.end != FOREVER or last.start <= length:
        return edit
    return msgspec.structs.replace(edit, extents=(*closed, Extent(length)))


def _ended(edit: Edit, at: int) -> Edit:
    extents = tuple(msgspec.structs.replace(each, end=min(each.end, at)) for each in edit.extents if each.start < at)
    return msgspec.structs.replace(edit, extents=extents, over=True)
