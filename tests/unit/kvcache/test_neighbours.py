from __future__ import annotations

import pytest

from djinnd.kvcache.neighbours import rising_with


def test_the_least_goes_to_the_least() -> None:
    assert rising_with([7, 4, 5, 6], {20, 21, 22, 23}) == [23, 20, 21, 22]
    assert rising_with([3, 1, 2], [40, 10, 12]) == [40, 10, 12]
    assert rising_with([], []) == []


def test_there_is_one_for_each() -> None:
    with pytest.raises(ValueError, match="shorter"):
        rising_with([1, 2], [1])
