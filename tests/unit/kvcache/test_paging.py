from __future__ import annotations

import pytest

from djinnd.kvcache.manager import KvManager
from djinnd.kvcache.moves import Move, Transfer, Way
from djinnd.kvcache.page_pool import OutOfPages
from djinnd.kvcache.paging import Found, Paging
from djinnd.kvcache.prefixes import Key, root
from djinnd.kvcache.tenancy import ANYBODY
from djinnd.kvcache.tier import Tier

PAGE = 4  # tokens
TENANT = 1000


class Desk:
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
                if move.way is not Way.PROMOTE:
                    over += self.paging.moves.sealed(move, move.key[0])
        self.paging.check_integrity()
        return over


# --- pages leave ------------------------------------------------------------------------------------------------------


def test_saved_pages_are_copied_once_and_stay_the_session_s() -> None:
    desk = Desk()
    tokens = desk.session("a", 10)
    transfer = desk.save("a", tokens)
    assert (transfer.missing, transfer.failed) == (3, False)
    assert [(move.way, move.source) for move in desk.take()] == [(Way.DEMOTE, page) for page in desk.kv.pages_of("a")]
    assert desk.kv.pages_held("a") == 3


def test_a_save_is_over_when_all_has_landed_or_with_sealed_when_all_is_found() -> None:
    desk = Desk()
    tokens = desk.session("a", 4)
    landing, sealing = desk.save("a", tokens), desk.save("a", tokens, sealed=True)
    (move,) = desk.take()
    assert desk.paging.moves.landed(move) == [landing]
    assert desk.find(tokens).on_the_way
    assert desk.paging.moves.sealed(move, 0) == [sealing]
    assert not desk.find(tokens).on_the_way
    assert desk.save("a", tokens).is_over


def test_a_moving_page_is_not_given_away_before_it_has_landed() -> None:
    desk = Desk(pages=2)
    desk.save("a", desk.session("a", 8))
    desk.kv.drop("a")
    with pytest.raises(OutOfPages):
        desk.kv.reserve("b", TENANT, 1)
    assert desk.kv.stranded == 2
    for move in desk.take():
        desk.paging.moves.landed(move)
    desk.kv.reserve("b", TENANT, 8)


def test_a_session_writes_only_behind_the_part_that_is_being_copied() -> None:
    desk = Desk()
    desk.save("a", desk.session("a", 6))
    assert desk.kv.trim("a", 6) == 6
    assert desk.kv.trim("a", 5) == 4


def test_the_first_pages_are_saved_if_the_host_is_busy() -> None:
    desk = Desk(host=2)
    transfer = desk.save("a", desk.session("a", 12))
    assert (transfer.missing, transfer.failed) == (2, True)


def test_only_a_save_that_can_wait_uses_slots_that_are_not_ready() -> None:
    desk = Desk(host=0)
    host = Tier(bytearray(Tier.table_bytes(4)), 4, are_ready=False)
    desk.paging.use_host(host)
    tokens = desk.session("a", 12)
    keys = desk.keys("a", tokens)
    assert not desk.paging.takes_freely(keys, TENANT)
    assert desk.save("a", tokens).failed and not desk.paging.is_busy
    host.make_ready(range(2))
    hurried = desk.save("a", tokens)
    assert (hurried.missing, hurried.failed) == (2, True)
    unhurried = desk.save("a", tokens, can_wait=True)
    assert (unhurried.missing, unhurried.failed) == (3, False)
    assert [move.target for move in desk.take()] == [0, 1, 2]


def test_pages_on_the_host_are_not_evicted_for_later_pages_of_the_session() -> None:
    desk = Desk(host=2)
    tokens = desk.session("a", 4)
    desk.save("a", tokens)
    desk.copy_all()
    desk.kv.drop("a")
    tokens = desk.session("a", 12)
    assert desk.save("a", tokens).failed
    desk.copy_all()
    assert desk.find(tokens).tokens == 8


def test_without_a_host_tier_nothing_is_saved() -> None:
    desk = Desk(host=0)
    transfer = desk.save("a", desk.session("a", 4))
    assert transfer.is_over and transfer.failed and not desk.paging.is_busy


def test_the_host_takes_pages_freely_if_it_has_room_or_has_them() -> None:
    desk = Desk(host=2)
    tokens = desk.session("a", 12)
    keys = desk.keys("a", tokens)
    takes = [desk.paging.takes_freely(keys[:count], TENANT) for count in (2, 3)]
    assert takes == [True, False]
    desk.paging.save("a", keys, 12)
    assert desk.paging.takes_freely(keys[:2], TENANT), "it is on its way there"
    assert not Desk(host=0).paging.takes_freely(keys, TENANT)


