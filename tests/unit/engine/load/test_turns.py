from __future__ import annotations

import threading
from collections.abc import Callable

from djinnd.engine.load.turns import DeviceQueue, DeviceTurn

FOREVER = 60.0  # seconds until a test has failed


def beside(act: Callable[[], None]) -> threading.Thread:
    thread = threading.Thread(target=act, daemon=True)
    thread.start()
    return thread


def test_turns_come_in_the_order_of_the_line() -> None:
    queue, order = DeviceQueue(), list[int]()
    turns = [DeviceTurn(queue) for _ in range(5)]

    def go(index: int) -> None:
        turns[index].take()
        order.append(index)
        turns[index].give_way()

    threads = [beside(lambda index=index: go(index)) for index in reversed(range(5))]
    for thread in threads:
        thread.join(FOREVER)
    assert order == [0, 1, 2, 3, 4]


def test_a_load_that_gave_way_comes_after_the_others_in_line() -> None:
    queue, order = DeviceQueue(), list[str]()
    first, second = DeviceTurn(queue), DeviceTurn(queue)
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


def test_a_closed_line_ends_all_waiting() -> None:
    queue = DeviceQueue()
    first, second = DeviceTurn(queue), DeviceTurn(queue)
    first.take()
    thread = beside(second.take)
    queue.close()
    thread.join(FOREVER)
    assert not thread.is_alive()
