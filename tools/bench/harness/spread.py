"""Percentiles of what was measured, exact: not by buckets, as a daemon keeps them. And how sure a median is."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from math import comb

import msgspec

from djinn_client.protocol.fields.scheduling import Spread


def spread(values: Sequence[float]) -> Spread:
    """Between two measurements a percentile is interpolated. Of nothing, all are 0."""
    if len(values) < 2:
        (only,) = values or (0.0,)
        return Spread(len(values), only, only, only, only, only)
    cuts = statistics.quantiles(values, n=100, method="inclusive")
    return Spread(len(values), statistics.fmean(values), cuts[49], cuts[89], cuts[98], max(values))


class Median(msgspec.Struct, frozen=True):
    """With at least 95 % certainty, the median of what the values are samples of lies between low and high."""

    value: float
    low: float
    high: float


def median(values: Sequence[float]) -> Median:
    """The interval reaches from one of the values to another, whatever their distribution: that more than so many of n
    samples are on one side of the true median is as likely as with as many coins. Fewer than 6 cannot be that sure, and
    give their extremes."""
    ordered = sorted(values)
    count = len(ordered)
    outside, below = 0, 0.5**count  # how many of the lowest are left out; how likely no more are below the median
    while below + comb(count, outside + 1) * 0.5**count <= 0.025:
        outside += 1
        below += comb(count, outside) * 0.5**count
    return Median(statistics.median(ordered), ordered[outside], ordered[-1 - outside])
