"""Exact percentiles of measurements, and how certain a median is. (A daemon counts in buckets.)"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from math import comb

import msgspec

from djinn_client.protocol.fields.scheduling import Spread


def spread(values: Sequence[float]) -> Spread:
    """Percentiles, interpolated between two measurements. Without measurements all are 0."""
    if len(values) < 2:
        (only,) = values or (0.0,)
        return Spread(len(values), only, only, only, only, only)
    cuts = statistics.quantiles(values, n=100, method="inclusive")
    return Spread(len(values), statistics.fmean(values), cuts[49], cuts[89], cuts[98], max(values))


class Median(msgspec.Struct, frozen=True):
    """With at least 95 % certainty, the median of the whole distribution lies between low and high."""

    value: float
    low: float
    high: float


def median(values: Sequence[float]) -> Median:
    """The interval reaches from one value to another, whatever the distribution is. Each sample is on either side of
    the true median with equal chance, so the coin's binomial distribution tells how many values to leave out on each
    side. Fewer than 6 values cannot reach the certainty, and give their extremes."""
    ordered = sorted(values)
    count = len(ordered)
    outside, below = 0, 0.5**count  # lowest values that are left out; chance that no more are below the median
    while below + comb(count, outside + 1) * 0.5**count <= 0.025:
        outside += 1
        below += comb(count, outside) * 0.5**count
    return Median(statistics.median(ordered), ordered[outside], ordered[-1 - outside])
