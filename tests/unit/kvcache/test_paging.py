from __future__ import annotations

import pytest

from djinnd.kvcache.manager import KvManager
from djinnd.kvcache.moves import Direction, Move, Transfer
from djinnd.kvcache.page_pool import OutOfPages
from djinnd.kvcache.paging import Found, Paging
from djinnd.kvcache.prefixes import Key, root
from djinnd.kvcache.tenancy import ANYBODY
from djinnd.kvcache.tier import Tier, limit_tenant

PAGE = 4  # tokens
TENANT = 1000


class Harness:
    """A pool, its tiers, and a copier."""

    def __init__(self, pages: int = 16, host: int = 8, disk: int = 0) -> None:
        self.kv = KvManager(pages + 1, PAGE, 1 << 20, max_context=64)
        self.paging = Paging(self.kv)
        if host:
            self.paging.use_host(Tier(bytearray(Tier.table_bytes(host)), host))
        if disk:
            self.paging.use_disk(Tier(bytearray(Tier.table_bytes(disk)), disk))

    def session(self, name: str, tokens: int) -> list[int]:
        """Gives a session the KV of `tokens` tokens, and returns these."""
        self.kv.reserve(name, TENANT, tokens)
        self.kv.publish(name, TENANT, list(range(tokens)), tokens)
        return list(range(tokens))

    def keys(self, name: str, tokens: list[int]) -> list[Key]:
        return self.kv.keys_of(name, root(TENANT), tokens, len(tokens))

    def save(self, name: str, tokens: list[int], *, sealed: bool = False, can_wait: bool = False) -> Transfer:
        keys = self.keys(name, tokens)
        return self.paging.save(name, keys, len(tokens), sealed=sealed, can_wait=can_wait)

    def find(self, tokens: list[int], computed: int = 0, *, most: int = 64, ends: tuple[int, ...] = ()) -> Found:
        return self.paging.find("back", root(TENANT), tokens, computed, min(most, len(tokens)), ends)

    def take(self) -> list[Move]:
        return self.paging.moves.take(self.paging.moves.waiting)

    def copy_all(self) -> list[Transfer]:
        """Makes all copies. Returns the transfers that this ended."""
        over = []
        while self.paging.is_busy:
            for move in self.take():
                over += self.paging.moves.landed(move)
                if move.direction is not Direction.PROMOTE:
                    over += self.paging.moves.sealed(move, move.key[0])
        self.paging.check_integrity()
        return over


# --- pages leave ------------------------------------------------------------------------------------------------------


def test_saved_pages_are_copied_once_and_stay_the_session_s() -> None:
    harness = Harness()
    tokens = harness.session("a", 10)
    transfer = harness.save("a", tokens)
    assert (transfer.missing, transfer.failed) == (3, False)
    assert [(move.direction, move.source) for move in harness.take()] == [
        (Direction.DEMOTE, page) for page in harness.kv.pages_of("a")
    ]
    assert harness.kv.pages_held("a") == 3


def test_a_save_is_over_when_all_has_landed_or_with_sealed_when_all_is_found() -> None:
    harness = Harness()
    tokens = harness.session("a", 4)
    landing, sealing = harness.save("a", tokens), harness.save("a", tokens, sealed=True)
    (move,) = harness.take()
    assert harness.paging.moves.landed(move) == [landing]
    assert harness.find(tokens).on_the_way
    assert harness.paging.moves.sealed(move, 0) == [sealing]
    assert not harness.find(tokens).on_the_way
    assert harness.save("a", tokens).is_over


def test_a_moving_page_is_not_given_away_before_it_has_landed() -> None:
    harness = Harness(pages=2)
    harness.save("a", harness.session("a", 8))
    harness.kv.drop("a")
    with pytest.raises(OutOfPages):
        harness.kv.reserve("b", TENANT, 1)
    assert harness.kv.stranded == 2
    for move in harness.take():
        harness.paging.moves.landed(move)
    harness.kv.reserve("b", TENANT, 8)


