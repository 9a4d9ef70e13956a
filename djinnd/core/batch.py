"""A batch: the rows of one step. What a scheduler decides and a model runner carries out."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from djinnd.core.request import Request
from djinnd.core.session import Session


class Row(msgspec.Struct, frozen=True):
    """Tokens [start, start + count) of a session, through blocks [first_block, last_block), for the request that it had
    when the batch was composed. The request may end, and the session get another, before the step has run.

    A struct, because a step makes hundreds, and a frozen dataclass takes ten times as long to make."""

    session: Session
    request: Request
    start: int
    count: int
    first_block: int
    last_block: int
    samples: bool  # the row's last token is the session's last: the step chooses the next one

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
