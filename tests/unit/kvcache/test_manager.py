from __future__ import annotations

import numpy as np
import pytest

from djinnd.kvcache.manager import FIRST_ROWS, KvManager, page_size_for
from djinnd.kvcache.page_pool import SCRATCH, OutOfPages

ALICE, BOB = 1000, 1001


def manager(pages: int = 8, page_size: int = 4, max_context: int = 64) -> KvManager:
    """With `pages` pages to give."""
    return KvManager(pages + 1, page_size, page_bytes=page_size * 100, max_context=max_context)


@pytest.mark.parametrize(
    ("token_bytes", "page_size"),
    [
        (1, 256),
        (16 << 10, 256),
        (32 << 10, 128),
        (64 << 10, 64),
        (128 << 10, 32),  # llama-3-8b in bf16
        (256 << 10, 16),
        (800 << 10, 16),  # llama-2-13b in bf16: the page is 12.5 MiB
        (1 << 30, 16),
        (50_000, 64),  # 3.1 MiB rather than 6.1
        (40_000, 128),  # 4.9 MiB rather than 2.4
    ],
)
def test_page_size_brings_a_page_near_4_mib(token_bytes: int, page_size: int) -> None:
    assert page_size_for(token_bytes) == page_size


@pytest.mark.parametrize(("tokens", "pages"), [(0, 0), (1, 1), (4, 1), (5, 2), (64, 16)])
def test_pages_for(tokens: int, pages: int) -> None:
    assert manager().pages_for(tokens) == pages


def test_reserve_gives_the_pages_that_are_missing_and_keeps_the_rest() -> None:
    kv = manager()
    kv.reserve("a", ALICE, 5)
    first = kv.pages_of("a")
    kv.reserve("a", ALICE, 8)
    assert kv.pages_of("a") == first
    kv.reserve("a", ALICE, 9)
    assert kv.pages_of("a")[:2] == first and kv.pages_held("a") == 3
    kv.reserve("a", ALICE, 1)
    assert kv.pages_held("a") == 3
    kv.check_integrity()


def test_no_tokens_need_no_page_and_no_row() -> None:
    kv = manager()
    kv.reserve("a", ALICE, 0)
    assert kv.pages_held("a") == 0 and kv.pages_of("a") == [] and not kv.sessions


@pytest.mark.parametrize("known", [False, True])
def test_a_reservation_that_does_not_fit_changes_nothing(known: bool) -> None:
    kv = manager(pages=4)
    kv.reserve("b", BOB, 8)
    if known:
        kv.reserve("a", ALICE, 1)
    before = kv.pages_of("a")
    with pytest.raises(OutOfPages) as caught:
        kv.reserve("a", ALICE, 12)
    assert (caught.value.needed, caught.value.free) == (3 - len(before), 2 - len(before))
    assert kv.pages_of("a") == before and ("a" in kv.sessions) is known
    kv.check_integrity()


def test_a_session_larger_than_the_whole_pool_is_out_of_pages_and_not_out_of_the_table() -> None:
    kv = manager(pages=2, max_context=64)
    with pytest.raises(OutOfPages):
        kv.reserve("a", ALICE, 64)
    assert kv.capacity_tokens == 8


def test_more_tokens_than_the_context_are_our_fault() -> None:
    with pytest.raises(AssertionError, match="65 tokens for a context of 64"):
        manager(pages=100).reserve("a", ALICE, 65)


def test_trim_takes_the_pages_past_the_tokens_that_stay() -> None:
    kv = manager()
    kv.reserve("a", ALICE, 16)
    pages = kv.pages_of("a")
    kv.trim("a", 5)
    assert kv.pages_of("a") == pages[:2] and kv.pool.used == 2
    kv.trim("a", 16)
    assert kv.pages_of("a") == pages[:2]
    kv.check_integrity()


