from __future__ import annotations

import pytest

from djinnd.kvcache.page_pool import SCRATCH, OutOfPages, PagePool
from djinnd.kvcache.tenancy import ANYBODY

ALICE, BOB = 1000, 1001


def test_every_page_but_the_scratch_page_can_be_held() -> None:
    pool = PagePool(5)
    pages = pool.allocate(4, ALICE)
    assert sorted(pages) == [1, 2, 3, 4] and SCRATCH not in pages
    assert (pool.capacity, pool.free, pool.used) == (4, 0, 4)
    pool.check_integrity()


def test_neighbouring_pages_are_given_together_and_again_after_release() -> None:
    pool = PagePool(5)
    pages = pool.allocate(3, ALICE)
    assert pages == [1, 2, 3]
    pool.release(pages)
    assert pool.allocate(3, ALICE) == pages


def test_too_few_free_pages_raise_an_error_with_figures_and_change_nothing() -> None:
    pool = PagePool(4)
    pool.allocate(1, ALICE)
    with pytest.raises(OutOfPages, match="3 pages are needed, 2 are free") as caught:
        pool.allocate(3, BOB)
    assert (caught.value.needed, caught.value.free) == (3, 2)
    assert (pool.free, pool.used) == (2, 1)
    pool.check_integrity()
    pool.allocate(2, BOB)
    assert pool.take_stale() == []


def test_a_shared_page_is_free_when_its_last_holder_releases_it() -> None:
    pool = PagePool(3)
    pages = pool.allocate(2, ALICE)
    pool.share(pages[:1], ALICE)
    assert pool.references(pages[0]) == 2
    pool.release(pages)
    assert (pool.free, pool.references(pages[0])) == (1, 1)
    pool.release(pages[:1])
    assert pool.free == 2
    pool.check_integrity()


def test_a_held_page_counts_once_for_its_tenant() -> None:
    pool = PagePool(5)
    pages = pool.allocate(2, ALICE)
    pool.allocate(1, BOB)
    pool.share(pages, ALICE)
    assert (pool.used_by(ALICE), pool.used_by(BOB), pool.used_by(7)) == (2, 1, 0)
    pool.release(pages)
    assert pool.uses() == {ALICE: 2, BOB: 1}
    pool.release(pages)
    assert pool.uses() == {BOB: 1}
    pool.share(pages[:1], ALICE)
    assert pool.used_by(ALICE) == 1 and pool.tenant(pages[0]) == ALICE
    pool.resize(3)
    assert pool.uses() == {ALICE: 1, BOB: 1}
    pool.check_integrity()


def test_a_public_page_counts_for_no_tenant() -> None:
    pool = PagePool(3)
    [page] = pool.allocate(1, ALICE)
    pool.make_public(page)
    pool.share([page], BOB)
    assert pool.uses() == {ANYBODY: 1} and pool.used_by(ALICE) == pool.used_by(BOB) == 0
    pool.release([page, page])
    assert pool.uses() == {}
    with pytest.raises(AssertionError, match=r"page \d is free"):
        pool.tenant(page)
    pool.allocate(2, BOB)
    assert pool.used_by(BOB) == 2
    pool.check_integrity()


def test_the_audit_finds_a_page_that_counts_for_another_tenant() -> None:
    pool = PagePool(3)
    [page] = pool.allocate(1, ALICE)
    pool._last_tenant[page] = BOB
    with pytest.raises(AssertionError, match="tenants use"):
        pool.check_integrity()


def test_releasing_a_free_page_is_an_assertion_error() -> None:
    pool = PagePool(3)
    with pytest.raises(AssertionError, match="page 1 is released"):
        pool.release([1])
    with pytest.raises(AssertionError, match="page 0 is released"):
        pool.release([SCRATCH])


def test_a_page_of_another_tenant_is_stale_once() -> None:
    pool = PagePool(4)
    pool.release(pool.allocate(3, ALICE))
    pages = pool.allocate(2, BOB)
    assert pool.take_stale() == sorted(pages)
    assert pool.take_stale() == []


def test_a_fresh_page_and_a_page_of_the_same_tenant_are_not_stale() -> None:
    pool = PagePool(3)
    pool.release(pool.allocate(1, ALICE))
    pool.allocate(2, ALICE)
    assert pool.take_stale() == []


def test_a_page_that_was_never_zeroed_stays_stale_however_often_it_changes_hands() -> None:
    pool = PagePool(2)
    for tenant in (ALICE, BOB, ALICE):
        pool.release(pool.allocate(1, tenant))
    assert pool.take_stale() == [1]


