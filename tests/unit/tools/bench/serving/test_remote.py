from __future__ import annotations

import pytest

from tools.bench.serving import remote, remote_links
from tools.bench.serving.http import Run

FIGURES = {
    "call_s": 0.02,
    "first_token_s": 0.04,
    "tokens_per_s": 70.0,
    "breakpoint_s": 0.05,
    "logits_s": 0.2,
    "logits_bytes": 4_000_000,
    "wire_bytes": 4_100_000,
    "capture_s": 4.5,
    "capture_bytes": 268_000_000,
    "share_s": 10.0,
    "share_bytes": 1_000_000_000,
}


def test_the_share_of_a_round_is_of_its_own_two_runs() -> None:
    local, far = [Run(0.1, 100.0), Run(0.1, 200.0)], [Run(0.1, 95.0), Run(0.1, 180.0)]
    assert remote.shares(local, far) == pytest.approx([0.9, 0.95])


def test_a_link_that_was_not_measured_says_why() -> None:
    found = {"ways": {"1gbit,20ms": FIGURES, "1gbit,20ms,1%": {"not_measured": "no netem"}}}
    told = remote_links.summary(found)
    assert "1gbit,20ms: a stop 50 ms, 70 tokens/s, a capture of 268 MB 4.50 s" in told
    assert told.endswith("1gbit,20ms,1%: not measured: no netem")