def test_a_session_writes_only_behind_the_part_that_is_being_copied() -> None:
    harness = Harness()
    harness.save("a", harness.session("a", 6))
    assert harness.kv.trim("a", 6) == 6
    assert harness.kv.trim("a", 5) == 4


def test_the_first_pages_are_saved_if_the_host_is_busy() -> None:
    harness = Harness(host=2)
    transfer = harness.save("a", harness.session("a", 12))
    assert (transfer.missing, transfer.failed) == (2, True)


def test_only_a_save_that_can_wait_uses_slots_that_are_not_ready() -> None:
    harness = Harness(host=0)
    host = Tier(bytearray(Tier.table_bytes(4)), 4, are_ready=False)
    harness.paging.use_host(host)
    tokens = harness.session("a", 12)
    keys = harness.keys("a", tokens)
    assert not harness.paging.saves_without_loss(keys, TENANT)
    assert harness.save("a", tokens).failed and not harness.paging.is_busy
    host.make_ready(range(2))
    hurried = harness.save("a", tokens)
    assert (hurried.missing, hurried.failed) == (2, True)
    unhurried = harness.save("a", tokens, can_wait=True)
    assert (unhurried.missing, unhurried.failed) == (3, False)
    assert [move.target for move in harness.take()] == [0, 1, 2]


def test_pages_on_the_host_are_not_evicted_for_later_pages_of_the_session() -> None:
    harness = Harness(host=2)
    tokens = harness.session("a", 4)
    harness.save("a", tokens)
    harness.copy_all()
    harness.kv.drop("a")
    tokens = harness.session("a", 12)
    assert harness.save("a", tokens).failed
    harness.copy_all()
    assert harness.find(tokens).tokens == 8


def test_without_a_host_tier_nothing_is_saved() -> None:
    harness = Harness(host=0)
    transfer = harness.save("a", harness.session("a", 4))
    assert transfer.is_over and transfer.failed and not harness.paging.is_busy


def test_the_host_takes_pages_freely_if_it_has_room_or_has_them() -> None:
    harness = Harness(host=2)
    tokens = harness.session("a", 12)
    keys = harness.keys("a", tokens)
    takes = [harness.paging.saves_without_loss(keys[:count], TENANT) for count in (2, 3)]
    assert takes == [True, False]
    harness.paging.save("a", keys, 12)
    assert harness.paging.saves_without_loss(keys[:2], TENANT), "it is on its way there"
    assert not Harness(host=0).paging.saves_without_loss(keys, TENANT)


def test_the_host_takes_no_pages_freely_if_one_without_another_copy_would_be_lost() -> None:
    harness, tokens = saved(8, host=2, disk=2)
    first, second = harness.keys("a", tokens)
    lacking = [b"of another page!"]
    assert not harness.paging.saves_without_loss(lacking, TENANT)
    harness.paging.write_out("a", [first])
    harness.copy_all()
    assert harness.paging.saves_without_loss(lacking, TENANT), "it is on disk"
    assert harness.paging.host is not None
    harness.paging.host.find(first)
    assert not harness.paging.saves_without_loss(lacking, TENANT)
    harness.paging.mark_returned([second, *lacking])
    assert harness.paging.saves_without_loss(lacking, TENANT), "it is on the device"


def test_pages_of_a_session_on_the_host_are_not_lost_to_the_rest_of_it() -> None:
    harness, tokens = saved(8, host=2, disk=2)
    first, _ = harness.keys("a", tokens)
    harness.paging.write_out("a", [first])
    harness.copy_all()
    harness.paging.mark_returned([first])
    assert harness.paging.saves_without_loss([b"of another page!"], TENANT)
    assert not harness.paging.saves_without_loss([first, b"of another page!"], TENANT)


# --- pages come back --------------------------------------------------------------------------------------------------


def saved(tokens: int, host: int = 8, disk: int = 0) -> tuple[Harness, list[int]]:
    """A session has left for the host. Returns its tokens."""
    harness = Harness(host=host, disk=disk)
    held = harness.session("a", tokens)
    harness.save("a", held)
    harness.copy_all()
    harness.kv.drop("a")
    return harness, held


