"""A batch: the rows of one step. What a scheduler decides and a model runner carries out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from djinnd.core.request import Request
from djinnd.core.session import Session
from djinnd.core.stops import Stage

LATE = -1  # in the place of a row's token: it has none, as its mask was not there; its last position is run again


class Row(msgspec.Struct, frozen=True):
    """Tokens [start, start + count) of a session, through blocks [first_block, last_block), for the request that it had
    when the batch was composed. The request may end, and the session get another, before the step has run; its stage
    may be lost.

    A struct, because a step makes hundreds, and a frozen dataclass takes ten times as long to make."""

    session: Session
    request: Request
    start: int
    count: int
    first_block: int
    last_block: int
    samples: bool  # the row's last token is the session's last, and goes to the end: the step chooses the next one
    stage: Stage | None = None  # that the session had then

    @property
    def end(self) -> int:
        return self.start + self.count


@dataclass(frozen=True, slots=True)
class Batch:
    """Rows of one model. Decode rows (one token) come first, then chunks of prefill."""

    model: str
    rows: tuple[Row, ...]
    step: int

    @property
    def tokens(self) -> int:
        return sum(row.count for row in self.rows)

    @property
    def decode_only(self) -> bool:
        return all(row.count == 1 for row in self.rows)


def recomputed(batch: Batch) -> dict[int, int]:
    """By tenant, the tokens of the batch that their sessions had before the request. Without a session's last one,
    which is always computed with the request."""
    counts: dict[int, int] = {}
    for row in batch.rows:
        again = min(row.end, row.request.first - 1) - row.start
        if again > 0:
            counts[row.session.tenant] = counts.get(row.session.tenant, 0) + again
    return counts


def blocks_of(rows: Sequence[Row]) -> range:
    """That a step with these rows runs."""
    return range(min([row.first_block for row in rows]), max([row.last_block for row in rows]))