def test_the_host_takes_no_pages_freely_if_one_without_another_copy_would_be_lost() -> None:
    desk, tokens = saved(8, host=2, disk=2)
    first, second = desk.keys("a", tokens)
    lacking = [b"of another page!"]
    assert not desk.paging.takes_freely(lacking, TENANT)
    desk.paging.write_out("a", [first])
    desk.copy_all()
    assert desk.paging.takes_freely(lacking, TENANT), "it is on disk"
    assert desk.paging.host is not None
    desk.paging.host.find(first)
    assert not desk.paging.takes_freely(lacking, TENANT)
    desk.paging.is_back([second, *lacking])
    assert desk.paging.takes_freely(lacking, TENANT), "it is on the device"


def test_pages_of_a_session_on_the_host_are_not_lost_to_the_rest_of_it() -> None:
    desk, tokens = saved(8, host=2, disk=2)
    first, _ = desk.keys("a", tokens)
    desk.paging.write_out("a", [first])
    desk.copy_all()
    desk.paging.is_back([first])
    assert desk.paging.takes_freely([b"of another page!"], TENANT)
    assert not desk.paging.takes_freely([first, b"of another page!"], TENANT)


# --- pages come back --------------------------------------------------------------------------------------------------


def saved(tokens: int, host: int = 8, disk: int = 0) -> tuple[Desk, list[int]]:
    """A session has left for the host. Returns its tokens."""
    desk = Desk(host=host, disk=disk)
    held = desk.session("a", tokens)
    desk.save("a", held)
    desk.copy_all()
    desk.kv.drop("a")
    return desk, held


def test_pages_are_found_as_far_as_tokens_are_equal() -> None:
    desk, tokens = saved(10)
    assert desk.find(tokens).tokens == 8
    assert desk.find([*tokens[:5], 99, *tokens[6:]]).tokens == 4
    assert desk.paging.find("back", root(TENANT + 1), tokens, 0, 10, ()).keys == ()


@pytest.mark.parametrize("length", [10, 11, 12, 20])
def test_a_partly_filled_page_is_found_by_its_end(length: int) -> None:
    desk, tokens = saved(10)
    longer = [*tokens, *range(50, 50 + length - 10)]
    found = desk.find(longer, ends=(3, 10))
    assert (found.start, found.tokens, len(found.keys)) == (0, 10, 3)


def test_a_found_page_may_hold_more_than_is_of_use() -> None:
    desk, tokens = saved(8)
    found = desk.find(tokens, most=7)
    assert (found.tokens, len(found.keys)) == (7, 2)


def test_pages_arrive_in_pages_of_the_session() -> None:
    desk, tokens = saved(10)
    found = desk.find(tokens, ends=(10,))
    transfer = desk.paging.load("back", TENANT, found)
    assert transfer.missing == 3 and desk.kv.pages_held("back") == 3
    assert desk.copy_all() == [transfer] and not transfer.failed
    desk.kv.arrived("back", found.keys, transfer.tokens)
    assert desk.kv.adopt("other", TENANT, tokens, 0, 10) == 8, "full pages are found on the device again"


def test_followed_pages_are_usable_at_once_and_their_sources_stay_pinned() -> None:
    desk, tokens = saved(8)
    found = desk.find(tokens)
    transfer = desk.paging.load("back", TENANT, found)
    first, last = moves = desk.take()
    assert desk.paging.moves.followed(first) == [] and desk.paging.moves.followed(last) == [transfer]
    desk.kv.arrived("back", found.keys, transfer.tokens)
    assert desk.kv.trim("back", 8) == 8, "its pages may be written into"
    host = desk.paging.host
    assert host is not None and all(host.is_pinned(move.source) for move in moves) and desk.paging.is_busy
    desk.paging.check_integrity()
    for move in moves:
        assert desk.paging.moves.landed(move) == []
        assert not host.is_pinned(move.source)
    assert not desk.paging.is_busy
    desk.paging.check_integrity()


def test_a_load_without_free_pages_changes_nothing() -> None:
    desk, tokens = saved(10)
    desk.kv.reserve("hog", TENANT, 14 * PAGE)
    with pytest.raises(OutOfPages):
        desk.paging.load("back", TENANT, desk.find(tokens, ends=(10,)))
    assert desk.kv.pages_held("back") == 0 and not desk.paging.is_busy


def test_two_sessions_do_not_bring_the_same_page_at_once() -> None:
    desk, tokens = saved(8)
    desk.paging.load("back", TENANT, desk.find(tokens))
    assert desk.find(tokens).on_the_way