def test_drop_takes_everything_and_may_be_repeated() -> None:
    kv = manager()
    kv.reserve("a", ALICE, 16)
    kv.drop("a")
    kv.drop("a")
    kv.drop("never seen")
    assert kv.pool.used == 0 and not kv.sessions
    kv.check_integrity()


def test_a_page_table_is_padded_with_the_scratch_page_to_its_longest_row() -> None:
    kv = manager()
    kv.reserve("long", ALICE, 32 - 8)
    kv.drop("long")  # leaves a row behind that must come back clean
    kv.reserve("a", ALICE, 9)
    kv.reserve("b", BOB, 4)
    table = kv.page_table(["b", "a", "b"])
    assert table.dtype == np.int32 and table.flags.c_contiguous
    b, a = [*kv.pages_of("b"), SCRATCH, SCRATCH], kv.pages_of("a")
    assert table.tolist() == [b, a, b]


def test_a_page_table_is_a_copy() -> None:
    kv = manager()
    kv.reserve("a", ALICE, 4)
    table = kv.page_table(["a"])
    table[:] = 99
    assert kv.pages_of("a") != [99]


def test_the_page_table_of_nobody_is_empty() -> None:
    assert manager().page_table([]).shape == (0, 0)


def test_slots_follow_the_pages() -> None:
    kv = manager()
    kv.reserve("b", BOB, 4)
    kv.reserve("a", ALICE, 4)
    kv.reserve("b", BOB, 8)
    kv.reserve("a", ALICE, 8)
    first, second = kv.pages_of("a")
    assert second != first + 1
    slots = kv.slots("a", 2, 4)
    assert slots.dtype == np.int64
    assert slots.tolist() == [first * 4 + 2, first * 4 + 3, second * 4, second * 4 + 1]
    assert kv.slots("a", 8, 0).tolist() == []


def test_slots_are_64_bit_throughout() -> None:
    kv = manager()
    kv.reserve("a", ALICE, 4)
    kv._table[0, 0] = 2**31 - 1  # a page of a pool that no test can hold
    assert kv.slots("a", 3, 1).tolist() == [(2**31 - 1) * 4 + 3]


def test_a_token_without_a_page_has_no_slot() -> None:
    kv = manager()
    kv.reserve("a", ALICE, 4)
    with pytest.raises(AssertionError, match="token 4 has no page"):
        kv.slots("a", 3, 2)


def test_rows_grow_with_the_sessions_and_keep_their_pages() -> None:
    kv = manager(pages=3 * FIRST_ROWS)
    names = [f"s{i}" for i in range(3 * FIRST_ROWS)]
    for name in names:
        kv.reserve(name, ALICE, 1)
    assert sorted(kv.page_table(names)[:, 0].tolist()) == list(range(1, 3 * FIRST_ROWS + 1))
    kv.check_integrity()


def test_a_page_of_another_tenant_is_stale() -> None:
    kv = manager(pages=2)
    kv.reserve("a", ALICE, 8)
    kv.drop("a")
    kv.reserve("b", BOB, 4)
    assert kv.take_stale() == kv.pages_of("b")


def test_the_audit_finds_a_page_in_two_tables() -> None:
    kv = manager()
    kv.reserve("a", ALICE, 4)
    kv.reserve("b", BOB, 4)
    kv._table[kv._row["b"], 0] = kv.pages_of("a")[0]
    with pytest.raises(AssertionError, match="is in 2 tables and has 1 references"):
        kv.check_integrity()


def test_the_audit_finds_a_page_past_those_that_are_counted() -> None:
    kv = manager()
    kv.reserve("a", ALICE, 4)
    kv._table[kv._row["a"], 1] = 7
    with pytest.raises(AssertionError, match="past those that it counts"):
        kv.check_integrity()


def test_the_audit_finds_pages_that_no_session_holds() -> None:
    kv = manager()
    kv.pool.allocate(1, ALICE)
    with pytest.raises(AssertionError, match="is in 0 tables and has 1 references"):
        kv.check_integrity()