def test_pages_are_found_as_far_as_tokens_are_equal() -> None:
    harness, tokens = saved(10)
    assert harness.find(tokens).tokens == 8
    assert harness.find([*tokens[:5], 99, *tokens[6:]]).tokens == 4
    assert harness.paging.find("back", root(TENANT + 1), tokens, 0, 10, ()).keys == ()


@pytest.mark.parametrize("length", [10, 11, 12, 20])
def test_a_partly_filled_page_is_found_by_its_end(length: int) -> None:
    harness, tokens = saved(10)
    longer = [*tokens, *range(50, 50 + length - 10)]
    found = harness.find(longer, ends=(3, 10))
    assert (found.start, found.tokens, len(found.keys)) == (0, 10, 3)


def test_a_found_page_may_hold_more_than_is_of_use() -> None:
    harness, tokens = saved(8)
    found = harness.find(tokens, most=7)
    assert (found.tokens, len(found.keys)) == (7, 2)


def test_pages_arrive_in_pages_of_the_session() -> None:
    harness, tokens = saved(10)
    found = harness.find(tokens, ends=(10,))
    transfer = harness.paging.load("back", TENANT, found)
    assert transfer.missing == 3 and harness.kv.pages_held("back") == 3
    assert harness.copy_all() == [transfer] and not transfer.failed
    harness.kv.arrived("back", found.keys, transfer.tokens)
    assert harness.kv.adopt("other", TENANT, tokens, 0, 10) == 8, "full pages are found on the device again"


def test_followed_pages_are_usable_at_once_and_their_sources_stay_pinned() -> None:
    harness, tokens = saved(8)
    found = harness.find(tokens)
    transfer = harness.paging.load("back", TENANT, found)
    first, last = moves = harness.take()
    assert harness.paging.moves.followed(first) == [] and harness.paging.moves.followed(last) == [transfer]
    harness.kv.arrived("back", found.keys, transfer.tokens)
    assert harness.kv.trim("back", 8) == 8, "its pages may be written into"
    host = harness.paging.host
    assert host is not None and all(host.is_pinned(move.source) for move in moves) and harness.paging.is_busy
    harness.paging.check_integrity()
    for move in moves:
        assert harness.paging.moves.landed(move) == []
        assert not host.is_pinned(move.source)
    assert not harness.paging.is_busy
    harness.paging.check_integrity()


def test_a_load_without_free_pages_changes_nothing() -> None:
    harness, tokens = saved(10)
    harness.kv.reserve("hog", TENANT, 14 * PAGE)
    with pytest.raises(OutOfPages):
        harness.paging.load("back", TENANT, harness.find(tokens, ends=(10,)))
    assert harness.kv.pages_held("back") == 0 and not harness.paging.is_busy


def test_two_sessions_do_not_bring_the_same_page_at_once() -> None:
    harness, tokens = saved(8)
    harness.paging.load("back", TENANT, harness.find(tokens))
    assert harness.find(tokens).on_the_way


def test_a_dropped_transfer_frees_the_pages_that_have_not_begun() -> None:
    harness, tokens = saved(16)
    found = harness.find(tokens)
    transfer = harness.paging.load("back", TENANT, found)
    moves, host = harness.paging.moves, harness.paging.host
    begun, queued = moves.take(2)
    assert host is not None
    queued.is_queued = True  # taken, but its copy has not begun
    moves.drop(transfer)
    harness.kv.drop("back")
    assert (begun.is_dropped, queued.is_dropped, moves.waiting) == (False, True, 0)
    assert harness.kv.protected == [begun.target] and harness.kv.pool.used == 1
    assert [host.is_pinned(move.source) for move in (begun, queued)] == [True, False]
    harness.paging.check_integrity()
    assert moves.landed(begun) == [transfer] and transfer.failed
    assert harness.kv.pool.used == 0 and not harness.paging.is_busy
    again = harness.find(tokens)
    assert again.keys == found.keys and not again.on_the_way


