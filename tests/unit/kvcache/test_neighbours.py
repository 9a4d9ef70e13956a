from __future__ import annotations

import pytest

from djinnd.kvcache.neighbours import rising_with


def test_the_least_slot_goes_to_the_least_place() -> None:
    assert rising_with([7, 4, 5, 6], {20, 21, 22, 23}) == [23, 20, 21, 22]
    assert rising_with([3, 1, 2], [40, 10, 12]) == [40, 10, 12]
    assert rising_with([], []) == []


def test_each_place_gets_one_slot() -> None:
    with pytest.raises(ValueError, match="shorter"):
        rising_with([1, 2], [1])
