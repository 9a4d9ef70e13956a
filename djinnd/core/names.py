"""Names of positions: numbers that say what their KV follows from, beside that of the positions before them.

    tokens        17   4  902  33    8  51
    an edit                    [──────────►       from position 3 on
    names         17   4  902  -…   -…  -…        a number of token and edits, in the token's place

Pages are known by the names of their positions. Sessions of a tenant that are edited alike share pages like any other,
and all share what lies before the first edit.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from operator import attrgetter
from typing import overload

import numpy as np

from djinnd.core.edits import Edit

_START, _END = attrgetter("start"), attrgetter("end")
_ODD = np.uint64(0x9E3779B97F4A7C15)  # 2**64 over the golden ratio: multiplying by it mixes low bits into high ones
_HALF = np.uint64(32)
_LOW = np.uint64((1 << 62) - 1)
_EDITED = np.uint64(1 << 63)  # with the bit after it clear: as int64 below -2**62, which no token is


class Names(Sequence[int]):
    """Of a session's positions. Made when they are asked for: whoever wants those of one page pays for no others."""

    def __init__(self, tokens: Sequence[int], edits: Iterable[Edit]) -> None:
        self._tokens = tokens
        self._edits = edits

    def __len__(self) -> int:
        return len(self._tokens)

    @overload
    def __getitem__(self, index: int) -> int: ...
    @overload
    def __getitem__(self, index: slice) -> list[int]: ...
    def __getitem__(self, index: int | slice) -> int | list[int]:
        if isinstance(index, int):
            return self[index : index + 1 or None][0]
        start, stop, step = index.indices(len(self._tokens))
        assert step == 1
        return names(self._tokens[start:stop], self._edits, start)


def names(tokens: Sequence[int], edits: Iterable[Edit], first: int = 0) -> list[int]:
    """Of the positions from `first` on, which have these tokens: a token's number where nothing is edited; else 62 bits
    that differ, but for chance, with the token, the edits and their order. O(tokens), for each edit."""
    named = np.array(tokens, np.int64).view(np.uint64)
    for edit in edits:
        here = bisect_right(edit.extents, first, key=_END), bisect_left(edit.extents, first + len(named), key=_START)
        for extent in edit.extents[slice(*here)]:
            start = max(extent.start, first)
            part = named[start - first : max(extent.end - first, 0)]
            row = extent.row + start - extent.start
            rows = np.arange(row, row + len(part), dtype=np.uint64) if edit.rows > 1 else np.uint64(0)
            part ^= np.uint64(edit.mark) + rows * _ODD  # far apart, where rows and tokens are small
            for _ in range(2):
                part *= _ODD
                part ^= part >> _HALF
            part &= _LOW
            part |= _EDITED
    listed: list[int] = named.view(np.int64).tolist()
    return listed
