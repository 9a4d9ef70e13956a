from __future__ import annotations

import math

import pytest

from djinnd.kvcache.copy_queue import CopyQueue
from djinnd.kvcache.moves import Direction, Move, Transfer
from djinnd.kvcache.tuning import LEFT_OVER, OWED_BYTES, SAVED_S

PAGE = 100  # bytes
RATE = 1000.0  # bytes a second


def move(key: bytes, *, urgent: bool = False) -> Move:
    return Move(Direction.DEMOTE, key, 0, 0, on_landing=[Transfer("a", 0, is_urgent=urgent)])


def begun(queue: CopyQueue) -> list[bytes]:
    """The keys of all pages that may begin now."""
    keys = []
    while moves := queue.next:
        begins = moves.popleft()
        keys.append(begins.key)
        queue.began(moves, [begins], PAGE)
    return keys


def test_urgent_pages_come_first() -> None:
    queue = CopyQueue()
    for key, urgent in ((b"a", False), (b"b", True), (b"c", False), (b"d", True)):
        queue.add(move(key, urgent=urgent))
    assert len(queue) == 4
    assert begun(queue) == [b"b", b"d", b"a", b"c"] and not queue


def test_a_page_that_becomes_urgent_overtakes_the_others() -> None:
    queue = CopyQueue()
    moves = [move(key) for key in (b"a", b"b", b"c")]
    for each in moves:
        queue.add(each)
    queue.hurry()
    moves[1].on_landing[0].is_urgent = True
    queue.hurry()
    assert begun(queue) == [b"b", b"a", b"c"]


def test_a_dropped_move_does_not_begin() -> None:
    queue = CopyQueue()
    moves = [move(key, urgent=urgent) for key, urgent in ((b"a", False), (b"b", True), (b"c", False), (b"d", True))]
    for each in moves:
        queue.add(each)
    assert all(each.is_queued for each in moves)
    moves[0].is_dropped = moves[3].is_dropped = True
    queue.drop()
    assert begun(queue) == [b"b", b"c"] and not queue
    assert not moves[1].is_queued and not moves[2].is_queued


def test_only_pages_that_are_not_urgent_are_held_to_the_rate() -> None:
    queue = CopyQueue()
    queue.pace(RATE, 10.0)
    for number in range(40):
        queue.add(move(b"%d" % number))
    assert len(begun(queue)) == 1, "a bucket that is not empty lets one go, and is in debt then"
    begins = 1
    for tenth in range(1, 21):
        queue.add(move(b"urgent", urgent=True))
        queue.pace(RATE, 10.0 + tenth / 10)
        urgent, *others = begun(queue)
        assert urgent == b"urgent"
        begins += len(others)
    assert begins * PAGE - 2.0 * RATE <= PAGE + SAVED_S * RATE
    assert begins * PAGE >= 2.0 * RATE - PAGE


def test_pages_that_are_not_urgent_are_copied_however_many_are_urgent() -> None:
    queue = CopyQueue()
    for number in range(4):
        queue.add(move(b"%d" % number))
    keys = []
    for _ in range(5 * LEFT_OVER):
        queue.add(move(b"urgent", urgent=True))
        moves = queue.next
        begins = moves.popleft()
        keys.append(begins.key)
        queue.began(moves, [begins], OWED_BYTES)
    assert [keys.index(b"%d" % number) for number in range(4)] == [8, 17, 26, 35]


@pytest.mark.parametrize("step", [0.01, 0.3])
def test_the_rate_is_kept_however_long_steps_are(step: float) -> None:
    queue, begins = CopyQueue(), 0
    for number in range(4000):
        queue.add(move(b"%d" % number))
    for number in range(round(30 / step)):
        queue.pace(RATE, number * step)
        begins += len(begun(queue))
    assert begins * PAGE == pytest.approx(30 * RATE, rel=0.05)


def test_the_bucket_saves_up_little() -> None:
    queue = CopyQueue()
    for now in (10.0, 1000.0):
        queue.pace(RATE, now)
        queue.add(move(b"a"))
        assert begun(queue) == [b"a"]
    queue.pace(RATE, 2000.0)
    for number in range(40):
        queue.add(move(b"%d" % number))
    assert len(begun(queue)) == math.ceil(SAVED_S * RATE / PAGE)


def test_a_time_without_a_rate_leaves_no_credit() -> None:
    queue = CopyQueue()
    for number in range(10):
        queue.add(move(b"%d" % number))
    queue.pace(RATE, 1.0)
    assert len(begun(queue)) == 1
    queue.pace(math.inf, 1.0)
    assert len(begun(queue)) == 9
    queue.pace(RATE, 1.0)
    queue.add(move(b"a"))
    queue.add(move(b"b"))
    assert begun(queue) == [b"a"]
