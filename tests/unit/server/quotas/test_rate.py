from __future__ import annotations

import pytest

from djinnd.server.quotas.rate import Rate


@pytest.mark.parametrize("after", [2, 10, 100, 1000])
def test_a_steady_flow_has_its_rate_from_the_beginning(after):
    rate = Rate(window=10.0, at=50.0)
    for tick in range(1, 10 * after + 1):
        rate.count(3, 50.0 + tick / 10)
    assert rate.per_second(50.0 + after) == pytest.approx(30.0, rel=0.05)


def test_a_flow_that_has_stopped_is_forgotten():
    rate = Rate(window=10.0, at=0.0)
    for second in range(100):
        rate.count(5, float(second))
    assert rate.per_second(109.0) == pytest.approx(5 / 2.718, rel=0.1)
    assert rate.per_second(400.0) < 1e-9


def test_a_first_event_is_no_burst():
    rate = Rate(window=10.0, at=0.0)
    assert rate.per_second(0.0) == 0.0
    rate.count(7, 0.0)
    assert rate.per_second(0.0) == 7.0


def test_a_late_time_counts_as_now():
    """Messages of several engines do not come in the order of their times."""
    rate = Rate(window=10.0, at=0.0)
    rate.count(1, 5.0)
    rate.count(1, 4.0)
    assert rate.per_second(5.0) == pytest.approx(2 / 3.9347, rel=1e-3)
