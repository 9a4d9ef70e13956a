from __future__ import annotations

import numpy as np
import pytest

from djinnd.kvcache.manager import KvManager, page_size_for
from djinnd.kvcache.page_pool import SCRATCH, OutOfPages
from djinnd.kvcache.tuning import FIRST_ROWS

ALICE, BOB = 1000, 1001


def manager(pages: int = 8, page_size: int = 4, max_context: int = 64, *, keeps_states: bool = False) -> KvManager:
    """A manager with `pages` pages to give."""
    bytes_ = page_size * 100
    return KvManager(pages + 1, page_size, page_bytes=bytes_, max_context=max_context, keeps_states=keeps_states)


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
def test_a_partly_filled_page_counts_as_a_page(tokens: int, pages: int) -> None:
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


def test_more_tokens_than_the_context_are_an_assertion_error() -> None:
    with pytest.raises(AssertionError, match="65 tokens for a context of 64"):
        manager(pages=100).reserve("a", ALICE, 65)


def test_trim_takes_the_pages_behind_the_remaining_tokens() -> None:
    kv = manager()
    kv.reserve("a", ALICE, 16)
    pages = kv.pages_of("a")
    kv.trim("a", 5)
    assert kv.pages_of("a") == pages[:2] and kv.pool.used == 2
    kv.trim("a", 16)
    assert kv.pages_of("a") == pages[:2]
    kv.check_integrity()


def test_drop_takes_all_pages_and_may_be_repeated() -> None:
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
    kv.drop("long")  # leaves a row behind that must be reused clean
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
    assert kv.pool.take_stale() == kv.pages_of("b")


def test_the_audit_finds_a_page_in_two_tables() -> None:
    kv = manager()
    kv.reserve("a", ALICE, 4)
    kv.reserve("b", BOB, 4)
    kv._table[kv._row["b"], 0] = kv.pages_of("a")[0]
    with pytest.raises(AssertionError, match="is held 2 times and has 1 references"):
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
    with pytest.raises(AssertionError, match="is held 0 times and has 1 references"):
        kv.check_integrity()


# --- forks ----------------------------------------------------------------------------------------------------------


def test_a_fork_shares_the_full_pages_and_gets_a_copy_of_the_other() -> None:
    kv = manager()
    kv.reserve("a", ALICE, 10)
    pages = kv.pages_of("a")
    computed, copy = kv.fork("a", "b", ALICE, 10)
    assert kv.pages_of("b")[:2] == pages[:2]
    assert computed == 10 and copy == (pages[2], kv.pages_of("b")[2]) and copy.target not in pages
    assert kv.pool.used == 4
    kv.check_integrity()


def test_a_fork_at_the_end_of_a_page_copies_nothing() -> None:
    kv = manager(pages=2)
    kv.reserve("a", ALICE, 8)
    assert kv.fork("a", "b", ALICE, 8) == (8, None)
    assert kv.pages_of("b") == kv.pages_of("a")


def test_a_fork_that_runs_the_last_token_again_knows_all_its_full_pages() -> None:
    kv = manager()
    kv.reserve("a", ALICE, 8)
    kv.publish("a", ALICE, range(8), 8)
    computed, copy = kv.fork("a", "b", ALICE, 8, runs_last_again=True)
    assert computed == 8 and copy is not None
    assert kv.last_key("b", 2) == kv.last_key("a", 2)
    kv.trim("b", 7)
    kv.publish("b", ALICE, [*range(7), 99], 8)
    assert kv.last_key("b", 2) != kv.last_key("a", 2)
    kv.check_integrity()


def test_trim_gives_up_a_public_page_that_it_would_keep_in_part() -> None:
    kv = manager()
    kv.public.mark(range(4), kv.page_size)
    kv.reserve("a", ALICE, 8)
    kv.publish("a", ALICE, range(8), 8)
    assert kv.pool.used_by(ALICE) == 1
    assert kv.trim("a", 6) == 6, "its own it keeps"
    assert kv.trim("a", 3) == 0
    kv.reserve("a", ALICE, 4)
    assert kv.pool.used_by(ALICE) == 1
    kv.check_integrity()


