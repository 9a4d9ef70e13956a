from __future__ import annotations

import pytest

from djinn_client.scheduling import Spread
from tools.bench.spread import spread


def test_percentiles_are_exact() -> None:
    found = spread([float(value) for value in range(101)])
    assert (found.count, found.mean, found.p50, found.p90, found.p99, found.worst) == (101, 50.0, 50.0, 90.0, 99.0, 100)


def test_their_order_does_not_matter_and_between_two_they_are_interpolated() -> None:
    assert spread([3.0, 1.0]) == spread([1.0, 3.0])
    assert spread([3.0, 1.0]).p90 == pytest.approx(2.8)


def test_of_one_and_of_none() -> None:
    assert spread([0.5]) == Spread(1, 0.5, 0.5, 0.5, 0.5, 0.5)
    assert spread([]) == Spread()
