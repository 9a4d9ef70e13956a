"""A batch is the rows of one step. The scheduler composes it and a model runner runs it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import msgspec

from djinnd.core.request import Request
from djinnd.core.session import Session
from djinnd.core.stops import Stage

# In place of a row's token: the row has none, because its grammar mask came too late, or because a guess spoilt it. Its
# session's last position is run again.
LATE = -1


class Row(msgspec.Struct, frozen=True):
    """Tokens [start, start + count) of a session, to be run through blocks [first_block, last_block).

    `fed`: the row's token is the one that the step before samples as its `fed`-th, and the session does not have it
    yet: that step still runs.

    The last tokens may be a guess: tokens that the session does not have, and may get. The step then samples behind
    each of them, too.

    `request` and `stage` are the session's when the batch was composed. Before the step has run, the request may end,
    the session may get another one, and the stage may be lost.

    This is a msgspec struct because a step makes hundreds of rows, and a frozen dataclass takes ten times as long to
    make.
    """

    session: Session
    request: Request
    start: int
    count: int
    first_block: int
    last_block: int
    samples: bool  # the row ends with the session's last token, behind the last block: the step samples the next token
    stage: Stage | None = None  # the session's stage when the batch was composed
    guess: tuple[int, ...] = ()  # counted in `count`; only with `samples`
    fed: int | None = None  # only with a count of 1

    @property
    def end(self) -> int:
        return self.start + self.count

    @property
    def decodes(self) -> bool:
        """True if it has one token of its session."""
        return self.count == 1 + len(self.guess)


@dataclass(frozen=True, slots=True)
class Batch:
    """Rows of one model. Decode rows (one token) come first, then rows with guesses and chunks of prefill.

    `room`: how many further tokens of guesses the step may run.
    """

    model: str
    rows: tuple[Row, ...]
    step: int
    room: int = 0

    @property
    def tokens(self) -> int:
        return sum(row.count for row in self.rows)

    @property
    def decode_only(self) -> bool:
        return all(row.count == 1 for row in self.rows)


def in_step_order(rows: Iterable[Row]) -> tuple[Row, ...]:
    """The rows in the order of a batch. Rows of one kind stay in theirs."""
    return tuple(sorted(rows, key=lambda row: row.count > 1))


def recomputed(batch: Batch) -> dict[int, int]:
    """Counts, by tenant, the tokens of the batch that the sessions had before their requests.

    A session's last token before the request is not counted: it is always run with the request.
    """
    counts: dict[int, int] = {}
    for row in batch.rows:
        again = min(row.end, row.request.first - 1) - row.start
        if again > 0:
            counts[row.session.tenant] = counts.get(row.session.tenant, 0) + again
    return counts


def blocks_of(rows: Sequence[Row]) -> range:
    """The blocks that a step with these rows runs."""
    return range(min([row.first_block for row in rows]), max([row.last_block for row in rows]))
