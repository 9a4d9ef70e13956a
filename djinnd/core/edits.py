"""Edits: what a session has done to its activations, at points of the model and positions of the session.

An edit is data, and a function of the position: a position that is computed anew, for whatever reason, is edited again
in the same way. So KV still follows from what the session is, its tokens and its edits, and pages may be dropped,
shared and found as ever (names.py).

The last position of a session is always computed, or computed again, to choose the next token. So "from now on" is from
there, and what ends now ends there.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable
from functools import cached_property
from hashlib import blake2b
from typing import TYPE_CHECKING

import msgspec

from djinn_client.edits import Op
from djinn_client.image import Dtype
from djinn_client.points import Point

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

FOREVER = 1 << 40  # a position that no session comes to
WILD = 1024.0  # larger values that an edit adds, or puts in a place, may lead to an overflow there or in a later block


class Extent(msgspec.Struct, frozen=True, array_like=True):
    """Positions [start, end). `row`: of the edit's values, the one for `start`; where there is but one, it is for
    all."""

    start: int
    end: int = FOREVER
    row: int = 0


class Edit(msgspec.Struct, frozen=True, array_like=True, dict=True):
    """`values`: `rows` rows of the points' width, row-major: none, one for all positions, or one for each. `low` and
    `high`: of `clamp`."""

    number: int  # of the session's, ascending: in this order they apply
    points: tuple[Point, ...]
    op: Op
    extents: tuple[Extent, ...]  # ascending, apart
    scale: float = 1.0
    low: float = -math.inf
    high: float = math.inf
    dtype: Dtype = "float32"
    rows: int = 0
    values: bytes = b""
    over: bool = False  # it was ended: it changes what it has changed, when that is computed anew, and nothing else

    @property
    def first(self) -> int:
        """The first position that it changes; FOREVER where it changes none."""
        return self.extents[0].start if self.extents else FOREVER

    @property
    def end(self) -> int:
        """Behind the last position that it changes."""
        return self.extents[-1].end if self.extents else 0

    @cached_property
    def mark(self) -> int:
        """64 bits of what it does, wherever it does it."""
        what = (self.points, self.op, self.scale, self.low, self.high, self.dtype, self.rows)
        digest = blake2b(msgspec.msgpack.encode(what), digest_size=8)
        digest.update(self.values)
        return int.from_bytes(digest.digest(), "little")

    @cached_property
    def wild_from(self) -> int:
        """The first position at which it may lead to what is no number; FOREVER: none. One that enlarges may, however
        little: at block after block that is a power."""
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
        """Of its values, those with one that is not below the limit, ascending."""
        import numpy as np  # the server makes edits, too, and has no other use for it

        if self.dtype == "bfloat16":
            values = (np.frombuffer(self.values, np.uint16).astype(np.uint32) << 16).view(np.float32)
        else:
            values = np.frombuffer(self.values, self.dtype).astype(np.float32, copy=False)
        are_tame = np.abs(values.reshape(self.rows, -1)) < limit  # NaN is not
        return np.flatnonzero(~are_tame.all(axis=1))


def now(length: int) -> int:
    """The first position that what is said now is about, in a session of so many tokens."""
    return max(length - 1, 0)


def ended(edits: Iterable[Edit], numbers: Collection[int], at: int) -> tuple[Edit, ...]:
    """These edits change nothing from position `at` on."""
    return tuple(kept for edit in edits if (kept := _ended(edit, at) if edit.number in numbers else edit).extents)


def cut(edits: Iterable[Edit], length: int) -> tuple[Edit, ...]:
    """Of a session that keeps its first `length` tokens. What is edited from somewhere on still is, from there on; what
    is edited at certain positions is so when they come again."""
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
