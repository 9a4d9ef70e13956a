"""Pages between the tiers: which are to move, for whom. Decides; whoever owns the bytes copies.

KV follows from tokens, so a tier is a cache (tier.py): a page that is nowhere is computed anew, and a page that is
there already need not be copied again. It is the same tenant's in every tier. Whatever moves (moves.py) belongs to
transfers, each of one session: its pages leave the device, or arrive there, and it is the scheduler's to say what
becomes of the session when the last of them has landed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice

from djinnd.kvcache.left_pages import Left
from djinnd.kvcache.manager import KvManager
from djinnd.kvcache.moves import Moves, Transfer
from djinnd.kvcache.page_pool import OutOfPages
from djinnd.kvcache.prefixes import Key
from djinnd.kvcache.tier import Tier

WRITE_OUT_ABOVE = 0.9  # of the host tier's slots: then its oldest pages go to disk too, before they give way to others


@dataclass(frozen=True, slots=True)
class Found:
    """What lower tiers have of a session, from the first of its pages that the device lacks on."""

    start: int  # token, at the beginning of a page
    tokens: int  # of the session whose KV is there when these pages are
    keys: tuple[Key, ...]
    on_disk: int = 0  # pages that are only there
    on_the_way: bool = False  # a page of them is arriving in a tier: it can be had in a moment
    is_staged: bool = False  # they are what its stage had brought, too


class Paging:
    """Of one model, used by the scheduler's thread. Without tiers, nothing is ever found and nothing leaves."""

    def __init__(self, kv: KvManager) -> None:
        self.kv = kv
        self.is_coming = False  # the host tier, some time
        self.is_expected = False  # the same, in a moment, with what an earlier process has left there
        self.moves = Moves(kv)

    @property
    def host(self) -> Tier | None:
        return self.moves.host

    @property
    def disk(self) -> Tier | None:
        return self.moves.disk

    def use_host(self, tier: Tier) -> None:
        """The host tier is there, with what an earlier process has left in it."""
        assert self.host is None
        self.moves.use_host(tier)

    def use_disk(self, tier: Tier) -> None:
        assert self.disk is None
        self.moves.use_disk(tier)

    def close(self) -> None:
        """Nothing is under way. The tiers stay as they are, for who comes next, and count for no tenant any more."""
        for tier in (self.host, self.disk):
            if tier is not None:
                tier.close()

    # --- pages leave the device -------------------------------------------------------------------------------------

    def save(
        self, session: str, keys: Sequence[Key], tokens: int, *, sealed: bool = False, can_wait: bool = False
    ) -> Transfer:
        """Copies what the host lacks of the session's pages, which hold the KV of its first `tokens` tokens and have
        `keys`. They stay the session's. From the first page on for which the host has no room, none is copied, and it
        has failed. It is over when all has landed; `sealed`: when all is found there. `can_wait`: until copies can go
        to where there is room."""
        transfer = Transfer(session, tokens)
        if self.host is None:
            transfer.failed = bool(keys)
            return transfer
        pages, size = self.kv.pages_of(session), self.kv.page_size
        assert len(keys) == len(pages), f"session {session} has {len(pages)} pages and {len(keys)} keys"
        kept = [slot for key in keys if (slot := self.host.peek(key)) is not None]
        if len(kept) == len(keys):
            self._end_first_gives_way(keys)
            return transfer
        for slot in kept:  # does not give way to what follows
            self.host.pin(slot)
        held = zip(range(0, tokens, size), keys, pages, strict=True)
        lacking = [(key, page, min(tokens - start, size)) for start, key, page in held if self.host.peek(key) is None]
        filling = self.moves.filling
        new = [one for one in lacking if one[0] not in filling]
        begun = self.moves.demote(new, can_wait=can_wait)
        no_room = new[len(begun)][0] if len(begun) < len(new) else None
        for key, _, _ in lacking:
            if key == no_room:
                transfer.failed = True
                break
            move = filling[key]
            if sealed:
                move.on_sealing.append(transfer)
            elif self.moves.has_landed(move):
                continue
            else:
                move.on_landing.append(transfer)
            transfer.missing += 1
        for slot in kept:
            self.host.unpin(slot)
        self._end_first_gives_way(keys)
        return transfer

    def _end_first_gives_way(self, keys: Sequence[Key]) -> None:
        """The beginning of a session is worth more than what follows: it is looked for first."""
        assert self.host is not None
        for key in reversed(keys):
            self.host.find(key)

    def takes_freely(self, keys: Sequence[Key], tenant: int) -> bool:
        """Whether the host could save what it lacks of these pages, and lose no page that is not elsewhere, too."""
        lost = self.losses(keys, tenant)
        return lost is not None and not lost

    def losses(self, keys: Sequence[Key], tenant: int) -> list[Key] | None:
        """The pages that would be nowhere any more, and cannot be spared, if the host saved what it lacks of these.
        None: it could not."""
        if self.host is None:
            return None
        lacking = self.host.lacks(keys)
        if not lacking:
            return []
        kept = [slot for key in keys if (slot := self.host.peek(key)) is not None]
        for slot in kept:  # would not give way to the others
            self.host.pin(slot)
        going = self.host.making_room(tenant, len(lacking))
        for slot in kept:
            self.host.unpin(slot)
        if going is None:
            return None
        return [tier.key(slot) for tier, slot in going if not (tier.is_spare(slot) or self._is_on_disk(tier, slot))]

    def _is_on_disk(self, tier: Tier, slot: int) -> bool:
        return tier is self.host and self.disk is not None and self.disk.peek(tier.key(slot)) is not None

    # --- pages come back --------------------------------------------------------------------------------------------

    def find(
        self,
        session: str,
        origin: Key,
        tokens: Sequence[int],
        computed: int,
        most: int,
        ends: Sequence[int],
        left: Left | None = None,
    ) -> Found:
        """What tiers have of the KV of the session's first `most` tokens, beyond that of the `computed` ones. `origin`:
        see prefixes.py. `ends`: where a page that is filled in part may end. The last page may end behind `most`: it
        holds the KV of what comes before, too. `left`: the first of its pages, where they are known."""
        size = self.kv.page_size
        start = at = computed // size * size
        found: list[Key] = []
        if self.host is None:
            return Found(start, computed, ())
        if left is not None and (all_of_it := self._left_on_host(left, start, most)):
            end = max(min(left.tokens, most), computed)
            return Found(start, end, tuple(all_of_it), on_the_way=any(map(self.moves.is_on_the_way, all_of_it)))
        last, public = self.kv.last_key(session, start // size), self.kv.public
        keys = public.last_keys(origin, last, tokens[:start], size)
        on_disk, on_the_way = 0, False
        while at < most:
            if left is not None and at < left.tokens and self._has(left.keys[at // size]):
                key, end = left.keys[at // size], min(at + size, left.tokens)
                keys = [key]
            else:
                pages = self._page_ends(at, len(tokens), ends)
                names = ((end, public.next_keys(origin, keys, tokens[at:end])) for end in pages)
                known = ((key, end, keys) for end, keys in names for key in keys if self._has(key))
                key, end, keys = next(known, (b"", at, []))
            if end == at:
                break
            found.append(key)
            on_disk += key not in self.host
            on_the_way |= self.moves.is_on_the_way(key)
            at = end
            if end % size:
                break
        return Found(start, max(min(at, most), computed), tuple(found), on_disk, on_the_way)

    def find_staged(self, keys: Sequence[Key], start: int, tokens: int) -> Found | None:
        """These pages, with which a session of so many tokens has left, stage and all; those from token `start` on.
        None: one of them is nowhere."""
        if self.host is None or not keys or not all(map(self._has, keys)):
            return None
        on_disk = sum(key not in self.host for key in keys)
        return Found(start, tokens, tuple(keys), on_disk, any(map(self.moves.is_on_the_way, keys)), is_staged=True)

    def _left_on_host(self, left: Left, start: int, most: int) -> list[Key]:
        """The pages from token `start` on, if they hold all that is of use and the host has them all, as after most
        waits; else none."""
        assert self.host is not None
        size = self.kv.page_size
        keys = left.keys[start // size : self.kv.pages_for(min(left.tokens, most))]
        is_all = left.tokens >= most or left.tokens % size  # behind a page that is filled in part, nothing is found
        return keys if is_all and not self.host.lacks(keys) else []

    def _page_ends(self, start: int, length: int, ends: Sequence[int]) -> list[int]:
        """Where a page that starts there may end, the fullest first."""
        full = start + self.kv.page_size
        return sorted({end for end in (full, *ends) if start < end <= min(full, length)}, reverse=True)

    def _has(self, key: Key) -> bool:
        """Or on disk, from where it can be had: not by who may have nothing on the host, through which it comes."""
        assert self.host is not None
        if key in self.host:
            return True
        source = self.disk.peek(key) if self.disk is not None else None
        return source is not None and self.host.may_have(self._tenant_on_disk(source))

    def _tenant_on_disk(self, slot: int) -> int:
        assert self.disk is not None
        return self.disk.tenants[slot]

    def load(self, session: str, tenant: int, found: Found, *, can_wait: bool = False) -> Transfer:
        """Gives the session, which holds pages for its first `found.start` tokens, those for what was found, and brings
        it there. Nothing of it is on its way. What is on disk comes by way of the host: it ends before the first page
        for which the host has no slot that is not busy, and ready; `can_wait`: until it is. Raises OutOfPages, and then
        has changed nothing."""
        assert self.host is not None and not found.on_the_way and found.keys
        size = self.kv.page_size
        assert self.kv.pages_held(session) * size == found.start
        if len(found.keys) > self.kv.pool.free:
            raise OutOfPages(len(found.keys), self.kv.pool.free)
        transfer = Transfer(session, found.tokens)
        if not found.on_disk:
            slots = self.host.pin_all(found.keys)
            self.moves.promote(found.keys, slots, self.kv.extend(session, tenant, slots), transfer)
            return transfer
        self._end_first_gives_way(found.keys)  # none of them, if there is another
        for key in found.keys:
            slot = self.host.peek(key)
            if slot is not None:
                slots = [self.host.pin(slot)]
                self.moves.promote([key], slots, self.kv.extend(session, tenant, slots), transfer)
            elif self._can_fetch(key, can_wait=can_wait):
                pages = self.kv.extend(session, tenant, [0])  # wherever its slot will be
                self.moves.fetch(key, pages, transfer, can_wait=can_wait)
            else:
                transfer.tokens = found.start + transfer.missing * size
                break
        self._end_first_gives_way(found.keys)  # else the host's are spare when they are back: see `is_back`
        return transfer

    def is_back(self, keys: Sequence[Key]) -> None:
        """A session has these pages on the device: the host can spare its own."""
        if self.host is not None:
            _spare(self.host, keys)

    def can_spare(self, keys: Sequence[Key]) -> None:
        """No session needs these pages any more. Those that are public stay as they are."""
        for tier in (self.host, self.disk):
            if tier is not None:
                _spare(tier, [key for key in keys if key not in self.kv.public])

    def _can_fetch(self, key: Key, *, can_wait: bool) -> bool:
        """Not, too, where it was on the host only, and has given way to one before it."""
        assert self.host is not None
        source = self.disk.peek(key) if self.disk is not None else None
        return source is not None and self.host.has_room(self._tenant_on_disk(source), can_wait=can_wait)

    def has_room_later(self, tenant: int) -> bool:
        """Whether the host has a slot for the tenant's pages, be it one that is not ready yet."""
        return self.host is not None and self.host.has_room(tenant, can_wait=True)

    # --- pages go to disk -------------------------------------------------------------------------------------------

    def write_out(self, session: str, keys: Sequence[Key]) -> Transfer:
        """Copies to disk what it lacks of these pages of the session, where they are found on the host. It has failed
        where the disk does not take all of them."""
        transfer = Transfer(session, 0)
        for key in keys:
            move = self.moves.writing_out.get(key) or self.moves.write_out(key)
            if move is not None:
                move.on_sealing.append(transfer)
                transfer.missing += 1
            elif self.lacking_on_disk([key]):
                transfer.failed = True
        return transfer

    def write_out_oldest(self, most: int) -> int:
        """Copies up to so many of the host's oldest pages to disk, where the host is nearly full: they will give way to
        others. Each once, while it is one of the oldest: a disk that is smaller than they are, or where a tenant may
        have fewer, would else be written without end. → how many."""
        if self.host is None or self.disk is None or self.host.used < WRITE_OUT_ABOVE * self.host.capacity:
            return 0
        oldest = self.host.oldest(int((1 - WRITE_OUT_ABOVE) * self.host.capacity) + 1)
        near = [self.host.key(slot) for slot in oldest if not self.host.is_spare(slot)]
        self.moves.written_out.intersection_update(near)
        lacking = (key for key in near if key not in self.moves.written_out and self.moves.write_out(key) is not None)
        begun = list(islice(lacking, most))
        self.moves.written_out.update(begun)
        return len(begun)

    def are_on_their_way(self, keys: Sequence[Key]) -> bool:
        """Whether a slot is being filled with one of these pages."""
        tiers = [tier for tier in (self.host, self.disk) if tier is not None]
        return any(key in tier and tier.peek(key) is None for tier in tiers for key in keys)

    def lacking_on_disk(self, keys: Sequence[Key]) -> int:
        """How many of these pages are on the host only."""
        assert self.host is not None and self.disk is not None
        return sum(self.host.peek(key) is not None and self.disk.peek(key) is None for key in keys)

    def forget_on_host(self, keys: Sequence[Key]) -> None:
        """Of these pages, those that are on disk, and that nobody reads."""
        assert self.host is not None and self.disk is not None
        for key in keys:
            slot = self.host.peek(key)
            if slot is not None and self.disk.peek(key) is not None and not self.host.is_pinned(slot):
                self.host.abandon(slot)

    @property
    def is_busy(self) -> bool:
        return self.moves.is_busy

    # --- figures ----------------------------------------------------------------------------------------------------

    def count(self, keys: Sequence[Key]) -> tuple[int, int]:
        """How many of these pages are on the host, and how many only on disk."""
        elsewhere = keys if self.host is None else self.host.lacks(keys)
        nowhere = elsewhere if self.disk is None else self.disk.lacks(elsewhere)
        return len(keys) - len(elsewhere), len(elsewhere) - len(nowhere)

    def check_integrity(self) -> None:
        for tier in (self.host, self.disk):
            if tier is not None:
                tier.check_integrity()
        self.moves.check_integrity()


def _spare(tier: Tier, keys: Sequence[Key]) -> None:
    """The first of a session are worth the most, as they are looked for first: they go last."""
    tier.spare([slot for key in reversed(keys) if (slot := tier.peek(key)) is not None])
