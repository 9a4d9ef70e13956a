from __future__ import annotations

import math
from contextlib import ExitStack

import pytest

from djinn_client.errors import Busy
from djinnd.server.quotas.queueing import Queue


def fill(stack, queue, user, count, at=0.0):
    return [stack.enter_context(queue.place(user, at)) for _ in range(count)]


def test_a_request_has_its_place_until_it_starts_or_ends():
    queue = Queue(2, at=0.0)
    with ExitStack() as stack:
        first, _ = fill(stack, queue, 1, 2)
        with pytest.raises(Busy), queue.place(1, 0.0):
            pytest.fail("a third")
        first.started(0.5)
        first.started(0.6)  # an engine that reports it twice
        assert len(queue) == 1
        with queue.place(1, 1.0):
            assert len(queue) == 2
        assert len(queue) == 1, "a request that ended without a start must leave"
    assert len(queue) == 0


def test_a_refused_request_gets_the_figures():
    queue = Queue(3, at=0.0)
    with ExitStack() as stack:
        fill(stack, queue, 1, 3)
        with pytest.raises(Busy, match=r"3 requests wait .* 3 of them yours, .* limits\.queue is 3: try again") as busy:
            fill(stack, queue, 1, 1)
    assert busy.value.data == {"waiting": 3, "own": 3, "limit": 3, "retry_s": 30.0}


def test_the_time_to_try_again_follows_from_the_rate_of_starts():
    queue = Queue(100, at=0.0)
    for tick in range(1000):  # 10 per second
        with queue.place(1, tick / 10) as place:
            place.started(tick / 10)
    with ExitStack() as stack:
        fill(stack, queue, 1, 100, at=100.0)

        def retry_s(at):
            with pytest.raises(Busy) as busy:
                fill(stack, queue, 1, 1, at)
            return busy.value.data["retry_s"]

        assert retry_s(100.0) == pytest.approx(5.0, rel=0.05), "half of the queue has started then"
        assert retry_s(110.0) == pytest.approx(5.0 * 2.718, rel=0.05), "no request starts any more"
        assert retry_s(500.0) == 30.0


def test_a_queue_of_another_user_s_requests_is_not_full():
    queue = Queue(8, at=0.0)
    with ExitStack() as stack:
        fill(stack, queue, 1, 8)
        fill(stack, queue, 2, 4)  # an equal share of the places
        with pytest.raises(Busy):
            fill(stack, queue, 2, 1)
        with pytest.raises(Busy):
            fill(stack, queue, 1, 1)
        fill(stack, queue, 3, 3)  # 8 / 3, and one more is admitted
        with pytest.raises(Busy):
            fill(stack, queue, 3, 1)
        assert len(queue) == 15


def test_the_number_of_waiting_requests_is_bounded_for_any_number_of_users():
    queue = Queue(16, at=0.0)
    with ExitStack() as stack:
        for user in range(50):
            for _ in range(16):
                try:
                    fill(stack, queue, user, 1)
                except Busy:
                    break
        assert len(queue) == sum(math.ceil(16 / users) for users in range(1, 51))


def test_a_new_size_of_the_queue_applies_at_once():
    queue = Queue(1, at=0.0)
    with ExitStack() as stack:
        fill(stack, queue, 1, 1)
        queue.places = 3
        fill(stack, queue, 1, 2)
        queue.places = 1
        with pytest.raises(Busy):
            fill(stack, queue, 1, 1)
