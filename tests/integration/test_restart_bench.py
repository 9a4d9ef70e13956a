from __future__ import annotations

import pytest

from tests.support.models import tiny_model
from tools.bench.paging.restart_sessions import Work, measure, summary


@pytest.mark.long
def test_the_bench_finds_its_sessions_with_their_kv_after_a_restart() -> None:
    sizes = {"kv": "4MiB", "host_kv": "32MiB"}
    found = measure(tiny_model(), "cpu", "512MiB", sizes, Work(sessions=4, context=300, new=3))
    assert found["same_tokens"] == found["kept"] == found["sessions"] == 4
    assert found["pages"] < 8, "some of the eight pages must come from the host"
    seconds, uptime = found["seconds"], found["uptime_s"]
    assert list(seconds) == ["all attached", "the first went on", "all went on"]
    assert all(0 < uptime[what] < seconds[what] for what in seconds)
    assert "4 with all their KV, 4 with the tokens as if never stopped" in summary(found)
