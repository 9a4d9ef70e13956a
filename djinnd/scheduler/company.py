"""Through which blocks the rows of a step go, and with whom.

All rows of a step run along through all blocks that the step runs (engine/passage.py). For rows of one token that costs
next to nothing. A chunk that goes through a part of the blocks only has a step apart where that takes less time.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from djinnd.core.batch import Row
from djinnd.core.edits import FOREVER
from djinnd.core.session import Session
from djinnd.core.stops import next_stop
from djinnd.scheduler.step_times import StepTimes


class Way(NamedTuple):
    """Of a session's next row: it starts before block `first`, and stops before `last` (one more than the number of
    blocks: nowhere), with positions before `end`."""

    first: int
    last: int
    end: int


def whole_way(num_blocks: int) -> Way:
    """Of most rows."""
    return Way(0, num_blocks + 1, FOREVER)


def way_of(session: Session, whole: Way) -> Way:
    """What stops does so from the first position on that a stop names; what comes before goes to the end."""
    request, stage = session.request, session.stage
    assert request is not None
    end = len(session.tokens)
    first, last = (whole.first, whole.last) if stage is None else (stage.first, stage.last)
    if last == whole.last and (stop := next_stop(request.stops, end)) is not None:
        if stop.position <= session.computed:
            return Way(first, stop.block, end)
        end = stop.position
    return Way(first, last, end)


class Company:
    """The rows that a step has so far. What they are together is counted when somebody asks."""

    def __init__(self, rows: Sequence[Row], times: StepTimes, num_blocks: int) -> None:
        """`rows`: to which others come meanwhile."""
        self._rows = rows
        self._times = times
        self._num_blocks = num_blocks
        self._counted = 0  # of the rows; of those:
        self._blocks = range(0)  # that they run
        self._further = 0  # what they bring beyond one token each
        self._kv = 0  # tokens of KV that those of one token read

    def is_slower_with(self, way: Way, count: int) -> bool:
        """Whether a row more takes less time in a step of its own."""
        rows = len(self._rows)
        if not rows:
            return False
        self._count()
        blocks, further = self._blocks, self._further
        first, last = way.first, min(way.last, self._num_blocks)
        both = _joined(blocks, first, last)
        if (first, last) == (blocks.start, blocks.stop) or (count == 1 and both == blocks) or not further + count - 1:
            return False
        predict = self._times.predict
        together = len(both) * predict(rows + 1, further + count - 1, self._kv)
        alone = len(blocks) * predict(rows, further, self._kv) + (last - first) * predict(1, count - 1)
        return together > alone

    def _count(self) -> None:
        for row in self._rows[self._counted :]:
            first, last = row.first_block, row.last_block
            self._blocks = _joined(self._blocks, first, last) if self._counted else range(first, last)
            self._further += row.count - 1
            self._kv += row.start if row.count == 1 else 0
            self._counted += 1


def _joined(blocks: range, first: int, last: int) -> range:
    return range(min(blocks.start, first), max(blocks.stop, last))
