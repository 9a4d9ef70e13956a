from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from djinnd.model.adapter_rows import NO_SLOT, TILE_FIELDS, fill_tiles, most_tiles

ROWS = st.lists(st.tuples(st.integers(NO_SLOT, 3), st.integers(1, 40)), min_size=1, max_size=12)


@given(ROWS, st.integers(1, 20))
def test_each_token_with_an_adapter_is_in_one_tile_of_its_slot(rows: list[tuple[int, int]], size: int) -> None:
    slots, counts = [slot for slot, _ in rows], [count for _, count in rows]
    tokens = sum(counts)
    order = np.full(tokens, -7, np.int32)
    tiles = np.full((most_tiles(tokens, len(rows), size), TILE_FIELDS), 99, np.int32)
    fill_tiles(slots, counts, size, order, tiles)
    of_token = np.repeat(slots, counts)
    used = tiles[: np.argmax(tiles[:, 0] == NO_SLOT)] if (tiles[:, 0] == NO_SLOT).any() else tiles
    seen = []
    for slot, first, count in used.tolist():
        assert 0 < count <= size
        seen += order[first : first + count].tolist()
        assert (of_token[order[first : first + count]] == slot).all()
    assert sorted(seen) == np.flatnonzero(of_token != NO_SLOT).tolist()
    assert (tiles[len(used) :, 0] == NO_SLOT).all()
