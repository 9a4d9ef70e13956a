from __future__ import annotations

import numpy as np
import pytest

from djinnd.kvcache.tier import COMPLETE, FILLING, FREE, RECORD, Tier, whole_pages


def key(n: int) -> bytes:
    return n.to_bytes(16, "big")


def new_table(slots: int) -> bytearray:
    return bytearray(Tier.table_bytes(slots))


def new_tier(slots: int) -> Tier:
    return Tier(new_table(slots), slots)


def fill(tier: Tier, *numbers: int) -> list[int]:
    """Fills slots with pages whose checksums are their numbers."""
    slots = []
    for number in numbers:
        slot = tier.prepare(key(number))
        assert slot is not None
        tier.complete(slot, number)
        slots.append(slot)
    return slots


def test_a_record_has_64_bytes_and_a_table_whole_pages() -> None:
    assert RECORD.itemsize == 64
    assert [Tier.table_bytes(slots) for slots in (1, 64, 65)] == [4096, 4096, 8192]


def test_the_layout_that_the_next_process_relies_on() -> None:
    table = new_table(2)
    tier = Tier(table, 2)
    fill(tier, 7)
    tier.prepare(key(8), tenant=1000)
    expected = [
        COMPLETE.to_bytes(8, "little"), key(7), (7).to_bytes(8, "little"), (1).to_bytes(8, "little"), bytes(24),
        FILLING.to_bytes(8, "little"), key(8), bytes(16), (1001).to_bytes(8, "little"), bytes(16),
    ]  # fmt: skip
    assert table[:128] == b"".join(expected)
    assert not any(table[128:])


def test_a_page_is_found_when_it_is_complete() -> None:
    tier = new_tier(2)
    slot = tier.prepare(key(1))
    assert slot is not None
    assert key(1) in tier and tier.find(key(1)) is None and tier.key(slot) == key(1)
    tier.complete(slot, 2**64 - 1)
    assert tier.find(key(1)) == slot
    assert (tier.checksum(slot), tier.key(slot)) == (2**64 - 1, key(1))
    assert (tier.capacity, tier.used) == (2, 1)
    assert key(2) not in tier and tier.find(key(2)) is None
    tier.check_integrity()


def test_slots_are_given_in_rising_order() -> None:
    tier = new_tier(4)
    assert fill(tier, 1, 2, 3) == [0, 1, 2]


def test_slots_rise_as_the_places_of_their_pages_do() -> None:
    tier = new_tier(5)
    pages = [(key(n), 1000) for n in range(3)]
    assert tier.prepare_all(pages, [9, 3, 7]) == [2, 0, 1]
    assert [tier.key(slot) for slot in (0, 1, 2)] == [key(1), key(2), key(0)]
    assert tier.prepare_all([(key(n), 1000) for n in range(3, 9)], [5, 4, 3, 2, 1, 0]) == [4, 3], "as many as there are"
    assert key(5) not in tier and tier.used == 5
    tier.check_integrity()


def test_a_caller_that_cannot_wait_gets_only_ready_slots() -> None:
    tier = Tier(new_table(4), 4, are_ready=False)
    assert not tier.has_room() and tier.used == 0
    assert tier.prepare(key(9), can_wait=True) == 0
    tier.make_ready(range(1, 3))
    assert fill(tier, 1, 2) == [1, 2], "in the order in which they lie"
    assert fill(tier, 3) == [1], "the oldest that is ready gives way, though a slot is free"
    tier.abandon(0)
    assert tier.used == 2
    tier.make_ready(range(4))
    assert sorted(fill(tier, 4, 5)) == [0, 3]
    tier.check_integrity()


def test_a_page_in_a_slot_that_is_not_ready_is_found_and_evicted_only_for_callers_that_wait() -> None:
    table = new_table(2)
    fill(Tier(table, 2), 1, 2)
    tier = Tier(table, 2, are_ready=False)
    assert tier.find(key(1)) == 0 and tier.prepare(key(3)) is None
    tier.make_ready(range(1, 2))
    assert fill(tier, 3) == [1] and tier.find(key(1)) == 0
    assert fill(tier, 4) == [1] and tier.find(key(1)) == 0


