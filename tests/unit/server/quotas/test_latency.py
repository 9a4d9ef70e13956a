"""Histograms, compared with numpy, and which of them each time of a session's calls goes into."""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np
import pytest

from djinn_client.protocol.fields.scheduling import CLASSES, Latency, Spread
from djinnd.server.quotas.latency import BOUNDS, Histogram, Latencies, SessionLatency

RATIO = 1.125


def histogram_of(times):
    histogram = Histogram()
    for time in times:
        histogram.add(float(time))
    return histogram


def test_bounds_grow_by_less_than_an_eighth_from_a_tenth_of_a_millisecond_to_ten_minutes():
    assert BOUNDS[0] == 1e-4 and BOUNDS[-1] >= 600
    assert all(low < high < RATIO * low for low, high in pairwise(BOUNDS))


@pytest.mark.parametrize("count", [1, 2, 3, 7, 99, 100, 101, 5000])
@pytest.mark.parametrize(("scale", "width"), [(-7, 0.1), (-4, 1.5), (2, 1.0)])
def test_percentiles_are_numpy_s_or_at_most_an_eighth_more(count, scale, width):
    times = np.clip(np.random.default_rng(count).lognormal(scale, width, count), 1e-4, 700)
    spread = histogram_of(times).spread()
    assert (spread.count, spread.worst) == (count, times.max())
    assert spread.mean == pytest.approx(times.mean())
    for rank, told in ((50, spread.p50), (90, spread.p90), (99, spread.p99)):
        true = np.percentile(times, rank, method="inverted_cdf")
        assert true <= told < RATIO * true, rank
    assert spread.p50 <= spread.p90 <= spread.p99 <= spread.worst


def test_a_value_on_a_bound_is_below_it_and_values_beyond_all_bounds_report_the_worst():
    histogram = histogram_of([0.0, BOUNDS[0], BOUNDS[6], BOUNDS[-1], 5000.0])
    below = dict(histogram.below(every=1))
    assert len(below) == len(BOUNDS) + 1
    assert (below[BOUNDS[0]], below[BOUNDS[5]], below[BOUNDS[6]], below[BOUNDS[-1]], below[math.inf]) == (2, 2, 3, 4, 5)
    assert histogram.total == pytest.approx(5000 + sum((BOUNDS[0], BOUNDS[6], BOUNDS[-1])))
    assert (histogram.spread().p50, histogram.spread().p99) == (BOUNDS[6], 5000.0)


def test_fewer_bounds_have_the_same_counts_below_them():
    histogram = histogram_of(np.random.default_rng(0).lognormal(-4, 3, 1000))
    fine = dict(histogram.below(every=1))
    coarse = histogram.below(every=3)
    assert len(coarse) == math.ceil(len(BOUNDS) / 3) + 1
    assert all(fine[bound] == count for bound, count in coarse)
    assert [count for _, count in coarse] == sorted(count for _, count in coarse)


def test_an_empty_histogram_has_no_spread():
    assert Histogram().spread() == Spread()
    assert Latencies().told() == Latency()


# --- a session's calls ----------------------------------------------------------------------------------------------


class Scene:
    def __init__(self):
        self.classes = {name: Latencies() for name in CLASSES}
        self.session = SessionLatency(self.classes)

    def call(self, received, started, *tokens, asked=math.inf, woken=False, priority="agent"):
        self.session.called(received, asked)
        self.session.started(started, woken, priority)
        for at in tokens:
            self.session.token(at, priority)

    def times(self, kind, latencies=None):
        """(count, sum) of the session's times. Its class has the same times."""
        spread = getattr(self.session.told(), kind)
        total = spread.count * spread.mean
        for_all = getattr(self.classes["agent"].told() if latencies is None else latencies, kind)
        assert for_all == spread
        return spread.count, pytest.approx(total)


@pytest.fixture
def scene():
    return Scene()


def test_a_call_has_one_queue_time_one_first_token_and_gaps_after_it(scene):
    scene.call(10.0, 10.5, 12.0, 12.25, 13.25)
    assert scene.times("queued") == (1, 0.5)
    assert scene.times("first_token") == (1, 2.0)
    assert scene.times("between_tokens") == (2, 1.25)
    assert scene.times("wake_up") == (0, 0.0)
    scene.call(20.0, 20.25, 21.0)
    assert scene.times("queued") == (2, 0.75)
    assert scene.times("first_token") == (2, 3.0)
    assert scene.times("between_tokens") == (2, 1.25), "the time between calls is no gap"


def test_a_session_without_tokens_has_no_times(scene):
    scene.session.called(10.0, 10.0)
    assert scene.session.told() == Latency()
    assert all(latencies.told() == Latency() for latencies in scene.classes.values())


def test_wake_up_is_from_the_first_signal_or_the_call_to_the_first_token(scene):
    scene.call(10.0, 10.5, 12.0, 13.0, asked=9.25, woken=True)
    assert scene.times("wake_up") == (1, 2.75)
    assert scene.times("first_token") == (1, 2.0)
    scene.call(20.0, 20.5, 22.0, woken=True)
    assert scene.times("wake_up") == (2, 4.75), "from the call, if no signal came before"
    scene.call(30.0, 30.5, 32.0, asked=29.0, woken=False)
    assert scene.times("wake_up") == (2, 4.75), "its KV was on the device"


def test_each_time_counts_for_the_class_of_its_moment(scene):
    scene.call(10.0, 10.5, 12.0, 12.5)
    scene.session.token(14.5, "batch")
    assert scene.classes["agent"].told().between_tokens.count == 1
    assert scene.classes["batch"].told() == Latency(between_tokens=Spread(1, 2.0, 2.0, 2.0, 2.0, 2.0))
    assert scene.classes["interactive"].told() == Latency()
    assert scene.session.told().between_tokens.count == 2


def test_delays_by_the_client_are_not_measured(scene):
    scene.call(10.0, 10.5, 12.0, 12.25)
    scene.session.interrupted()
    for at in (1000.0, 1000.5):
        scene.session.token(at, "agent")
    assert scene.times("between_tokens") == (2, 0.75)
    scene.session.called(2000.0, 2000.0)
    scene.session.interrupted()
    scene.session.started(3000.0, True, "agent")
    for at in (3001.0, 3001.5):
        scene.session.token(at, "agent")
    assert scene.times("between_tokens") == (3, 1.25)
    assert (scene.times("queued"), scene.times("first_token"), scene.times("wake_up")) == ((1, 0.5), (1, 2.0), (0, 0.0))


def test_sessions_of_a_class_add_up(scene):
    other = SessionLatency(scene.classes)
    scene.call(10.0, 10.5, 12.0)
    other.called(10.0, 10.0)
    other.started(11.0, False, "agent")
    assert scene.classes["agent"].told().queued.count == 2
    assert (scene.session.told().queued.count, other.told().queued.count) == (1, 1)


def test_an_engine_s_clock_that_is_behind_gives_no_negative_times(scene):
    scene.call(10.0, 9.99, 12.0)
    assert scene.times("queued") == (1, 0.0)
