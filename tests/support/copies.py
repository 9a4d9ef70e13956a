"""Copies that happen at once, where nothing is copied: what is under way between the tiers lands, and is sealed."""

from __future__ import annotations

from collections.abc import Iterator

from djinnd.kvcache.moves import Moves, Transfer, Way


def copies(moves: Moves, *, failing: float = 0, bad: bool = False) -> Iterator[list[Transfer]]:
    """The first `failing` of them do not come, with sources that are `bad`. → after each thing that happens, the
    transfers that it ended; what telling of them asks for happens, too."""
    while moves.waiting:
        (move,) = moves.take(1)
        if failing:
            failing -= 1
            yield moves.failed(move, bad=bad)
            continue
        yield moves.landed(move)
        if move.way is not Way.PROMOTE:
            yield moves.sealed(move, 0)