def test_an_abandoned_slot_is_free_again() -> None:
    tier = new_tier(1)
    slot = tier.prepare(key(1))
    assert slot == 0
    tier.abandon(slot)
    assert tier.used == 0 and key(1) not in tier
    assert fill(tier, 1) == [0]
    tier.abandon(0)  # its bytes were found bad
    assert tier.used == 0 and tier.find(key(1)) is None and tier.oldest(1) == []
    tier.check_integrity()


def test_the_least_recently_used_page_is_evicted() -> None:
    tier = new_tier(3)
    one, two, three = fill(tier, 1, 2, 3)
    tier.find(key(1))
    assert key(2) in tier  # this is not a use
    assert tier.oldest(9) == [two, three, one] and tier.oldest(1) == [two]
    assert tier.prepare(key(4)) == two
    assert tier.find(key(2)) is None and tier.used == 3
    tier.check_integrity()


def test_spare_pages_are_evicted_before_the_least_recently_used_until_they_are_used() -> None:
    tier = new_tier(4)
    one, two, three, four = fill(tier, 1, 2, 3, 4)
    for slot in (three, four, two):
        tier.spare([slot])
    tier.find(key(3))
    assert tier.oldest(4) == [four, two, one, three]
    assert [tier.is_spare(slot) for slot in (one, two, three, four, None)] == [False, True, False, True, False]
    assert fill(tier, 5, 6, 7) == [four, two, one]
    assert not any(tier.is_spare(slot) for slot in range(4))
    tier.check_integrity()


def test_the_next_process_does_not_know_which_pages_are_spare() -> None:
    table = new_table(3)
    tier = Tier(table, 3)
    one, two, three = fill(tier, 1, 2, 3)
    tier.spare([three])
    assert tier.oldest(3) == [three, one, two]
    after = Tier(table, 3)
    assert after.oldest(3) == [one, two, three] and not after.is_spare(three)


def test_making_room_names_the_pages_to_evict_and_evicts_none() -> None:
    tier = new_tier(4)
    one, two, three = fill(tier, 1, 2, 3)
    tier.pin(one)
    tier.spare([three])
    room = [tier.evictions_for(0, count) for count in (1, 2, 3, 4)]
    assert room == [[], [(tier, three)], [(tier, three), (tier, two)], None]
    assert tier.used == 3 and tier.oldest(3) == [three, two]


def test_a_pinned_page_stays_and_keeps_its_place_in_the_order() -> None:
    tier = new_tier(2)
    one, two = fill(tier, 1, 2)
    tier.pin(one)
    tier.pin(one)
    tier.unpin(one)
    assert tier.oldest(2) == [two]
    assert fill(tier, 3) == [two]
    tier.unpin(one)
    assert tier.oldest(2) == [one, two]
    tier.check_integrity()


def test_pages_are_pinned_together_as_one_by_one() -> None:
    tier = new_tier(3)
    slots, keys = fill(tier, 1, 2), [key(1), key(2)]
    tier.prepare(key(3))
    assert tier.pin_all(keys) == tier.pin_all(keys) == slots
    for pinned in (True, False):
        for slot in slots:
            tier.unpin(slot)
            assert tier.is_pinned(slot) is pinned
    with pytest.raises(AssertionError, match="being filled"):
        tier.pin_all([*keys, key(3)])
    tier.check_integrity()


def test_there_is_no_slot_while_all_are_filling_or_pinned() -> None:
    tier = new_tier(2)
    [slot] = fill(tier, 1)
    tier.pin(slot)
    assert tier.prepare(key(2)) is not None
    assert tier.prepare(key(3)) is None
    assert key(3) not in tier
    tier.check_integrity()


def test_a_bad_page_is_lost_at_once_and_its_slot_is_free_after_the_last_reader() -> None:
    tier = new_tier(1)
    [slot] = fill(tier, 1)
    tier.pin(slot)
    tier.pin(slot)
    tier.abandon(slot)
    assert key(1) not in tier and tier.used == 1
    for _ in range(2):
        assert tier.prepare(key(1)) is None
        tier.check_integrity()
        tier.unpin(slot)
    assert fill(tier, 1) == [slot]
    tier.check_integrity()


