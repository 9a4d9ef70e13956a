from __future__ import annotations

import pytest

from djinn_client.errors import QuotaExceeded
from djinnd.server.journal.space import COPIES, expect_space
from djinnd.server.quotas.ledger import JOURNAL_BYTES
from djinnd.server.quotas.quotas import QuotaTable, Tenant

RESERVE = 3000


def tenants(*used: int) -> list[Tenant]:
    quotas = QuotaTable({}, lambda user: ())
    made = [quotas.tenant(user, 0.0) for user in range(len(used))]
    for tenant, nbytes in zip(made, used, strict=True):
        tenant.ledger.add(JOURNAL_BYTES, nbytes)
    return made


def refused(those: list[Tenant], nbytes: int = 0) -> list[int]:
    found = []
    for tenant in those:
        try:
            expect_space(tenant, nbytes, those, RESERVE, 2000)
        except QuotaExceeded:
            found.append(tenant.user)
    return found


def test_the_user_with_most_data_is_refused_and_others_continue() -> None:
    assert refused(tenants(100_000, 0)) == [0]
    assert refused(tenants(100_000, 400, 0)) == [0]
    assert refused(tenants(100_000, 800, 0)) == [0, 1]
    assert refused(tenants(0), 250) == []
    assert refused(tenants(0), 251) == [0], "half of the free bytes are for copies"
    assert refused(tenants(1499), 1) == []
    assert refused(tenants(1500), 1) == [0]


def test_room_for_every_copy_is_needed() -> None:
    (one,) = tenants(100_000)
    expect_space(one, 1000, [one], RESERVE, RESERVE + COPIES * 1000)
    with pytest.raises(QuotaExceeded):
        expect_space(one, 1001, [one], RESERVE, RESERVE + COPIES * 1000)


def test_the_error_has_the_figures() -> None:
    (one,) = tenants(5000)
    with pytest.raises(QuotaExceeded, match=r"room for 2,000 bytes.*journal_reserve \(3,000\).*5,000 bytes") as caught:
        expect_space(one, 0, [one], RESERVE, 2000)
    assert caught.value.data["limit"] == RESERVE // 2 and caught.value.data["used"] == 5000
