from __future__ import annotations

import os

from djinn_client import ModelInfo
from tools.bench.harness.paged_model import SPARE, PagedModel
from tools.bench.harness.usage import resident_bytes
from tools.bench.paging.crowd import Answers, Work
from tools.bench.paging.oversubscribe import compared, demanded, peaks

INFO = ModelInfo(
    name="m", path="", fingerprint="a2c8", page_size=16, page_bytes=1000, weight_bytes=7, max_context=4096, vocab=100
)


def test_demand_counts_whole_pages() -> None:
    work = Work(sessions=50, context=2048, new=50, turns=2)
    assert work.session_tokens == 2149
    demand = demanded(INFO, work)
    assert demand == (135_000, 50 * 135_000, 7)


def test_different_tokens_are_counted_apart_for_sessions_that_kept_their_kv() -> None:
    short = Answers([[1, 2], [3], [4], None], seconds=11.0, computed_anew={1}, failures=["session 3"])
    roomy = Answers([[1, 2], [9], [5], [6]], seconds=10.0)
    found = compared(short, roomy)
    assert (found["served"], found["sessions"], found["same_tokens"]) == (3, 4, 1)
    assert found["unlike_though_kept"] == 1  # the third
    assert found["ratio"] == 1.1 and found["computed_anew"] == 1 and found["failures"] == ["session 3"]


def test_each_curve_has_its_own_peak() -> None:
    points = [{"seconds": 0.0, "host": 5.0}, {"seconds": 1.0, "host": 3.0}]
    assert peaks(points) == {"seconds": 1.0, "host": 5.0}


def test_a_process_has_resident_bytes_and_a_process_that_is_gone_has_none() -> None:
    assert resident_bytes(os.getpid()) > 1 << 20
    assert resident_bytes(1 << 30) == 0


def test_a_pool_has_its_sessions_most_pages_and_a_scratch_page() -> None:
    model = PagedModel("nowhere", INFO, 8192)
    assert model.tokens == 4096 - SPARE  # as many as the model takes
    assert model.session_pages == 256
    assert model.pool_bytes(model.tokens, 1) == (256 + 5 + 1) * 1000
    assert model.prompt(8) != model.prompt(8)