def test_a_dropped_transfer_frees_the_pages_that_have_not_begun() -> None:
    desk, tokens = saved(16)
    found = desk.find(tokens)
    transfer = desk.paging.load("back", TENANT, found)
    moves, host = desk.paging.moves, desk.paging.host
    begun, queued = moves.take(2)
    assert host is not None
    queued.is_queued = True  # taken, but its copy has not begun
    moves.drop(transfer)
    desk.kv.drop("back")
    assert (begun.is_dropped, queued.is_dropped, moves.waiting) == (False, True, 0)
    assert desk.kv.protected == [begun.target] and desk.kv.pool.used == 1
    assert [host.is_pinned(move.source) for move in (begun, queued)] == [True, False]
    desk.paging.check_integrity()
    assert moves.landed(begun) == [transfer] and transfer.failed
    assert desk.kv.pool.used == 0 and not desk.paging.is_busy
    again = desk.find(tokens)
    assert again.keys == found.keys and not again.on_the_way


def test_a_page_that_could_not_be_filled_is_zeroed_before_it_is_read() -> None:
    desk, tokens = saved(4)
    desk.kv.reserve("stranger", TENANT + 1, 16 * PAGE)
    desk.kv.drop("stranger")
    desk.kv.take_stale()
    desk.paging.load("back", TENANT, desk.find(tokens))
    (move,) = desk.take()
    (transfer,) = desk.paging.moves.failed(move, bad=True)
    assert transfer.failed
    desk.kv.drop("back")
    assert desk.kv.take_stale() == [], "no session holds it"
    desk.kv.reserve("back", TENANT, PAGE)
    assert desk.kv.pages_of("back") == desk.kv.take_stale() == [move.target]
    assert desk.find(tokens).keys == (), "and what was bad is not asked for again"


# --- the disk ---------------------------------------------------------------------------------------------------------


def on_disk(tokens: int, host: int = 8) -> tuple[Desk, list[int]]:
    desk, held = saved(tokens, host, disk=8)
    keys = desk.keys("a", held)
    transfer = desk.paging.write_out("a", keys)
    assert desk.copy_all() == [transfer]
    desk.paging.forget_on_host(keys)
    assert desk.paging.count(keys) == (0, len(keys))
    return desk, held


def test_pages_on_disk_come_through_the_host_and_stay_on_disk() -> None:
    desk, tokens = on_disk(8)
    found = desk.find(tokens)
    assert (found.tokens, found.on_disk) == (8, 2)
    transfer = desk.paging.load("back", TENANT, found)
    moves = desk.take()
    assert [move.way for move in moves if not desk.paging.moves.landed(move)] == [Way.FETCH] * 2
    for move in moves:
        assert desk.paging.moves.sealed(move, 0) == []
    assert desk.copy_all() == [transfer]
    assert desk.paging.count(found.keys) == (2, 0)


def test_a_host_with_one_slot_brings_a_page_at_a_time() -> None:
    desk, tokens = Desk(host=1, disk=8), list(range(8))
    assert desk.paging.disk is not None
    for key in desk.keys("a", tokens):
        slot = desk.paging.disk.prepare(key)
        assert slot is not None
        desk.paging.disk.complete(slot, 0)
    for computed in (0, 4):
        found = desk.find(tokens, computed)
        assert found.tokens == 8
        transfer = desk.paging.load("back", TENANT, found)
        assert transfer.tokens == computed + 4
        desk.copy_all()
        desk.kv.arrived("back", found.keys[:1], transfer.tokens)


def test_saving_a_page_that_is_being_fetched_waits_for_the_same_move() -> None:
    desk, tokens = on_disk(4)
    arriving = desk.paging.load("back", TENANT, desk.find(tokens))
    desk.session("twin", 4)
    leaving = desk.save("twin", tokens, sealed=True)
    assert (arriving.missing, leaving.missing) == (1, 1)
    assert desk.copy_all() == [leaving, arriving]


def test_writing_out_a_page_that_is_being_written_waits_for_the_same_move() -> None:
    desk, tokens = saved(8, host=2, disk=8)
    assert desk.paging.write_out_oldest(5) == 1  # the oldest tenth, and one
    transfer = desk.paging.write_out("a", desk.keys("a", tokens))
    assert transfer.missing == 2 and len(desk.take()) == 2


def test_the_oldest_that_are_not_on_disk_are_written_out_once_the_host_is_nearly_full() -> None:
    desk = Desk(pages=40, host=40, disk=40)
    for first, written in ((0, [0]), (100, [0]), (200, [3, 1, 0])):  # at most a tenth
        tokens = list(range(first, first + 52))
        desk.kv.reserve("a", TENANT, 52)
        desk.kv.publish("a", TENANT, tokens, 52)
        desk.save("a", tokens)
        desk.copy_all()
        desk.kv.drop("a")
        for count in written:
            assert desk.paging.write_out_oldest(3) == count
            desk.copy_all()