def test_a_page_that_could_not_be_filled_is_zeroed_before_it_is_read() -> None:
    harness, tokens = saved(4)
    harness.kv.reserve("stranger", TENANT + 1, 16 * PAGE)
    harness.kv.drop("stranger")
    harness.kv.pool.take_stale()
    harness.paging.load("back", TENANT, harness.find(tokens))
    (move,) = harness.take()
    (transfer,) = harness.paging.moves.failed(move, bad=True)
    assert transfer.failed
    harness.kv.drop("back")
    assert harness.kv.pool.take_stale() == [], "no session holds it"
    harness.kv.reserve("back", TENANT, PAGE)
    assert harness.kv.pages_of("back") == harness.kv.pool.take_stale() == [move.target]
    assert harness.find(tokens).keys == (), "and what was bad is not asked for again"


# --- the disk ---------------------------------------------------------------------------------------------------------


def on_disk(tokens: int, host: int = 8) -> tuple[Harness, list[int]]:
    harness, held = saved(tokens, host, disk=8)
    keys = harness.keys("a", held)
    transfer = harness.paging.write_out("a", keys)
    assert harness.copy_all() == [transfer]
    harness.paging.forget_on_host(keys)
    assert harness.paging.count(keys) == (0, len(keys))
    return harness, held


def test_pages_on_disk_come_through_the_host_and_stay_on_disk() -> None:
    harness, tokens = on_disk(8)
    found = harness.find(tokens)
    assert (found.tokens, found.on_disk) == (8, 2)
    transfer = harness.paging.load("back", TENANT, found)
    moves = harness.take()
    assert [move.direction for move in moves if not harness.paging.moves.landed(move)] == [Direction.FETCH] * 2
    for move in moves:
        assert harness.paging.moves.sealed(move, 0) == []
    assert harness.copy_all() == [transfer]
    assert harness.paging.count(found.keys) == (2, 0)


def test_a_host_with_one_slot_brings_a_page_at_a_time() -> None:
    harness, tokens = Harness(host=1, disk=8), list(range(8))
    assert harness.paging.disk is not None
    for key in harness.keys("a", tokens):
        slot = harness.paging.disk.prepare(key)
        assert slot is not None
        harness.paging.disk.complete(slot, 0)
    for computed in (0, 4):
        found = harness.find(tokens, computed)
        assert found.tokens == 8
        transfer = harness.paging.load("back", TENANT, found)
        assert transfer.tokens == computed + 4
        harness.copy_all()
        harness.kv.arrived("back", found.keys[:1], transfer.tokens)


def test_saving_a_page_that_is_being_fetched_waits_for_the_same_move() -> None:
    harness, tokens = on_disk(4)
    arriving = harness.paging.load("back", TENANT, harness.find(tokens))
    harness.session("twin", 4)
    leaving = harness.save("twin", tokens, sealed=True)
    assert (arriving.missing, leaving.missing) == (1, 1)
    assert harness.copy_all() == [leaving, arriving]


def test_writing_out_a_page_that_is_being_written_waits_for_the_same_move() -> None:
    harness, tokens = saved(8, host=2, disk=8)
    assert harness.paging.write_out_oldest(5) == 1  # the oldest tenth, and one
    transfer = harness.paging.write_out("a", harness.keys("a", tokens))
    assert transfer.missing == 2 and len(harness.take()) == 2


def test_the_oldest_that_are_not_on_disk_are_written_out_once_the_host_is_nearly_full() -> None:
    harness = Harness(pages=40, host=40, disk=40)
    for first, written in ((0, [0]), (100, [0]), (200, [3, 1, 0])):  # at most a tenth
        tokens = list(range(first, first + 52))
        harness.kv.reserve("a", TENANT, 52)
        harness.kv.publish("a", TENANT, tokens, 52)
        harness.save("a", tokens)
        harness.copy_all()
        harness.kv.drop("a")
        for count in written:
            assert harness.paging.write_out_oldest(3) == count
            harness.copy_all()


def test_pages_in_use_on_the_device_are_not_written_out() -> None:
    harness, tokens = saved(8, host=2, disk=2)
    keys = harness.keys("a", tokens)
    harness.paging.mark_returned(keys)
    assert harness.paging.write_out_oldest(2) == 0
    harness.save("b", harness.session("b", 8))  # this is a use
    assert harness.paging.write_out_oldest(2) == 1


