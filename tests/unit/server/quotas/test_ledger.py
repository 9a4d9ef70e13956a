from __future__ import annotations

import pytest

from djinn_client.errors import QuotaExceeded
from djinnd.config import Limits, Quota
from djinnd.server.quotas.ledger import JOURNAL_BYTES, REQUESTS, RESOURCES, Ledger, Limit
from djinnd.server.quotas.quotas import QuotaTable


def ledger(most=10):
    return Ledger(lambda resource: Limit(f"limits.{resource.name}_per_user", "", most))


def test_a_charge_counts_until_it_is_released():
    mine = ledger()
    mine.charge(REQUESTS, 7)
    mine.charge(REQUESTS, 3)
    assert mine.used(REQUESTS) == 10 and not mine.has_room(REQUESTS)
    mine.release(REQUESTS, 4)
    assert mine.used(REQUESTS) == 6 and mine.has_room(REQUESTS, 4)
    assert mine.used(JOURNAL_BYTES) == 0


def test_a_charge_beyond_the_limit_changes_nothing_and_names_the_figures():
    mine = ledger()
    mine.charge(REQUESTS, 8)
    told = r"8 unfinished requests.* 3 more.*limits\.requests_per_user is 10"
    with pytest.raises(QuotaExceeded, match=told) as caught:
        mine.charge(REQUESTS, 3)
    assert caught.value.data == {"quota": "requests", "rule": "", "limit": 10, "used": 8}
    assert mine.used(REQUESTS) == 8


def test_an_existing_resource_is_added_beyond_the_limit():
    mine = ledger()
    assert mine.add(REQUESTS, 10)
    assert not mine.add(REQUESTS, 1)
    assert mine.used(REQUESTS) == 11


def test_releasing_more_than_was_charged_is_a_fault():
    mine = ledger()
    with pytest.raises(AssertionError):
        mine.release(REQUESTS)


def test_the_limit_is_the_rule_s_or_else_that_of_limits_and_follows_a_reload():
    quotas = QuotaTable({"few": Quota(users=(1,), requests=2)}, lambda user: (), Limits(requests_per_user=5))
    few, other = quotas.tenant(1, 0.0).ledger, quotas.tenant(2, 0.0).ledger
    with pytest.raises(QuotaExceeded, match=r"quotas\.few\.requests is 2"):
        few.charge(REQUESTS, 3)
    with pytest.raises(QuotaExceeded, match=r"limits\.requests_per_user is 5"):
        other.charge(REQUESTS, 6)
    quotas.limits = Limits(requests_per_user=6)
    other.charge(REQUESTS, 6)


def test_every_resource_has_a_default_and_is_reported():
    told = {use.name: use for use in QuotaTable({}, lambda user: ()).tenant(1, 0.0).ledger.uses()}
    assert list(told) == [resource.name for resource in RESOURCES]
    assert all(use.limit > 0 and use.used == 0 for use in told.values())
