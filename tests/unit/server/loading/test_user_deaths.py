from __future__ import annotations

import pytest

from djinn_client.errors import QuotaExceeded
from djinnd.config import Limits
from djinnd.server.loading.user_deaths import UserDeaths

USER, OTHER = 1000, 1001


def after(*deaths: float, limits: Limits | None = None) -> UserDeaths:
    counted = UserDeaths(limits or Limits())
    for at in deaths:
        counted.count(USER, at)
    return counted


def refused_s(counted: UserDeaths, user: int, at: float) -> float:
    try:
        counted.expect_load(user, at)
    except QuotaExceeded as refused:
        return refused.data["retry_s"]
    return 0.0


@pytest.mark.parametrize(
    ("deaths", "at", "seconds"),
    [
        ((), 0.0, 0.0),
        ((0.0, 1.0), 2.0, 0.0),
        ((0.0, 1.0, 2.0), 2.0, 600.0),
        ((0.0, 1.0, 2.0), 302.0, 300.0),
        ((0.0, 1.0, 2.0), 602.0, 0.0),
        ((0.0, 300.0, 600.0), 600.0, 600.0),
        ((0.0, 300.0, 601.0), 601.0, 0.0),  # never three within ten minutes
        ((0.0, 300.0, 601.0, 900.0), 900.0, 600.0),
        ((0.0, 1.0, 2.0, 400.0), 700.0, 300.0),  # the last one by a request of a model that was loaded already
    ],
)
def test_three_deaths_within_ten_minutes_refuse_loads_for_ten_minutes(deaths, at, seconds):
    counted = after(*deaths)
    assert refused_s(counted, USER, at) == seconds
    assert refused_s(counted, OTHER, at) == 0.0


def test_the_refusal_gives_reason_and_time():
    counted = after(0.0, 1.0, 2.0)
    with pytest.raises(QuotaExceeded, match=r"3 engines have died .* loaded again in 600 s") as caught:
        counted.expect_load(USER, 2.0)
    assert caught.value.data == {
        "quota": "engine_deaths_per_user",
        "rule": "",
        "limit": 3,
        "used": 3,
        "retry_s": 600.0,
    }
    counted.expect_load(OTHER, 2.0)
    counted.expect_load(USER, 602.0)


def test_new_limits_apply_from_then_on():
    counted = after(0.0, 1.0)
    counted.limits = Limits(engine_deaths_per_user=2)
    assert refused_s(counted, USER, 1.0) == 600.0
    counted.limits = Limits(engine_deaths_per_user=2, engine_deaths_window=0)
    assert refused_s(counted, USER, 1.0) == 0.0
