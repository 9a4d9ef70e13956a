"""Assigns pages to slots so that adjacent pages get adjacent slots, because these are copied in one piece.

    pages   7   4   5   6     a session's, in the order of its tokens
    slots  23  20  21  22     20 to 23 are free: one copy of four pages

Any page can go into any slot. In the order in which slots become free, slots would fall while pages rise, because a
session's last page is evicted first. Then no two pages would be adjacent at both ends.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence


def rising_with(places: Sequence[int], others: Collection[int]) -> list[int]:
    """Reorders `others` so that they rise as `places` do: the least one goes to the least place, and so on. Both have
    the same length."""
    beside = dict(zip(sorted(places), sorted(others), strict=True))
    return [beside[place] for place in places]
