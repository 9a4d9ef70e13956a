"""The moves of one model's pages between the tiers, from when they are asked for until nothing holds their ends.

                 demote                  write out
    device page ────────► host slot ─────────────► disk slot        prepare ─► (copy) ─► landed ─► sealed
                ◄────────           ◄─────────────                  both ends are protected until it has landed
                 promote                   fetch

A page that moves has one more reference than page tables give it, so nobody is given it and nobody writes into it; a
session that goes on meanwhile only writes behind what is being copied. A slot that fills is nobody's to find; one that
is read is pinned. A page that has landed on the host is free on the device at once; it is found there when its checksum
has been taken (sealed), which takes no part in any step.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from itertools import chain
from operator import attrgetter, itemgetter

from djinnd.kvcache.manager import KvManager
from djinnd.kvcache.prefixes import Key
from djinnd.kvcache.tier import Tier


class Way(Enum):
    DEMOTE = "demote"
    PROMOTE = "promote"
    WRITE_OUT = "write out"
    FETCH = "fetch"


@dataclass(slots=True, eq=False)
class Transfer:
    """Pages of one session on their way. It is over when nothing of it is missing."""

    session: str
    tokens: int  # whose KV is there when it is over, unless it has failed
    missing: int = 0  # moves
    failed: bool = False  # something has not come, or had no room to come to
    is_urgent: bool = False  # see Moves.hurry

    @property
    def is_over(self) -> bool:
        return self.missing == 0


@dataclass(slots=True, eq=False)
class Move:
    """One page. `source` and `target`: a page of the pool or a slot, by the way it goes. `checksum`: what the bytes at
    the source are to have, where it is not this process that put them there; None: they are good."""

    way: Way
    key: Key
    source: int
    target: int
    checksum: int | None = None
    page: int = 0  # where a fetched page goes next
    is_followed: bool = False  # the device computes with it no sooner than it is there
    is_hurried: bool = False  # whoever's transfers it is of
    is_queued: bool = False  # taken, and its copy has not begun
    is_dropped: bool = False  # nobody wants it any more, and it has failed
    on_landing: list[Transfer] = field(default_factory=list)  # that miss it until then
    on_sealing: list[Transfer] = field(default_factory=list)  # of what is fetched, the first goes on to the device

    @property
    def is_urgent(self) -> bool:
        if self.is_hurried:
            return True
        for transfer in self.on_landing:  # not `any`: in each page's way to the device
            if transfer.is_urgent:
                return True
        return any(transfer.is_urgent for transfer in self.on_sealing)


class Moves:
    """Of one model, for its Paging."""

    def __init__(self, kv: KvManager) -> None:
        self.kv = kv
        self.host: Tier | None = None
        self.disk: Tier | None = None
        self.arriving: dict[Key, Move] = {}  # what is on its way to the device
        self.filling: dict[Key, Move] = {}  # what is on its way to the host, and not sealed
        self.writing_out: dict[Key, Move] = {}  # the same, to disk
        self.written_out: set[Key] = set()  # of the host's oldest pages, those that have been, or are, since they are
        self.has_hurried = self.has_dropped = False  # until whoever copies has seen it
        self._unproven: dict[Tier, set[Key]] = {}  # pages that another process has left
        self._waiting: deque[Move] = deque()  # for the copies to begin
        self._under_way: set[Move] = set()  # taken, and not landed
        self._unsealed: set[Move] = set()  # landed

    def use_host(self, tier: Tier) -> None:
        self.host = tier
        self._unproven[tier] = tier.keys()

    def use_disk(self, tier: Tier) -> None:
        self.disk = tier
        self._unproven[tier] = tier.keys()

    # --- they are asked for -----------------------------------------------------------------------------------------

    def demote(self, pages: Sequence[tuple[Key, int, int]], *, can_wait: bool = False) -> list[Move]:
        """Key, page, and tokens whose KV it holds, of each. → the moves of the first ones, for which the host has room,
        in that order. `can_wait`: see Tier.prepare."""
        assert self.host is not None
        owned = [(key, self.kv.pool.tenant(page)) for key, page, _ in pages]
        slots = self.host.prepare_all(owned, [page for _, page, _ in pages], can_wait=can_wait)
        moves = [Move(Way.DEMOTE, key, page, slot) for (key, page, _), slot in zip(pages, slots, strict=False)]
        for move, (_, page, tokens) in zip(moves, pages, strict=False):
            self.kv.protect([page], tokens)
            self.filling[move.key] = move
        self._waiting.extend(sorted(moves, key=attrgetter("source")))
        return moves

    def promote(self, keys: Sequence[Key], slots: Sequence[int], pages: Sequence[int], transfer: Transfer) -> None:
        """From these slots of the host, which are pinned."""
        self.kv.protect(pages, self.kv.page_size)
        transfer.missing += len(pages)
        self._begin_promoting(sorted(zip(keys, slots, pages, strict=True), key=itemgetter(1)), transfer)

    def _begin_promoting(self, found: Iterable[tuple[Key, int, int]], transfer: Transfer) -> None:
        """Key, slot and page of each; both ends are protected."""
        assert self.host is not None
        unproven, checksum = self._unproven[self.host], self.host.checksum
        moves = [
            Move(Way.PROMOTE, key, slot, page, checksum(slot) if key in unproven else None, on_landing=[transfer])
            for key, slot, page in found
        ]
        self.arriving.update((move.key, move) for move in moves)
        self._waiting.extend(moves)

    def fetch(self, key: Key, pages: Sequence[int], transfer: Transfer, *, can_wait: bool = False) -> None:
        """Into the one page, by way of the host, which has a slot for it. `can_wait`: see Tier.prepare."""
        assert self.host is not None and self.disk is not None
        (page,) = pages
        self.kv.protect(pages, self.kv.page_size)
        transfer.missing += 1
        source = self.disk.find(key)
        assert source is not None
        slot = self.host.prepare(key, self.disk.tenants[source], can_wait=can_wait)
        assert slot is not None
        self.disk.pin(source)
        move = Move(Way.FETCH, key, source, slot, self.disk.checksum(source), page, on_sealing=[transfer])
        self.filling[key] = self.arriving[key] = move
        self._waiting.append(move)

    def write_out(self, key: Key) -> Move | None:
        """None where it is on disk already, or on its way, or has no room there, or is not on the host."""
        assert self.host is not None and self.disk is not None
        source = self.host.peek(key)
        if source is None or key in self.disk:
            return None
        slot = self.disk.prepare(key, self.host.tenants[source])
        if slot is None:
            return None
        self.host.pin(source)
        move = self.writing_out[key] = Move(Way.WRITE_OUT, key, source, slot, self.host.checksum(source))
        self._waiting.append(move)
        return move

    # --- what becomes of them ---------------------------------------------------------------------------------------

    def take(self, count: int) -> list[Move]:
        """The first moves, so many or all that there are, for their copies to begin. Each lands or fails."""
        taken = [self._waiting.popleft() for _ in range(min(count, len(self._waiting)))]
        self._under_way.update(taken)
        return taken

    @property
    def waiting(self) -> int:
        """How many there are to take."""
        return len(self._waiting)

    @property
    def is_busy(self) -> bool:
        return bool(self._waiting or self._under_way or self._unsealed)

    def hurry(self, transfer: Transfer) -> None:
        """A call waits for it, or will in a moment."""
        if not transfer.is_urgent:
            transfer.is_urgent = self.has_hurried = True

    def hurry_all(self) -> None:
        """A call waits for pages, which are on the way for somebody else, or are free when others have left."""
        for move in chain(self.filling.values(), self.arriving.values()):
            if not move.is_hurried:
                move.is_hurried = self.has_hurried = True

    def drop(self, transfer: Transfer) -> None:
        """Nobody waits any more for what comes to the device by it. Pages whose copies have not begun do not come, and
        are free at once."""
        for move in list(self.arriving.values()):
            has_begun = move in self._under_way and not move.is_queued
            if move.way is Way.PROMOTE and transfer in move.on_landing and not has_begun:
                move.is_dropped = self.has_dropped = True
                self._under_way.add(move)
                self.failed(move, bad=False)
        self._waiting = deque(move for move in self._waiting if not move.is_dropped)

    def followed(self, move: Move) -> list[Transfer]:
        """Of a page that is being promoted: whatever the device is given from now on comes behind its copy, so it is as
        good as there. Only its source is still read, until it has landed. → transfers that are over with this."""
        assert move.way is Way.PROMOTE and move in self._under_way and not move.is_followed
        move.is_followed = True
        self.kv.unprotect(move.target)
        del self.arriving[move.key]
        return _over(move.on_landing)

    def landed(self, move: Move) -> list[Transfer]:
        """The bytes are at the target. → transfers that are over with this."""
        over: list[Transfer] = []
        if move.way is Way.PROMOTE:
            assert self.host is not None
            if not move.is_followed:
                over = self.followed(move)
            self.host.unpin(move.source)
            self._unproven[self.host].discard(move.key)
        else:
            self._unsealed.add(move)
            if move.way is Way.DEMOTE:
                self.kv.unprotect(move.source)
            over = _over(move.on_landing)
        self._under_way.remove(move)
        return over

    def sealed(self, move: Move, checksum: int) -> list[Transfer]:
        """The checksum of what has landed in a slot: it is found there now. → transfers that are over with this."""
        self._unsealed.remove(move)
        assert self.host is not None and move.way is not Way.PROMOTE
        if move.way is Way.WRITE_OUT:
            assert self.disk is not None
            self.disk.complete(move.target, checksum)
            self.host.unpin(move.source)
            del self.writing_out[move.key]
            return _over(move.on_sealing)
        self.host.complete(move.target, checksum)
        del self.filling[move.key]
        if move.way is Way.DEMOTE:
            return _over(move.on_sealing)
        assert self.disk is not None
        self.disk.unpin(move.source)
        arriving, *others = move.on_sealing
        self._begin_promoting([(move.key, self.host.pin(move.target), move.page)], arriving)
        return _over(others)

    def failed(self, move: Move, *, bad: bool) -> list[Transfer]:
        """The bytes did not come. `bad`: those at the source are not what they were. → transfers that are over."""
        assert not move.is_followed, "a step may have been computed with what has not come"
        self._under_way.remove(move)
        assert self.host is not None
        match move.way:
            case Way.DEMOTE:
                self.kv.unprotect(move.source)
                self.host.abandon(move.target)
                del self.filling[move.key]
            case Way.PROMOTE:
                self.kv.unfilled(move.target)
                self.kv.unprotect(move.target)
                del self.arriving[move.key]
                _leave(self.host, move, bad=bad)
            case Way.WRITE_OUT:
                assert self.disk is not None
                self.disk.abandon(move.target)
                del self.writing_out[move.key]
                self.written_out.discard(move.key)
                _leave(self.host, move, bad=bad)
            case Way.FETCH:
                assert self.disk is not None
                self.kv.unfilled(move.page)
                self.kv.unprotect(move.page)
                self.host.abandon(move.target)
                del self.filling[move.key], self.arriving[move.key]
                _leave(self.disk, move, bad=bad)
        transfers = move.on_landing + move.on_sealing
        for transfer in transfers:
            transfer.failed = True
        return _over(transfers)

    def is_on_the_way(self, key: Key) -> bool:
        """To the device or the host."""
        return key in self.filling or key in self.arriving

    def has_landed(self, move: Move) -> bool:
        """And is not sealed."""
        return move in self._unsealed

    def check_integrity(self) -> None:
        moves = {*self._waiting, *self._under_way, *self._unsealed}
        assert {m for m in moves if m.key in self.filling and m.way in (Way.DEMOTE, Way.FETCH)} == set(
            self.filling.values()
        ), "what fills the host and what moves there differ"
        pages = [m.source for m in moves if m.way is Way.DEMOTE and m not in self._unsealed]
        pages += [m.target for m in moves if m.way is Way.PROMOTE and not m.is_followed]
        pages += [m.page for m in moves if m.way is Way.FETCH]
        assert sorted(pages) == sorted(self.kv.protected), "pages that move and pages that are protected differ"


def _leave(tier: Tier, move: Move, *, bad: bool) -> None:
    """Its source. (Another move may have found it to be bad before.)"""
    if bad and tier.peek(move.key) == move.source:
        tier.abandon(move.source)
    tier.unpin(move.source)


def _over(transfers: Sequence[Transfer]) -> list[Transfer]:
    for transfer in transfers:
        transfer.missing -= 1
    return [transfer for transfer in transfers if transfer.is_over]
