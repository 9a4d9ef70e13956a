from __future__ import annotations

import pytest

from djinn_client.protocol import CLASSES
from djinnd.scheduler.tuning import FAIRNESS
from djinnd.scheduler.turns.shares import Shares


def test_a_clock_runs_by_device_time_over_weight() -> None:
    shares = Shares()
    shares.set_weight(2, 4.0)
    for tenant in (1, 2):
        shares.charge("agent", tenant, 8.0)
    assert (shares.clock("agent", 1), shares.clock("agent", 2), shares.clock("agent", 3)) == (8.0, 2.0, 0.0)


def test_a_new_weight_counts_from_now_on() -> None:
    shares = Shares()
    shares.charge("agent", 1, 8.0)
    shares.set_weight(1, 2.0)
    shares.charge("agent", 1, 8.0)
    assert shares.clock("agent", 1) == 12.0


def test_each_class_has_clocks_of_its_own() -> None:
    shares = Shares()
    shares.charge("agent", 1, 8.0)
    assert [shares.clock(priority, 1) for priority in CLASSES] == [0.0, 8.0, 0.0]


def test_a_tenant_that_comes_back_has_saved_up_no_more_than_the_lag() -> None:
    shares = Shares()
    for _ in range(100):
        shares.charge("agent", 1, 0.5)
    shares.catch_up("agent", [1, 2])
    assert shares.clock("agent", 2) == 49.5 - FAIRNESS.lag_s
    assert shares.clock("agent", 1) == 50.0


@pytest.mark.parametrize("weight", [0.1, 1.0, 10.0])
def test_the_lag_is_device_time_of_the_tenant_that_is_ahead(weight: float) -> None:
    """The weight of the tenant behind makes no difference: the more it weighs, the more it is owed."""
    shares = Shares()
    shares.set_weight(2, weight)
    shares.charge("agent", 1, 10.0)
    shares.charge("agent", 1, 0.0)
    shares.catch_up("agent", [1, 2])
    assert shares.clock("agent", 2) == 10.0 - FAIRNESS.lag_s
    shares.set_weight(1, 5.0)
    shares.catch_up("agent", [1, 3])
    assert shares.clock("agent", 3) == 10.0 - FAIRNESS.lag_s / 5.0


def test_a_tenant_that_waited_for_a_long_step_of_another_is_owed_all_of_it() -> None:
    shares = Shares()
    shares.charge("agent", 1, 30.0)
    shares.catch_up("agent", [1, 2])
    assert shares.clock("agent", 2) == 0.0


def test_no_clock_ever_goes_back() -> None:
    shares = Shares()
    for tenant in range(1, 5):
        shares.charge("agent", tenant, float(tenant))
        shares.charge("agent", tenant, 0.0)
    before = [shares.clock("agent", tenant) for tenant in range(1, 5)]
    shares.catch_up("agent", range(1, 5))
    after = [shares.clock("agent", tenant) for tenant in range(1, 5)]
    assert after == [max(clock, 4.0 - FAIRNESS.lag_s) for clock in before]


def test_catching_up_changes_no_clock_of_a_single_tenant_or_of_others() -> None:
    shares = Shares()
    shares.charge("agent", 1, 50.0)
    shares.catch_up("agent", [2])
    shares.catch_up("agent", [1, 3])
    shares.catch_up("agent", [])
    assert shares.clock("agent", 2) == 0.0


def test_a_weight_of_zero_is_an_assertion_error() -> None:
    with pytest.raises(AssertionError):
        Shares().set_weight(1, 0.0)