def test_the_next_process_has_the_complete_pages_in_the_order_of_use() -> None:
    table = new_table(4)
    tier = Tier(table, 4)
    one, two, three = fill(tier, 1, 2, 3)
    tier.find(key(1))
    tier.pin(two)
    filling = tier.prepare(key(4))
    after = Tier(table, 4)
    assert after.oldest(4) == [two, three, one] and after.used == 3
    assert [after.checksum(slot) for slot in (one, two, three)] == [1, 2, 3]
    assert key(4) not in after and after.prepare(key(5)) == filling
    after.check_integrity()


def test_keys_that_begin_and_end_with_zeros_survive() -> None:
    table = new_table(2)
    keys = [bytes(16), bytes(7) + b"\1" + bytes(8)]
    tier = Tier(table, 2)
    for each in keys:
        slot = tier.prepare(each)
        assert slot is not None
        tier.complete(slot, 0)
    after = Tier(table, 2)
    assert [after.find(each) for each in keys] == [0, 1]
    assert [after.key(slot) for slot in (0, 1)] == keys


def test_the_last_used_of_two_records_of_one_page_is_kept() -> None:
    table = new_table(2)
    fill(Tier(table, 2), 1, 2)
    records = np.frombuffer(table, RECORD, 2)
    records["key"][0] = key(2)
    after = Tier(table, 2)
    assert after.find(key(2)) == 1 and after.used == 1
    assert records["state"].tolist() == [FREE, COMPLETE]
    after.check_integrity()


def test_a_table_of_garbage_is_survived() -> None:
    """A loss of power may leave such a table. Checksums refute the pages that it calls complete."""
    slots = 64
    table = new_table(slots)
    table[:] = np.random.default_rng(1).bytes(len(table))
    records = np.frombuffer(table, RECORD, slots)
    records["state"][::2] = COMPLETE
    records["touched"][:8] = 2**64 - 1
    tier = Tier(table, slots)
    assert tier.used == slots // 2
    fill(tier, *range(slots))
    tier.check_integrity()
    assert Tier(table, slots).used == slots


def test_wrong_calls_are_assertion_errors() -> None:
    tier = new_tier(2)
    filling = tier.prepare(key(1))
    assert filling is not None
    with pytest.raises(AssertionError, match="on its way"):
        tier.prepare(key(1))
    with pytest.raises(AssertionError, match="a key of 3 bytes"):
        tier.prepare(b"key")
    with pytest.raises(AssertionError, match="is not complete"):
        tier.pin(filling)
    with pytest.raises(AssertionError, match="is not complete"):
        tier.checksum(filling)
    with pytest.raises(AssertionError, match="is not complete"):
        tier.spare([filling])
    with pytest.raises(AssertionError, match="is not pinned"):
        tier.unpin(filling)
    tier.complete(filling, 0)
    with pytest.raises(AssertionError, match="is not being filled"):
        tier.complete(filling, 0)
    tier.abandon(filling)
    with pytest.raises(AssertionError, match="holds no page"):
        tier.abandon(filling)
    tier.check_integrity()


@pytest.mark.parametrize(
    ("field", "value", "finding"),
    [
        ("state", FREE, "slot 0 is 2, the table says 0"),
        ("key", key(9), "keys and slots disagree"),
        ("touched", 2, "another order of use"),
        ("owner", 1001, "the table names another tenant"),
    ],
)
def test_the_audit_finds_a_table_with_a_foreign_write(field: str, value: int | bytes, finding: str) -> None:
    table = new_table(2)
    tier = Tier(table, 2)
    fill(tier, 1, 2)
    np.frombuffer(table, RECORD, 2)[field][0] = value
    with pytest.raises(AssertionError, match=finding):
        tier.check_integrity()


def test_the_audit_finds_a_slot_that_is_lost() -> None:
    tier = new_tier(2)
    tier._free.pop()
    with pytest.raises(AssertionError, match="a slot is lost"):
        tier.check_integrity()


def test_the_audit_finds_a_page_that_is_spare_and_is_not() -> None:
    tier = new_tier(2)
    _, two = fill(tier, 1, 2)
    tier._spare[two] = None
    with pytest.raises(AssertionError, match="is spare and is not"):
        tier.check_integrity()


def test_a_slot_begins_on_a_host_page() -> None:
    assert [whole_pages(nbytes) for nbytes in (1, 4096, 4097, 1 << 20)] == [4096, 4096, 8192, 1 << 20]