def test_a_page_that_was_not_overwritten_is_stale_as_long_as_it_is_held() -> None:
    pool = PagePool(3)
    pool.release(pool.allocate(2, BOB))
    pages = pool.allocate(2, ALICE, overwritten=True)
    pool.mark_unfilled(pages[1])
    assert pool.take_stale() == [pages[1]]
    assert pool.take_stale() == []


def test_a_page_not_overwritten_and_given_back_is_stale_for_its_next_reader() -> None:
    pool = PagePool(2)
    pool.release(pool.allocate(1, BOB))
    for _ in range(2):
        [page] = pool.allocate(1, ALICE, overwritten=True)
        pool.mark_unfilled(page)
        pool.release([page])
        assert pool.take_stale() == []
    pool.release(pool.allocate(1, ALICE, overwritten=True))
    assert pool.take_stale() == []
    [page] = pool.allocate(1, ALICE, overwritten=True)
    pool.mark_unfilled(page)
    pool.release([page])
    pool.allocate(1, ALICE)
    assert pool.take_stale() == [page], "what Bob has left"


def test_a_pool_needs_a_page_beside_the_scratch_page() -> None:
    with pytest.raises(AssertionError, match="1 pages"):
        PagePool(1)


def test_the_audit_finds_a_page_that_is_free_and_held() -> None:
    pool = PagePool(3)
    pool.release(pool.allocate(1, ALICE))
    pool._references[1] = 1
    with pytest.raises(AssertionError, match="page 1 has 1 references, free: True"):
        pool.check_integrity()


def test_the_audit_finds_a_page_that_is_lost() -> None:
    pool = PagePool(3)
    del pool._free[2]
    with pytest.raises(AssertionError, match="page 2 has 0 references, free: False"):
        pool.check_integrity()


def test_only_its_tenant_can_share_a_free_page_until_it_is_given_away() -> None:
    pool = PagePool(3)
    pages = pool.allocate(2, ALICE)
    pool.release(pages)
    pool.share(pages[:1], ALICE)
    assert (pool.references(pages[0]), pool.free) == (1, 1)
    with pytest.raises(AssertionError, match="not tenant 1001's"):
        pool.share(pages, BOB)
    assert pool.allocate(1, BOB) == pages[1:]
    with pytest.raises(AssertionError, match="not tenant 1000's"):
        pool.share(pages[1:], ALICE)


def test_pages_with_a_known_prefix_are_given_last_the_first_freed_first() -> None:
    pool = PagePool(6)
    one, two, plain = pool.allocate(2, ALICE), pool.allocate(2, ALICE), pool.allocate(1, ALICE)
    for pages in (one, two, plain):
        pool.release(pages, of_use={*one, *two})
    given = [page for _ in range(5) for page in pool.allocate(1, ALICE)]
    assert given == [*plain, *reversed(one), *reversed(two)]


def test_pages_allocated_together_are_in_rising_order() -> None:
    pool = PagePool(6)
    pages = pool.allocate(5, ALICE)
    pool.release(pages, of_use=set(pages))
    assert pool.allocate(4, ALICE) == [2, 3, 4, 5]


def test_lent_pages_stay_free_and_are_given_away_after_others() -> None:
    pool = PagePool(7)
    lent = pool.lend(2, ALICE)
    assert lent is not None and pool.is_lent(lent) and (pool.free, pool.used) == (6, 0)
    own = pool.allocate(4, ALICE)
    assert pool.is_lent(lent) and pool.reclaimed == 0 and not {*own} & {*lent}
    pool.check_integrity()
    assert pool.allocate(1, ALICE) == [lent[0]]
    assert not pool.is_lent(lent) and pool.reclaimed == 1
    pool.give_back(lent)
    pool.check_integrity()


def test_a_page_is_lent_once_and_only_if_it_is_free() -> None:
    pool = PagePool(5)
    pool.allocate(1, ALICE)
    first, second = pool.lend(2, ALICE), pool.lend(2, ALICE)
    assert first is not None and second is None
    third = pool.lend(1, ALICE)
    assert third is not None and not {*first} & {*third}
    pool.give_back(first)
    assert pool.lend(2, ALICE) is not None


def test_a_lent_page_that_changes_hands_is_zeroed() -> None:
    pool = PagePool(3)
    assert pool.lend(2, ALICE) == [1, 2] and pool.take_stale() == []
    pool.give_back([1, 2])
    assert pool.lend(1, BOB) is not None and len(pool.take_stale()) == 1
    pages = pool.allocate(2, ALICE)
    assert len(pool.take_stale()) == 1, f"one of {pages} was Bob's"


def test_a_resized_pool_has_lent_nothing() -> None:
    pool = PagePool(5)
    lent = pool.lend(2, ALICE)
    pool.resize(4)
    assert lent is not None and not pool.is_lent(lent) and pool.reclaimed == 1
    pool.check_integrity()
