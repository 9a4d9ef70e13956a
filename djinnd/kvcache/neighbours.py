"""Which page goes to which slot: neighbours to neighbours, as those travel as one copy.

    pages   7   4   5   6     a session's, in the order of its tokens
    slots  23  20  21  22     20 to 23 are free: one copy of four pages

Any set of slots takes any set of pages. Given one by one as they are had, slots would fall where pages rise, as the
last page of who has left gives way first, and no two pages would be neighbours at both ends.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence


def rising_with(places: Sequence[int], others: Collection[int]) -> list[int]:
    """As many `others` as there are places, each once: the least one for the least place, and so on."""
    beside = dict(zip(sorted(places), sorted(others), strict=True))
    return [beside[place] for place in places]
