"""The samples of rows with guesses, in tests without a model."""

from __future__ import annotations

from collections.abc import Sequence

from djinnd.core.batch import Row


def sampled(row: Row, token: int, right: int) -> list[int]:
    """The tokens that a session gets from its row: at least the first `right` ones of the guess, then `token`."""
    right = min(right, len(row.guess))
    while row.guess[right : right + 1] == (token,):
        right += 1
    return [*row.guess[:right], token]


def further(samples: Sequence[Sequence[int]]) -> dict[int, Sequence[int]]:
    """The argument of Scheduler.complete. `samples`: for each row that samples."""
    return {index: some[1:] for index, some in enumerate(samples) if len(some) > 1}
