from __future__ import annotations

import math
import random

import pytest

from djinn_client.protocol.fields.scheduling import Spread
from tools.bench.harness.spread import Median, median, spread


def test_percentiles_are_exact() -> None:
    found = spread([float(value) for value in range(101)])
    assert (found.count, found.mean, found.p50, found.p90, found.p99, found.worst) == (101, 50.0, 50.0, 90.0, 99.0, 100)


def test_percentiles_ignore_order_and_interpolate_between_two_values() -> None:
    assert spread([3.0, 1.0]) == spread([1.0, 3.0])
    assert spread([3.0, 1.0]).p90 == pytest.approx(2.8)


def test_one_value_is_every_percentile_and_no_value_gives_zeros() -> None:
    assert spread([0.5]) == Spread(1, 0.5, 0.5, 0.5, 0.5, 0.5)
    assert spread([]) == Spread()


def test_a_medians_interval_follows_the_binomial_distribution() -> None:
    """All of 6 samples lie on one side of the true median once in 32 times, and 15 or more of 20 samples once in 24."""
    assert median([3.0, 1.0, 6.0, 2.0, 5.0, 4.0]) == Median(3.5, 1.0, 6.0)
    assert median([float(value) for value in range(20)]) == Median(9.5, 5.0, 14.0)
    assert median([0.0, 1.0]) == Median(0.5, 0.0, 1.0)


def test_the_true_median_is_in_the_interval_19_times_of_20() -> None:
    chance = random.Random(0)
    samples = [median([chance.expovariate(math.log(2)) for _ in range(45)]) for _ in range(2000)]
    held = sum(each.low <= 1.0 <= each.high for each in samples) / len(samples)
    assert 0.945 <= held <= 0.985, held
