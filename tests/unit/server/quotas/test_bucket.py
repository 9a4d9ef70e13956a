from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from djinnd.server.quotas.bucket import Bucket


@given(
    st.floats(0.001, 1e6),
    st.floats(0.0, 1e7),
    st.lists(st.tuples(st.floats(0.0, 30.0), st.integers(0, 10_000)), max_size=40),
)
def test_a_bucket_gives_its_rate_and_its_size_beside_the_last_admitted(rate, size, asked):
    bucket, at, taken, last = Bucket(rate, size, 0.0), 0.0, 0, 0
    for pause, amount in asked:
        at += pause
        if bucket.wait_s(at):
            continue
        bucket.take(amount, at)
        taken, last = taken + amount, amount
        assert taken - last <= (rate * at + size) * (1 + 1e-6)


def test_an_idle_bucket_is_no_fuller_than_full():
    bucket = Bucket(5.0, 50.0, 0.0)
    bucket.take(51, 10_000.0)
    assert bucket.wait_s(10_000.0) == pytest.approx(0.2)


def test_taking_no_more_than_the_level_causes_no_wait():
    bucket = Bucket(1000.0, 256, 0.0)
    assert bucket.level(0.0) == 256
    bucket.take(256, 0.0)
    assert bucket.level(0.0) == 0 and bucket.wait_s(0.0) == 0.0
    assert bucket.level(0.1) == pytest.approx(100)
    assert bucket.level(1e6) == 256


def test_resizing_keeps_the_level_up_to_the_new_size():
    bucket = Bucket(1.0, 10, 0.0)
    bucket.resize(2.0, 5, 0.0)
    assert bucket.level(0.0) == 5
    bucket.resize(2.0, 20, 1.0)
    assert bucket.level(1.0) == 5, "the flow before it grew did not fit"
    assert bucket.level(2.0) == 7


def test_a_late_time_counts_as_now():
    """Messages of several engines do not come in the order of their times."""
    bucket = Bucket(1.0, 10, 5.0)
    bucket.take(10, 5.0)
    bucket.take(1, 4.0)
    assert bucket.level(5.0) == -1
