"""Decides which rows share a step, by the blocks that each of them passes.

Every row of a step is computed in all blocks that the step runs (engine/probes/partial_rows.py). For rows of one token
that costs next to nothing. A chunk that passes only some of the blocks gets a step of its own if that takes less time.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from djinnd.core.batch import Row
from djinnd.core.edits import FOREVER
from djinnd.core.session import Session
from djinnd.core.stops import next_stop
from djinnd.scheduler.timing.step_times import StepTimes


class BlockRange(NamedTuple):
    """The blocks that a session's next row passes. It starts before block `first` and stops before block `last`,
    with positions before `end`. A row that does not stop has the number of blocks plus one as `last`."""

    first: int
    last: int
    end: int


def whole_range(num_blocks: int) -> BlockRange:
    """The range of a row that passes all blocks."""
    return BlockRange(0, num_blocks + 1, FOREVER)


def range_of(session: Session, whole: BlockRange) -> BlockRange:
    """The blocks that the session's next row passes. Positions from a stop's `position` on stop there; earlier ones
    pass all blocks."""
    request, stage = session.request, session.stage
    assert request is not None
    end = len(session.tokens)
    first, last = (whole.first, whole.last) if stage is None else (stage.first, stage.last)
    if last == whole.last and (stop := next_stop(request.stops, end)) is not None:
        if stop.position <= session.computed:
            return BlockRange(first, stop.block, end)
        end = stop.position
    return BlockRange(first, last, end)


class StepBlocks:
    """The rows that a step has so far. Their totals are computed when they are asked for."""

    def __init__(self, rows: Sequence[Row], times: StepTimes, num_blocks: int) -> None:
        """`rows`: the caller's list, which grows meanwhile."""
        self._rows = rows
        self._times = times
        self._num_blocks = num_blocks
        self._counted = 0  # how many of the rows are in the totals:
        self._blocks = range(0)  # blocks that they run
        self._further = 0  # tokens beyond one each

    def is_slower_with(self, passed: BlockRange, count: int) -> bool:
        """True if a further row of `count` tokens takes less time in a step of its own."""
        rows = len(self._rows)
        if not rows:
            return False
        self._count()
        blocks, further = self._blocks, self._further
        first, last = passed.first, min(passed.last, self._num_blocks)
        both = _joined(blocks, first, last)
        if (first, last) == (blocks.start, blocks.stop) or (count == 1 and both == blocks) or not further + count - 1:
            return False
        predict = self._times.predict
        together = len(both) * predict(rows + 1, further + count - 1)
        alone = len(blocks) * predict(rows, further) + (last - first) * predict(1, count - 1)
        return together > alone

    def _count(self) -> None:
        for row in self._rows[self._counted :]:
            first, last = row.first_block, row.last_block
            self._blocks = _joined(self._blocks, first, last) if self._counted else range(first, last)
            self._further += row.count - 1
            self._counted += 1


def _joined(blocks: range, first: int, last: int) -> range:
    return range(min(blocks.start, first), max(blocks.stop, last))
