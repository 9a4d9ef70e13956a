"""Page copies that are done at once, without bytes: every move between the tiers lands and is sealed."""

from __future__ import annotations

from collections.abc import Iterator

from djinnd.kvcache.moves import Direction, Moves, Transfer


def copies(moves: Moves, *, failing: float = 0, bad: bool = False) -> Iterator[list[Transfer]]:
    """The first `failing` copies fail, and `bad` says whether their sources are unusable. → a list that gets the
    transfers as they end. Moves that follow from that are done too."""
    while moves.waiting:
        (move,) = moves.take(1)
        if failing:
            failing -= 1
            yield moves.failed(move, bad=bad)
            continue
        yield moves.landed(move)
        if move.direction is not Direction.PROMOTE:
            yield moves.sealed(move, 0)
