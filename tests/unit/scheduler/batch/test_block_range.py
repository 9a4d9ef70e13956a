"""How rows share a step if some pass only some of the blocks. Tests of whole steps are in test_stages.py."""

from __future__ import annotations

import pytest

from djinnd.core.batch import Row
from djinnd.core.edits import FOREVER
from djinnd.core.request import Request
from djinnd.core.session import Session
from djinnd.core.stops import Stage, Stop
from djinnd.scheduler.batch.block_range import BlockRange, StepBlocks, range_of, whole_range
from djinnd.scheduler.timing.step_times import StepTimes
from tests.support.virtual import measured

BLOCKS = 10
WHOLE = whole_range(BLOCKS)
TO_END = BLOCKS + 1


def session_of(length: int, computed: int, stage: Stage | None, *stops: Stop) -> Session:
    session = Session("s", "m", 1000, "agent", [7] * length)
    session.computed, session.stage = computed, stage
    session.request = Request(1, 0, length, 1, stops=stops)
    return session


@pytest.mark.parametrize(
    ("computed", "stage", "stops", "blocks"),
    [
        (0, None, (Stop(3, 8),), (0, TO_END, 8)),
        (0, None, (Stop(3, 20),), (0, TO_END, 20)),
        (8, None, (Stop(3, 8),), (0, 3, 20)),
        (8, None, (Stop(3, 8), Stop(5, 2)), (0, 3, 20)),
        (8, Stage(0, 3, 12), (Stop(3, 8),), (0, 3, 20)),
        (8, Stage(3, TO_END, 8), (), (3, TO_END, 20)),
        (8, Stage(3, TO_END, 8), (Stop(5, 14),), (3, TO_END, 14)),
        (14, Stage(3, TO_END, 14), (Stop(5, 14),), (3, 5, 20)),
    ],
)
def test_positions_before_a_stop_pass_all_blocks_and_the_others_stop_there(
    computed: int, stage: Stage | None, stops: tuple[Stop, ...], blocks: tuple[int, int, int]
) -> None:
    assert range_of(session_of(20, computed, stage, *stops), WHOLE) == BlockRange(*blocks)


def row(first: int, last: int, count: int) -> Row:
    session = session_of(50, 0, None)
    assert session.request is not None
    return Row(session, session.request, 0, count, first, last, False)


@pytest.mark.parametrize(
    ("rows", "blocks", "count", "slower"),
    [
        ([], (0, 3), 20, False),
        ([(0, BLOCKS, 20)], (0, TO_END), 20, False),  # the same blocks
        ([(3, BLOCKS, 20)], (3, TO_END), 20, False),
        ([(0, BLOCKS, 20)], (0, 3), 20, True),  # the one with three blocks would be computed in seven more
        ([(0, 3, 20)], (3, TO_END), 20, True),
        ([(0, BLOCKS, 1)], (4, TO_END), 1, False),  # rows of one token
        ([(0, BLOCKS, 20)], (4, TO_END), 1, False),
        ([(4, BLOCKS, 20)], (0, TO_END), 1, True),
        ([(0, 3, 1), (5, BLOCKS, 20)], (0, TO_END), 1, False),  # together they run all blocks
    ],
)
def test_a_row_that_shares_no_blocks_with_many_tokens_is_slower_with_them(
    rows: list[tuple[int, int, int]], blocks: tuple[int, int], count: int, slower: bool
) -> None:
    """Step times depend on tokens here. If they depend on reading the weights, all rows share a step."""
    for seconds_a_token, expected in ((1.0, slower), (0.0, False)):
        times = StepTimes()
        measured(times, lambda tokens, each=seconds_a_token: 1.0 + each * tokens)
        so_far: list[Row] = []
        step_blocks = StepBlocks(so_far, times, BLOCKS)
        for first, last, many in rows:
            step_blocks.is_slower_with(
                BlockRange(first, last, FOREVER), many
            )  # asked in between: each row is counted once
            so_far.append(row(first, last, many))
        assert step_blocks.is_slower_with(BlockRange(*blocks, FOREVER), count) == expected
