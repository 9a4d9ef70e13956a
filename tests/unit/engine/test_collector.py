from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator

import pytest

from djinnd.engine.collector import Collector
from djinnd.engine.tuning import LONGEST, WORTH


class Ring:
    """A cycle, which only the collector frees."""

    def __init__(self) -> None:
        self.me = self


@pytest.fixture
def collector() -> Iterator[Collector]:
    before = gc.get_threshold()
    collector = Collector(now=100.0)
    yield collector
    collector.close()
    assert gc.get_threshold() == before


def old_garbage() -> weakref.ref[Ring]:
    """Garbage that has survived the young generations `WORTH` times."""
    ring = Ring()
    gone = weakref.ref(ring)
    gc.collect()
    del ring
    for _ in range(WORTH):
        gc.collect(1)
    assert gone() is not None
    return gone


def test_old_garbage_is_collected_in_a_quiet_moment(collector: Collector) -> None:
    gone = old_garbage()
    collector.turn(quiet=False, now=101.0)
    assert gone() is not None
    collector.turn(quiet=True, now=102.0)
    assert gone() is None


def test_old_garbage_is_collected_after_a_long_time(collector: Collector) -> None:
    gone = old_garbage()
    collector.turn(quiet=False, now=100.0 + LONGEST)
    assert gone() is None


def test_python_makes_no_full_collection_by_itself(collector: Collector) -> None:
    gone = old_garbage()
    kept = [[] for _ in range(200_000)]  # type: ignore[var-annotated]
    assert gone() is not None and kept


def test_few_collections_lead_to_no_full_one(collector: Collector) -> None:
    gc.collect()
    before = gc.get_stats()[2]["collections"]
    collector.turn(quiet=True, now=101.0)
    assert gc.get_stats()[2]["collections"] == before
