from __future__ import annotations

import threading
from collections.abc import Callable

from djinnd.engine.turns import Line, Turn

FOREVER = 60.0  # seconds: a test that waits so long has failed


def beside(act: Callable[[], None]) -> threading.Thread:
    thread = threading.Thread(target=act, daemon=True)
    thread.start()
    return thread


def test_turns_come_in_the_order_in_which_they_stood_in_line() -> None:
    line, order = Line(), list[int]()
    turns = [Turn(line) for _ in range(5)]

    def go(index: int) -> None:
        turns[index].take()
        order.append(index)
        turns[index].give_way()

    threads = [beside(lambda index=index: go(index)) for index in reversed(range(5))]
    for thread in threads:
        thread.join(FOREVER)
    assert order == [0, 1, 2, 3, 4]


def test_who_gives_way_comes_after_those_who_stand_in_line() -> None:
    line, order = Line(), list[str]()
    first, second = Turn(line), Turn(line)
    first.take()
    first.give_way()
    first.give_way()  # does nothing
    second.take()

    def come_back() -> None:
        first.take()
        order.append("first")

    thread = beside(come_back)
    order.append("second")
    second.give_way()
    thread.join(FOREVER)
    assert order == ["second", "first"]
    first.take()  # it is still its turn


def test_nobody_waits_in_a_line_that_is_closed() -> None:
    line = Line()
    first, second = Turn(line), Turn(line)
    first.take()
    thread = beside(second.take)
    line.close()
    thread.join(FOREVER)
    assert not thread.is_alive()
