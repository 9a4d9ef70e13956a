"""Measurements in turns, so that changes of the machine's speed fall on all that is compared."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeVar

Figure = TypeVar("Figure")


def in_turns(
    ways: Mapping[str, Callable[[], Figure]], rounds: int, begin: Callable[[int], object] = lambda number: None
) -> dict[str, list[Figure]]:
    """Measures each way once a round. Each round begins with the next way, so that no way always follows the same one.

    `begin` is called with the number of each round that begins, from 1.
    """
    names = list(ways)
    found: dict[str, list[Figure]] = {name: [] for name in names}
    for number in range(rounds):
        begin(number + 1)
        first = number % len(names)
        for name in names[first:] + names[:first]:
            found[name].append(ways[name]())
    return found
