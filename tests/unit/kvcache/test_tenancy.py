from __future__ import annotations

import pytest

from djinnd.kvcache.tenancy import ANYBODY, Tenancy
from djinnd.kvcache.tier import Tier, limit_tenant

ALICE, BOB = 1000, 1001
PAGE = 10  # bytes


def new_tier(tenancy: Tenancy, slots: int = 4, page_bytes: int = PAGE) -> Tier:
    return Tier(bytearray(Tier.table_bytes(slots)), slots, tenancy, page_bytes)


def key(n: int) -> bytes:
    return n.to_bytes(16, "big")


def fill(tier: Tier, tenant: int, *numbers: int) -> None:
    for number in numbers:
        slot = tier.prepare(key(number), tenant)
        assert slot is not None
        tier.complete(slot, number)


def has(tier: Tier) -> list[int]:
    return sorted(int.from_bytes(tier.key(slot), "big") for slot in tier.complete_slots)


def test_a_tenant_at_its_limit_gives_up_its_oldest_page_although_slots_are_free() -> None:
    tenancy = Tenancy()
    tier = new_tier(tenancy)
    limit_tenant(tenancy, ALICE, 2 * PAGE)
    fill(tier, BOB, 1)
    fill(tier, ALICE, 2, 3)
    tier.find(key(2))
    fill(tier, ALICE, 4)
    assert has(tier) == [1, 2, 4]
    assert tenancy.uses() == {ALICE: 2 * PAGE, BOB: PAGE}
    tier.check_integrity()


def test_a_tenant_at_its_limit_gets_no_slot_while_its_own_are_filling_or_pinned() -> None:
    tenancy = Tenancy()
    tier = new_tier(tenancy)
    limit_tenant(tenancy, ALICE, 2 * PAGE)
    fill(tier, ALICE, 1)
    tier.pin(0)
    assert tier.prepare(key(2), ALICE) is not None
    assert not tier.has_room(ALICE) and tier.prepare(key(3), ALICE) is None
    assert tier.has_room(BOB) and tier.has_room()
    tier.unpin(0)
    fill(tier, ALICE, 3)
    assert has(tier) == [3] and tier.used == 2


def test_without_a_limit_the_oldest_page_of_all_is_evicted() -> None:
    tier = new_tier(Tenancy(), 2)
    fill(tier, ALICE, 1)
    fill(tier, BOB, 2)
    fill(tier, BOB, 3)
    assert has(tier) == [2, 3] and tier.tenancy.used_by(ALICE) == 0


def test_a_limit_holds_over_all_models() -> None:
    tenancy = Tenancy()
    small, large = new_tier(tenancy), new_tier(tenancy, page_bytes=2 * PAGE)
    limit_tenant(tenancy, ALICE, 4 * PAGE)
    fill(small, ALICE, 1)
    fill(large, ALICE, 2)
    fill(small, ALICE, 3)
    fill(large, ALICE, 4)  # evicting 1 frees too little, so 2 is evicted too
    assert (has(small), has(large), tenancy.used_by(ALICE)) == ([3], [4], 3 * PAGE)
    small.check_integrity()


def test_a_full_tier_evicts_its_own_oldest_page_beside_one_of_another_model() -> None:
    tenancy = Tenancy()
    full, other = new_tier(tenancy, 1), new_tier(tenancy)
    limit_tenant(tenancy, ALICE, PAGE)
    fill(full, BOB, 1)
    fill(other, ALICE, 2)
    fill(full, ALICE, 3)
    assert (has(full), has(other), tenancy.uses()) == ([3], [], {ALICE: PAGE})


def test_spare_pages_of_any_model_are_evicted_first_within_a_tenant() -> None:
    tenancy = Tenancy()
    small, large = new_tier(tenancy), new_tier(tenancy, page_bytes=2 * PAGE)
    fill(small, ALICE, 1, 2)
    fill(large, ALICE, 3)
    large.spare([0])
    limit_tenant(tenancy, ALICE, 4 * PAGE)
    assert small.evictions_for(ALICE, 2) == [(large, 0)]
    fill(small, ALICE, 4, 5)
    assert (has(small), has(large)) == ([1, 2, 4, 5], [])
    small.check_integrity()


def test_the_oldest_pages_make_room_beside_those_that_a_limit_takes() -> None:
    tenancy = Tenancy()
    tier = new_tier(tenancy, 3)
    fill(tier, ALICE, 1)
    fill(tier, BOB, 2, 3)
    limit_tenant(tenancy, ALICE, 2 * PAGE)
    assert tier.evictions_for(ALICE, 2) == [(tier, 0), (tier, 1)]  # one of its own, although it may have one more
    assert tier.evictions_for(ALICE, 3) is None
    fill(tier, ALICE, 4, 5)
    assert has(tier) == [3, 4, 5]


def test_a_lower_limit_evicts_the_oldest_pages_at_once_and_pinned_ones_later() -> None:
    tenancy = Tenancy()
    tier = new_tier(tenancy)
    fill(tier, ALICE, 1, 2, 3)
    tier.pin(0)
    limit_tenant(tenancy, ALICE, 0)
    assert has(tier) == [1] and not tier.may_have(ALICE) and tier.may_have(ANYBODY)
    tier.unpin(0)
    assert tier.prepare(key(4), ALICE) is None
    limit_tenant(tenancy, ALICE, PAGE)
    fill(tier, ALICE, 4)
    assert has(tier) == [4]
    limit_tenant(tenancy, ALICE, None)
    fill(tier, ALICE, 5, 6, 7)
    assert has(tier) == [4, 5, 6, 7]


def test_public_pages_belong_to_no_tenant() -> None:
    tenancy = Tenancy()
    tier = new_tier(tenancy)
    limit_tenant(tenancy, ALICE, 0)
    fill(tier, ANYBODY, 1)
    assert tenancy.uses() == {ANYBODY: PAGE}
    with pytest.raises(AssertionError, match="have no limit"):
        limit_tenant(tenancy, ANYBODY, 0)


def test_pages_of_an_earlier_process_keep_their_tenant_and_count_against_limits() -> None:
    table, tenancy = bytearray(Tier.table_bytes(4)), Tenancy()
    before = Tier(table, 4)
    fill(before, ALICE, 1, 2)
    fill(before, BOB, 3)
    fill(before, ANYBODY, 4)
    before.find(key(1))
    limit_tenant(tenancy, ALICE, PAGE)
    after = Tier(table, 4, tenancy, PAGE)
    assert has(after) == [1, 3, 4]
    assert tenancy.uses() == {ALICE: PAGE, BOB: PAGE, ANYBODY: PAGE}
    after.close()
    assert tenancy.uses() == {} and Tier(table, 4).used == 3
    tenancy.check_integrity()


def test_the_audit_finds_a_page_that_is_not_counted() -> None:
    tenancy = Tenancy()
    tier = new_tier(tenancy)
    fill(tier, ALICE, 1)
    tenancy.taken(ALICE, PAGE)
    with pytest.raises(AssertionError, match="20"):
        tier.check_integrity()
    tenancy.freed(ALICE, PAGE)
    tier._tenant[0] = BOB
    with pytest.raises(AssertionError, match="another tenant"):
        tier.check_integrity()