def test_a_page_that_two_moves_find_bad_is_forgotten_once() -> None:
    harness, tokens = saved(4, disk=8)
    harness.paging.load("back", TENANT, harness.find(tokens))
    harness.paging.write_out("a", harness.keys("a", tokens))
    for move in harness.take():
        (transfer,) = harness.paging.moves.failed(move, bad=True)
        assert transfer.failed
    harness.paging.check_integrity()
    assert harness.find(tokens).keys == ()


# --- tenants ----------------------------------------------------------------------------------------------------------


def test_a_page_is_its_tenant_s_in_every_tier() -> None:
    harness, _ = on_disk(8)
    assert harness.paging.host is not None and harness.paging.disk is not None
    assert harness.paging.disk.tenancy.uses() == {TENANT: 2} and harness.paging.host.tenancy.uses() == {}
    harness.paging.load("back", TENANT, harness.find(list(range(8))))
    harness.copy_all()
    assert harness.paging.host.tenancy.uses() == {TENANT: 2} == harness.kv.pool.uses()


def test_a_public_page_belongs_to_no_tenant_in_any_tier() -> None:
    harness = Harness()
    harness.kv.public.mark(range(4), PAGE)
    tokens = harness.session("a", 8)
    harness.save("a", tokens)
    harness.copy_all()
    assert harness.paging.host is not None
    assert harness.paging.host.tenancy.uses() == {ANYBODY: 1, TENANT: 1} == harness.kv.pool.uses()


def test_the_first_pages_of_a_session_above_the_limit_are_saved() -> None:
    harness = Harness()
    assert harness.paging.host is not None
    limit_tenant(harness.paging.host.tenancy, TENANT, 2)
    tokens = harness.session("a", 16)
    transfer = harness.save("a", tokens)
    harness.copy_all()
    assert transfer.failed and harness.find(tokens).tokens == 8
    assert harness.paging.host.used == 2


def test_pages_on_disk_come_piece_by_piece_through_a_small_host_quota() -> None:
    harness, tokens = on_disk(16)
    assert harness.paging.host is not None
    limit_tenant(harness.paging.host.tenancy, TENANT, 2)
    for computed in (0, 8):
        found = harness.find(tokens, computed)
        transfer = harness.paging.load("back", TENANT, found)
        assert (transfer.missing, transfer.tokens) == (2, computed + 8)
        harness.copy_all()
        harness.kv.arrived("back", found.keys[:2], transfer.tokens)


def test_pages_on_disk_are_not_found_with_a_host_quota_of_zero() -> None:
    harness, tokens = on_disk(8)
    assert harness.paging.host is not None
    limit_tenant(harness.paging.host.tenancy, TENANT, 0)
    assert harness.find(tokens) == Found(0, 0, ())
    limit_tenant(harness.paging.host.tenancy, TENANT, 1)
    assert harness.find(tokens).tokens == 8


def test_the_oldest_pages_are_written_out_once_under_a_small_disk_quota() -> None:
    harness, _ = saved(64, host=16, disk=16)
    assert harness.paging.disk is not None
    limit_tenant(harness.paging.disk.tenancy, TENANT, 1)
    for written in (1, 1, 0, 0):  # the oldest tenth, and one; each of them once
        assert harness.paging.write_out_oldest(1) == written
        harness.copy_all()
    assert harness.paging.disk.used == 1


# --- another process --------------------------------------------------------------------------------------------------


def test_pages_of_another_process_are_checked_on_first_use() -> None:
    harness, tokens = saved(4)
    assert harness.paging.host is not None
    kept = Tier(bytearray(Tier.table_bytes(8)), 8)
    slot = kept.prepare(harness.keys("a", tokens)[0])
    assert slot is not None
    kept.complete(slot, 77)
    later = Harness(host=0)
    later.paging.use_host(kept)
    for checksum in (77, None):
        found = later.find(tokens)
        later.paging.load("back", TENANT, found)
        (move,) = later.take()
        assert move.checksum == checksum
        later.paging.moves.landed(move)
        later.kv.drop("back")
