from __future__ import annotations

import pytest

from djinn_client.errors import QuotaExceeded
from djinnd.server.quotas.cpu_time import CpuTime


def test_a_user_who_has_used_its_minute_waits_and_others_do_not() -> None:
    time = CpuTime("grammar_seconds_per_minute", "outputs with a format", 10.0)
    time.charge(1, 9.0)
    time.expect(1)
    time.charge(1, 6.0)
    with pytest.raises(
        QuotaExceeded, match=r"your outputs with a format .* \(limits.grammar_seconds_per_minute\)"
    ) as told:
        time.expect(1)
    assert 20 < told.value.data["retry_s"] <= 30
    time.expect(2)
    assert time.seconds(1) == 15.0 and time.use(2).used == 0
    assert (time.use(1).name, time.use(1).limit) == ("grammar_seconds_per_minute", 10)


def test_a_new_rate_holds_at_once() -> None:
    time = CpuTime("text_seconds_per_minute", "text workers", 1.0)
    time.charge(1, 3.0)
    time.follow(1000.0)
    time.charge(2, 500.0)
    time.expect(2)