def test_pages_in_use_on_the_device_are_not_written_out() -> None:
    desk, tokens = saved(8, host=2, disk=2)
    keys = desk.keys("a", tokens)
    desk.paging.is_back(keys)
    assert desk.paging.write_out_oldest(2) == 0
    desk.save("b", desk.session("b", 8))  # this is a use
    assert desk.paging.write_out_oldest(2) == 1


def test_a_page_that_two_moves_find_bad_is_forgotten_once() -> None:
    desk, tokens = saved(4, disk=8)
    desk.paging.load("back", TENANT, desk.find(tokens))
    desk.paging.write_out("a", desk.keys("a", tokens))
    for move in desk.take():
        (transfer,) = desk.paging.moves.failed(move, bad=True)
        assert transfer.failed
    desk.paging.check_integrity()
    assert desk.find(tokens).keys == ()


# --- tenants ----------------------------------------------------------------------------------------------------------


def test_a_page_is_its_tenant_s_in_every_tier() -> None:
    desk, _ = on_disk(8)
    assert desk.paging.host is not None and desk.paging.disk is not None
    assert desk.paging.disk.tenancy.uses() == {TENANT: 2} and desk.paging.host.tenancy.uses() == {}
    desk.paging.load("back", TENANT, desk.find(list(range(8))))
    desk.copy_all()
    assert desk.paging.host.tenancy.uses() == {TENANT: 2} == desk.kv.pool.uses()


def test_a_public_page_belongs_to_no_tenant_in_any_tier() -> None:
    desk = Desk()
    desk.kv.public.mark(range(4), PAGE)
    tokens = desk.session("a", 8)
    desk.save("a", tokens)
    desk.copy_all()
    assert desk.paging.host is not None
    assert desk.paging.host.tenancy.uses() == {ANYBODY: 1, TENANT: 1} == desk.kv.pool.uses()


def test_the_first_pages_of_a_session_above_the_limit_are_saved() -> None:
    desk = Desk()
    assert desk.paging.host is not None
    desk.paging.host.tenancy.limit(TENANT, 2)
    tokens = desk.session("a", 16)
    transfer = desk.save("a", tokens)
    desk.copy_all()
    assert transfer.failed and desk.find(tokens).tokens == 8
    assert desk.paging.host.used == 2


def test_pages_on_disk_come_piece_by_piece_through_a_small_host_quota() -> None:
    desk, tokens = on_disk(16)
    assert desk.paging.host is not None
    desk.paging.host.tenancy.limit(TENANT, 2)
    for computed in (0, 8):
        found = desk.find(tokens, computed)
        transfer = desk.paging.load("back", TENANT, found)
        assert (transfer.missing, transfer.tokens) == (2, computed + 8)
        desk.copy_all()
        desk.kv.arrived("back", found.keys[:2], transfer.tokens)


def test_pages_on_disk_are_not_found_with_a_host_quota_of_zero() -> None:
    desk, tokens = on_disk(8)
    assert desk.paging.host is not None
    desk.paging.host.tenancy.limit(TENANT, 0)
    assert desk.find(tokens) == Found(0, 0, ())
    desk.paging.host.tenancy.limit(TENANT, 1)
    assert desk.find(tokens).tokens == 8


def test_the_oldest_pages_are_written_out_once_under_a_small_disk_quota() -> None:
    desk, _ = saved(64, host=16, disk=16)
    assert desk.paging.disk is not None
    desk.paging.disk.tenancy.limit(TENANT, 1)
    for written in (1, 1, 0, 0):  # the oldest tenth, and one; each of them once
        assert desk.paging.write_out_oldest(1) == written
        desk.copy_all()
    assert desk.paging.disk.used == 1


# --- another process --------------------------------------------------------------------------------------------------


def test_pages_of_another_process_are_checked_on_first_use() -> None:
    desk, tokens = saved(4)
    assert desk.paging.host is not None
    kept = Tier(bytearray(Tier.table_bytes(8)), 8)
    slot = kept.prepare(desk.keys("a", tokens)[0])
    assert slot is not None
    kept.complete(slot, 77)
    later = Desk(host=0)
    later.paging.use_host(kept)
    for checksum in (77, None):
        found = later.find(tokens)
        later.paging.load("back", TENANT, found)
        (move,) = later.take()
        assert move.checksum == checksum
        later.paging.moves.landed(move)
        later.kv.drop("back")
