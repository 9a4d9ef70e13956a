"""Percentiles of what was measured, exact: not by buckets, as a daemon keeps them."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from djinn_client.scheduling import Spread


def spread(values: Sequence[float]) -> Spread:
    """Between two measurements a percentile is interpolated. Of nothing, all are 0."""
    if len(values) < 2:
        (only,) = values or (0.0,)
        return Spread(len(values), only, only, only, only, only)
    cuts = statistics.quantiles(values, n=100, method="inclusive")
    return Spread(len(values), statistics.fmean(values), cuts[49], cuts[89], cuts[98], max(values))
