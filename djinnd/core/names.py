"""Names of positions: each is a number that, with the names before it, determines the position's KV.

    tokens        17   4  902  33    8  51
    an edit                    [──────────►       from position 3 on
    names         17   4  902  -…   -…  -…        a hash of token and edits, in the token's place

The keys of pages are made from the names of their positions. Sessions of a tenant with the same edits share pages like
any others, and all sessions share the pages before the first edit.
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
# Set in every name of an edited position, with the bit below it clear: such a name is below -2**62 as int64, which no
# token is.
_EDITED = np.uint64(1 << 63)


class Names(Sequence[int]):
    """The names of a session's positions, as a sequence. Each slice is computed when it is asked for, so that the names
    of one page do not cost those of all others."""

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
    """Names of consecutive positions with these tokens, of which the first is position `first`.

    The name of a position without an edit is its token. Any other name is 62 bits of a hash over the token, the edits
    and their order. Costs O(tokens) for each edit.
    """
    named = np.array(tokens, np.int64).view(np.uint64)
    for edit in edits:
        here = bisect_right(edit.extents, first, key=_END), bisect_left(edit.extents, first + len(named), key=_START)
        for extent in edit.extents[slice(*here)]:
            start = max(extent.start, first)
            part = named[start - first : max(extent.end - first, 0)]
            row = extent.row + start - extent.start
            rows = np.arange(row, row + len(part), dtype=np.uint64) if edit.rows > 1 else np.uint64(0)
            part ^= np.uint64(edit.mark) + rows * _ODD  # keeps the hashes of small row numbers and small tokens apart
            for _ in range(2):
                part *= _ODD
                part ^= part >> _HALF
            part &= _LOW
            part |= _EDITED
    listed: list[int] = named.view(np.int64).tolist()
    return listed
