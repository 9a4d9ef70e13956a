from __future__ import annotations

import numpy as np

from djinnd.model.states.slots import fill_slots


def test_a_state_is_read_from_the_page_of_the_token_before() -> None:
    lengths = np.array([1, 2, 8, 9, 10, 17, 0], dtype=np.int32)
    table = np.array([[3, 0, 0], [4, 0, 0], [5, 0, 0], [6, 2, 0], [7, 9, 0], [8, 1, 11], [99, 98, 97]], dtype=np.int32)
    slots = np.full((7, 2), 77, dtype=np.int32)
    fill_slots(lengths, table, 8, slots)
    assert slots.tolist() == [[-1, 3], [4, 4], [5, 5], [6, 2], [9, 9], [1, 11], [-1, 0]]  # the last row is padding
