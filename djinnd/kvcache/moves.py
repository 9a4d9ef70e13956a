"""The moves of one model's pages between device, host and disk.

                 demote                  write out
    device page ────────► host slot ─────────────► disk slot        prepare ─► (copy) ─► landed ─► sealed
                ◄────────           ◄─────────────                  both ends are protected until it has landed
                 promote                   fetch

A page that moves has one reference more than block tables give it, so it is neither given away nor overwritten; a
session that goes on meanwhile writes behind the part that is copied. A slot that is being filled cannot be found, and a
slot that is being read is pinned. When a page has landed on the host, its device page is free. It can be found on the
host when its checksum has been taken (sealed), which happens beside the steps.
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


class Direction(Enum):
    """Where a move goes; see the drawing above."""

    DEMOTE = "demote"
    PROMOTE = "promote"
    WRITE_OUT = "write out"
    FETCH = "fetch"


@dataclass(slots=True, eq=False)
class Transfer:
    """Pages of one session that move together. It is over when no move is missing."""

    session: str
    tokens: int  # when it is over, the KV of this many tokens is there, unless it has failed
    missing: int = 0  # moves that have not ended
    failed: bool = False  # a page was not copied, or had no room
    is_urgent: bool = False  # see Moves.hurry

    @property
    def is_over(self) -> bool:
        return self.missing == 0


@dataclass(slots=True, eq=False)
class Move:
    """The move of one page. `source` and `target` are a device page or a slot, depending on `direction`. `checksum` is
    what the source must have, if another process wrote it; None if the source is trusted."""

    direction: Direction
    key: Key
    source: int
    target: int
    checksum: int | None = None
    page: int = 0  # of a FETCH: the device page that it is promoted to next
    is_followed: bool = False  # the device can already use the target: later work is queued behind the copy
    is_hurried: bool = False  # urgent, whatever its transfers are
    is_queued: bool = False  # taken, but its copy has not begun
    is_dropped: bool = False  # no session waits for it, and it has failed
    on_landing: list[Transfer] = field(default_factory=list)  # transfers that wait until it has landed
    # transfers that wait until it is sealed; for a FETCH, the first one is then promoted
    on_sealing: list[Transfer] = field(default_factory=list)

    @property
    def is_urgent(self) -> bool:
        """True if a request waits for this page."""
        if self.is_hurried:
            return True
        for transfer in self.on_landing:  # not `any`, which is slower: every page to the device passes here
            if transfer.is_urgent:
                return True
        return any(transfer.is_urgent for transfer in self.on_sealing)


class Moves:
    """All moves of one model, for its Paging."""

    def __init__(self, kv: KvManager) -> None:
        self.kv = kv
        self.host: Tier | None = None
        self.disk: Tier | None = None
        self.arriving: dict[Key, Move] = {}  # moves that end on the device
        self.filling: dict[Key, Move] = {}  # moves to the host that are not sealed
        self.writing_out: dict[Key, Move] = {}  # moves to the disk that are not sealed
        # keys of the host's oldest pages that have been written to disk since they are among the oldest
        self.written_out: set[Key] = set()
        self.has_hurried = self.has_dropped = False  # True until the copying side has noticed
        self._unproven: set[Key] = set()  # pages on the host that another process has written
        self._waiting: deque[Move] = deque()  # not taken yet
        self._under_way: set[Move] = set()  # taken and not landed
        self._unsealed: set[Move] = set()  # landed and not sealed

    def use_host(self, tier: Tier) -> None:
        self.host, self._unproven = tier, tier.keys()

    # --- moves are asked for ------------------------------------------------------------------------------------------

    def demote(self, pages: Sequence[tuple[Key, int, int]], *, can_wait: bool = False) -> list[Move]:
        """Begins to copy pages to the host; each is given as key, page, and how many tokens of KV it holds. Returns
        moves of the first ones, in order, as far as the host has room. `can_wait`: see Tier.prepare."""
        assert self.host is not None
        owned = [(key, self.kv.pool.tenant(page)) for key, page, _ in pages]
        slots = self.host.prepare_all(owned, [page for _, page, _ in pages], can_wait=can_wait)
        moves = [Move(Direction.DEMOTE, key, page, slot) for (key, page, _), slot in zip(pages, slots, strict=False)]
        for move, (_, page, tokens) in zip(moves, pages, strict=False):
            self.kv.protect([page], tokens)
            self.filling[move.key] = move
        self._waiting.extend(sorted(moves, key=attrgetter("source")))
        return moves

    def promote(self, keys: Sequence[Key], slots: Sequence[int], pages: Sequence[int], transfer: Transfer) -> None:
        """Begins to copy these host slots, which are pinned, to device pages."""
        self.kv.protect(pages, self.kv.page_size)
        transfer.missing += len(pages)
        self._begin_promoting(sorted(zip(keys, slots, pages, strict=True), key=itemgetter(1)), transfer)

    def _begin_promoting(self, found: Iterable[tuple[Key, int, int]], transfer: Transfer) -> None:
        """Queues promotions, each given as key, slot and page. Both ends are protected."""
        assert self.host is not None
        unproven, checksum = self._unproven, self.host.checksum
        moves = [
            Move(Direction.PROMOTE, key, slot, page, checksum(slot) if key in unproven else None, on_landing=[transfer])
            for key, slot, page in found
        ]
        self.arriving.update((move.key, move) for move in moves)
        self._waiting.extend(moves)

    def fetch(self, key: Key, pages: Sequence[int], transfer: Transfer, *, can_wait: bool = False) -> None:
        """Begins to bring a page from disk to one device page, through the host, which has a slot for it. `can_wait`:
        see Tier.prepare."""
        assert self.host is not None and self.disk is not None
        (page,) = pages
        self.kv.protect(pages, self.kv.page_size)
        transfer.missing += 1
        source = self.disk.find(key)
        assert source is not None
        slot = self.host.prepare(key, self.disk.tenants[source], can_wait=can_wait)
        assert slot is not None
        self.disk.pin(source)
        move = Move(Direction.FETCH, key, source, slot, self.disk.checksum(source), page, on_sealing=[transfer])
        self.filling[key] = self.arriving[key] = move
        self._waiting.append(move)

    def write_out(self, key: Key) -> Move | None:
        """Begins to copy a host page to disk. Returns None if it is not on the host, if it is on disk or on its way
        there, or if the disk has no room for it."""
        assert self.host is not None and self.disk is not None
        source = self.host.peek(key)
        if source is None or key in self.disk:
            return None
        slot = self.disk.prepare(key, self.host.tenants[source])
        if slot is None:
            return None
        self.host.pin(source)
        move = self.writing_out[key] = Move(Direction.WRITE_OUT, key, source, slot, self.host.checksum(source))
        self._waiting.append(move)
        return move

    # --- moves begin and end ------------------------------------------------------------------------------------------

    def take(self, count: int) -> list[Move]:
        """Takes up to `count` of the first waiting moves, so that their copies can begin. The caller reports each as
        landed or failed."""
        taken = [self._waiting.popleft() for _ in range(min(count, len(self._waiting)))]
        self._under_way.update(taken)
        return taken

    @property
    def waiting(self) -> int:
        """How many moves can be taken."""
        return len(self._waiting)

    @property
    def is_busy(self) -> bool:
        return bool(self._waiting or self._under_way or self._unsealed)

    def hurry(self, transfer: Transfer) -> None:
        """Makes the transfer urgent, because a request waits for it or is about to come."""
        if not transfer.is_urgent:
            transfer.is_urgent = self.has_hurried = True

    def hurry_all(self) -> None:
        """Makes all moves from and to the device urgent: a request waits for pages that move for another session, or
        that are free once others have left."""
        for move in chain(self.filling.values(), self.arriving.values()):
            if not move.is_hurried:
                move.is_hurried = self.has_hurried = True

    def drop(self, transfer: Transfer) -> None:
        """Cancels the pages that come to the device by this transfer, because no session waits for them. Pages whose
        copies have not begun are free at once."""
        for move in list(self.arriving.values()):
            has_begun = move in self._under_way and not move.is_queued
            if move.direction is Direction.PROMOTE and transfer in move.on_landing and not has_begun:
                move.is_dropped = self.has_dropped = True
                self._under_way.add(move)
                self.failed(move, bad=False)
        self._waiting = deque(move for move in self._waiting if not move.is_dropped)

    def followed(self, move: Move) -> list[Transfer]:
        """Notes that the device can use a promoted page, because all later work is queued behind its copy. Until it has
        landed, only its source is still protected. Returns the transfers that are over now."""
        assert move.direction is Direction.PROMOTE and move in self._under_way and not move.is_followed
        move.is_followed = True
        self.kv.unprotect(move.target)
        del self.arriving[move.key]
        return _over(move.on_landing)

    def landed(self, move: Move) -> list[Transfer]:
        """Notes that the bytes are at the target. Returns the transfers that are over now."""
        over: list[Transfer] = []
        if move.direction is Direction.PROMOTE:
            assert self.host is not None
            if not move.is_followed:
                over = self.followed(move)
            self.host.unpin(move.source)
            self._unproven.discard(move.key)
        else:
            self._unsealed.add(move)
            if move.direction is Direction.DEMOTE:
                self.kv.unprotect(move.source)
            over = _over(move.on_landing)
        self._under_way.remove(move)
        return over

    def sealed(self, move: Move, checksum: int) -> list[Transfer]:
        """Sets the checksum of a slot that was filled; the page can be found there now. Returns the transfers that are
        over now."""
        self._unsealed.remove(move)
        assert self.host is not None and move.direction is not Direction.PROMOTE
        if move.direction is Direction.WRITE_OUT:
            assert self.disk is not None
            self.disk.complete(move.target, checksum)
            self.host.unpin(move.source)
            del self.writing_out[move.key]
            return _over(move.on_sealing)
        self.host.complete(move.target, checksum)
        del self.filling[move.key]
        if move.direction is Direction.DEMOTE:
            return _over(move.on_sealing)
        assert self.disk is not None
        self.disk.unpin(move.source)
        arriving, *others = move.on_sealing
        self._begin_promoting([(move.key, self.host.pin(move.target), move.page)], arriving)
        return _over(others)

    def failed(self, move: Move, *, bad: bool) -> list[Transfer]:
        """Notes that the copy failed. `bad`: the bytes at the source are damaged. Returns the transfers that are over
        now."""
        assert not move.is_followed, "a step may have used a page that was not copied"
        self._under_way.remove(move)
        assert self.host is not None
        match move.direction:
            case Direction.DEMOTE:
                self.kv.unprotect(move.source)
                self.host.abandon(move.target)
                del self.filling[move.key]
            case Direction.PROMOTE:
                self.kv.pool.mark_unfilled(move.target)
                self.kv.unprotect(move.target)
                del self.arriving[move.key]
                _leave(self.host, move, bad=bad)
            case Direction.WRITE_OUT:
                assert self.disk is not None
                self.disk.abandon(move.target)
                del self.writing_out[move.key]
                self.written_out.discard(move.key)
                _leave(self.host, move, bad=bad)
            case Direction.FETCH:
                assert self.disk is not None
                self.kv.pool.mark_unfilled(move.page)
                self.kv.unprotect(move.page)
                self.host.abandon(move.target)
                del self.filling[move.key], self.arriving[move.key]
                _leave(self.disk, move, bad=bad)
        transfers = move.on_landing + move.on_sealing
        for transfer in transfers:
            transfer.failed = True
        return _over(transfers)

    def is_on_the_way(self, key: Key) -> bool:
        """True if the page is moving to the device or the host."""
        return key in self.filling or key in self.arriving

    def has_landed(self, move: Move) -> bool:
        """True if the move has landed and is not sealed."""
        return move in self._unsealed

    def check_integrity(self) -> None:
        moves = {*self._waiting, *self._under_way, *self._unsealed}
        assert {
            m for m in moves if m.key in self.filling and m.direction in (Direction.DEMOTE, Direction.FETCH)
        } == set(self.filling.values()), "slots that are filled and moves to the host differ"
        pages = [m.source for m in moves if m.direction is Direction.DEMOTE and m not in self._unsealed]
        pages += [m.target for m in moves if m.direction is Direction.PROMOTE and not m.is_followed]
        pages += [m.page for m in moves if m.direction is Direction.FETCH]
        assert sorted(pages) == sorted(self.kv.protected), "pages that move and pages that are protected differ"


def _leave(tier: Tier, move: Move, *, bad: bool) -> None:
    """Unpins the move's source, and abandons it if it is bad. Another move may have abandoned it before."""
    if bad and tier.peek(move.key) == move.source:
        tier.abandon(move.source)
    tier.unpin(move.source)


def _over(transfers: Sequence[Transfer]) -> list[Transfer]:
    """Counts one move of each transfer as ended. Returns the transfers that are over now."""
    for transfer in transfers:
        transfer.missing -= 1
    return [transfer for transfer in transfers if transfer.is_over]