@pytest.mark.parametrize(("tokens", "computed"), [(6, 4), (3, 0)])
def test_a_fork_without_a_free_page_gets_only_full_pages(tokens: int, computed: int) -> None:
    kv = manager(pages=-(-tokens // 4))
    kv.reserve("a", ALICE, tokens)
    assert kv.fork("a", "b", ALICE, tokens) == (computed, None)
    assert kv.pages_held("b") == computed // 4
    kv.check_integrity()


def test_a_fork_of_nothing_holds_nothing() -> None:
    kv = manager()
    assert kv.fork("a", "b", ALICE, 0) == (0, None) and not kv.sessions


def test_a_copy_is_not_zeroed_afterwards() -> None:
    """The page was another tenant's, and was given away again before it was zeroed."""
    kv = manager(pages=2)
    kv.reserve("bob", BOB, 8)
    kv.drop("bob")
    kv.reserve("a", ALICE, 8)
    kv.trim("a", 3)
    (kept,) = kv.pages_of("a")
    _, copy = kv.fork("a", "b", ALICE, 3)
    assert copy is not None and kv.pool.take_stale() == [kept]


def test_a_session_gives_up_a_shared_page_that_it_would_write_into() -> None:
    kv = manager()
    kv.reserve("a", ALICE, 12)
    kv.fork("a", "b", ALICE, 12)
    assert (kv.trim("b", 11), kv.pages_held("b")) == (8, 2)
    assert (kv.trim("b", 8), kv.pages_held("b")) == (8, 2), "it writes into the next page only"
    kv.drop("a")
    assert (kv.trim("b", 6), kv.pages_held("b")) == (6, 2), "no other session holds it now"
    kv.check_integrity()


def test_a_thousand_forks_cost_a_partial_page_each_and_no_full_one() -> None:
    kv = manager(pages=1003, page_size=16)
    kv.reserve("a", ALICE, 40)
    for number in range(1000):
        computed, copy = kv.fork("a", f"b{number}", ALICE, 40)
        assert computed == 40 and copy is not None
    assert kv.pool.used == 3 + 1000
    kv.check_integrity()
    kv.drop("a")
    for number in range(1000):
        kv.drop(f"b{number}")
    assert kv.pool.used == 0


def test_forks_still_share_their_pages_after_a_resize() -> None:
    kv = manager(pages=20)
    kv.reserve("first", ALICE, 40)
    kv.reserve("a", ALICE, 10)
    kv.fork("a", "b", ALICE, 10)
    kv.drop("first")
    kv.resize(5)
    assert kv.pages_of("a")[:2] == kv.pages_of("b")[:2] and kv.pool.used == 4
    kv.check_integrity()


# --- prefixes -------------------------------------------------------------------------------------------------------

STORY = list(range(40))


def computed(kv: KvManager, session: str, tokens: list[int], tenant: int = ALICE) -> list[int]:
    """The pages of a session that has computed all of these tokens."""
    kv.reserve(session, tenant, len(tokens))
    kv.publish(session, tenant, tokens, len(tokens))
    kv.check_integrity()
    return kv.pages_of(session)


def test_full_pages_of_the_same_tokens_are_shared_as_far_as_they_are_the_same() -> None:
    kv = manager(pages=20)
    pages = computed(kv, "a", STORY[:14])
    assert kv.adopt("b", ALICE, [*STORY[:9], 77, 78, 79, 80], computed=0, most=12) == 8
    assert kv.pages_of("b") == pages[:2]
    assert kv.adopt("c", ALICE, STORY, computed=0, most=39) == 12, "the page that is not full is not shared"
    assert kv.adopt("d", ALICE, STORY, computed=0, most=11) == 8
    assert kv.adopt("e", ALICE, STORY[1:], computed=0, most=38) == 0
    assert kv.pool.used == 4
    kv.check_integrity()


def test_another_tenant_finds_nothing() -> None:
    kv = manager()
    computed(kv, "a", STORY[:12])
    assert kv.adopt("b", BOB, STORY, computed=0, most=39) == 0
    assert kv.pages_held("b") == 0


def test_pages_of_a_dropped_session_are_found_until_they_are_given_away() -> None:
    kv = manager(pages=4)
    pages = computed(kv, "a", STORY[:12])
    kv.drop("a")
    assert kv.pool.used == 0
    kv.reserve("other", BOB, 8)
    assert kv.adopt("b", ALICE, STORY, computed=0, most=39) == 8, "the end of the prefix is given first"
    assert kv.pages_of("b") == pages[:2]
    kv.drop("b")
    kv.reserve("other", BOB, 16)
    kv.drop("other")
    assert kv.adopt("b", ALICE, STORY, computed=0, most=39) == 0
    kv.check_integrity()


def test_a_session_in_the_middle_of_a_page_adopts_one_that_is_full() -> None:
    kv = manager(pages=20)
    pages = computed(kv, "a", STORY[:16])
    computed(kv, "b", STORY[:6])
    assert kv.adopt("b", ALICE, STORY, computed=6, most=39) == 16
    assert kv.pages_of("b")[1:] == pages[1:]
    kv.check_integrity()


def test_a_page_that_is_written_into_is_no_longer_found() -> None:
    kv = manager(pages=20)
    computed(kv, "a", STORY[:8])
    assert kv.trim("a", 7) == 7
    assert kv.adopt("b", ALICE, STORY, computed=0, most=39) == 4
    computed(kv, "a", [*STORY[:7], 99, 8, 9, 10, 11])
    assert kv.adopt("c", ALICE, STORY, computed=0, most=39) == 4
    assert kv.adopt("d", ALICE, [*STORY[:7], 99, 5], computed=0, most=8) == 8
    kv.check_integrity()


def test_a_fork_publishes_its_pages_behind_the_shared_ones() -> None:
    kv = manager(pages=20)
    computed(kv, "a", STORY[:10])
    kv.fork("a", "b", ALICE, 10)
    kv.drop("a")
    pages = computed(kv, "b", STORY[:12])
    assert kv.adopt("c", ALICE, STORY, computed=0, most=39) == 12
    assert kv.pages_of("c") == pages


def test_held_pages_are_found_after_a_resize_and_free_ones_are_not() -> None:
    kv = manager(pages=20)
    computed(kv, "gone", STORY[20:32])
    computed(kv, "a", STORY[:12])
    kv.drop("gone")
    kv.resize(5)
    assert kv.adopt("b", ALICE, STORY[20:], computed=0, most=19) == 0
    assert kv.adopt("b", ALICE, STORY, computed=0, most=39) == 12
    assert kv.pages_of("b") == kv.pages_of("a")
    kv.check_integrity()


def test_a_page_given_to_a_fork_is_no_longer_found_by_its_old_key() -> None:
    kv = manager(pages=3)
    computed(kv, "a", STORY[20:24])
    computed(kv, "b", STORY[:7])
    kv.drop("a")
    _, copy = kv.fork("b", "c", ALICE, 7)
    assert copy is not None
    assert kv.adopt("d", ALICE, STORY[20:], computed=0, most=19) == 0


@pytest.mark.parametrize(("keeps_states", "kept"), [(False, 6), (True, 4)])
def test_a_state_is_not_written_while_its_page_is_copied(keeps_states: bool, kept: int) -> None:
    """Behind the tokens that are copied, KV may be written into the page. Its state would change under the copy."""
    kv = manager(keeps_states=keeps_states)
    kv.reserve("a", ALICE, 6)
    kv.set_state("a", 6)
    last = kv.pages_of("a")[-1]
    kv.protect([last], 2)
    assert kv.is_end_read("a", 6) and kv.has_state("a", 6)
    assert kv.trim("a", 6) == kept
    kv.unprotect(last)
    kv.check_integrity()
