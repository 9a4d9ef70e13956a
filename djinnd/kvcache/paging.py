"""Decides which pages move between the tiers, and for which session. The owner of the bytes copies them.

KV follows from tokens, so a tier is a cache (tier.py): a page that no tier has is recomputed, and a page that is
already in a tier need not be copied there. A page belongs to the same tenant in every tier. Moves (moves.py) belong to
transfers, each of one session whose pages leave the device or come back. The scheduler decides what follows when a
transfer is over.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice

from djinnd.kvcache.departed_pages import Departure
from djinnd.kvcache.manager import KvManager
from djinnd.kvcache.moves import Moves, Transfer
from djinnd.kvcache.page_pool import OutOfPages
from djinnd.kvcache.prefixes import Key
from djinnd.kvcache.tier import Tier
from djinnd.kvcache.tuning import WRITE_OUT_ABOVE


@dataclass(frozen=True, slots=True)
class Found:
    """The pages of a session that lower tiers have, from the first one on that the device lacks."""

    start: int  # first token, at the beginning of a page
    tokens: int  # tokens of the session that have KV once these pages are back
    keys: tuple[Key, ...]
    on_disk: int = 0  # how many of the pages are only on disk
    on_the_way: bool = False  # one of the pages is being copied into a tier and cannot be read yet
    is_staged: bool = False  # the pages include those of the session's stage


class Paging:
    """Pages of one model between its tiers; used by the scheduler's thread. Without tiers, nothing is ever found and
    nothing leaves."""

    def __init__(self, kv: KvManager) -> None:
        self.kv = kv
        self.is_coming = False  # the host tier will be there at some time
        self.is_expected = False  # the host tier will be there soon, with the pages of an earlier process
        self.moves = Moves(kv)

    @property
    def host(self) -> Tier | None:
        return self.moves.host

    @property
    def disk(self) -> Tier | None:
        return self.moves.disk

    @property
    def _tiers(self) -> list[Tier]:
        return [tier for tier in (self.host, self.disk) if tier is not None]

    def use_host(self, tier: Tier) -> None:
        """Adds the host tier, with the pages that an earlier process has left in it."""
        assert self.host is None
        self.moves.use_host(tier)

    def use_disk(self, tier: Tier) -> None:
        assert self.disk is None
        self.moves.disk = tier

    def close(self) -> None:
        """Closes the tiers, which no longer count for tenants; their pages stay for the next engine process. No move
        may be under way."""
        for tier in self._tiers:
            tier.close()

    # --- pages leave the device -------------------------------------------------------------------------------------

    def save(
        self, session: str, keys: Sequence[Key], tokens: int, *, sealed: bool = False, can_wait: bool = False
    ) -> Transfer:
        """Copies the session's pages to the host, except pages that the host has already. The pages hold the KV of the
        session's first `tokens` tokens and have `keys`; the session keeps them.

        If the host has no room for a page, that page and those after it are not copied, and the transfer has failed.
        The transfer is over when all pages have landed; with `sealed`, when all of them can be found there. `can_wait`:
        see Tier.prepare.
        """
        transfer = Transfer(session, tokens)
        if self.host is None:
            transfer.failed = bool(keys)
            return transfer
        pages, size = self.kv.pages_of(session), self.kv.page_size
        assert len(keys) == len(pages), f"session {session} has {len(pages)} pages and {len(keys)} keys"
        kept = [slot for key in keys if (slot := self.host.peek(key)) is not None]
        if len(kept) == len(keys):
            self._age_last_pages_first(keys)
            return transfer
        for slot in kept:  # so that it is not evicted for the others
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
        self._age_last_pages_first(keys)
        return transfer

    def _age_last_pages_first(self, keys: Sequence[Key]) -> None:
        """Makes the first pages of a session the most recently used, so that its last pages are evicted first: a search
        begins with the first."""
        assert self.host is not None
        for key in reversed(keys):
            self.host.find(key)

    def saves_without_loss(self, keys: Sequence[Key], tenant: int) -> bool:
        """True if the host can save all these pages without losing a page that has no other copy."""
        lost = self.lost_by_saving(keys, tenant)
        return lost is not None and not lost

    def lost_by_saving(self, keys: Sequence[Key], tenant: int) -> list[Key] | None:
        """The pages that would be lost if the host saved these: it would evict them, and they have no other copy and
        are not spare. None if the host cannot save these pages."""
        if self.host is None:
            return None
        lacking = self.host.lacks(keys)
        if not lacking:
            return []
        kept = [slot for key in keys if (slot := self.host.peek(key)) is not None]
        for slot in kept:  # would not give way to the others
            self.host.pin(slot)
        going = self.host.evictions_for(tenant, len(lacking))
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
        left: Departure | None = None,
    ) -> Found:
        """Looks up which tiers have KV of the session's first `most` tokens, beyond its `computed` ones.

        `origin`: see prefixes.py. `ends`: positions at which a partly filled page may end. The last page found may end
        after `most`, because it also holds KV before `most`; not so in a hybrid model, in which it has the state at its
        end. `left`: the session's pages when it left, if known.
        """
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
            if end > most and self.kv.keeps_states:
                break
            found.append(key)
            on_disk += key not in self.host
            on_the_way |= self.moves.is_on_the_way(key)
            at = end
            if end % size:
                break
        return Found(start, max(min(at, most), computed), tuple(found), on_disk, on_the_way)

    def find_staged(self, keys: Sequence[Key], start: int, tokens: int) -> Found | None:
        """Looks up these pages, with which a session of `tokens` tokens has left together with its stage; they begin at
        token `start`. Returns None if one of them is in no tier."""
        if self.host is None or not keys or not all(map(self._has, keys)):
            return None
        on_disk = sum(key not in self.host for key in keys)
        return Found(start, tokens, tuple(keys), on_disk, any(map(self.moves.is_on_the_way, keys)), is_staged=True)

    def _left_on_host(self, left: Departure, start: int, most: int) -> list[Key]:
        """The pages from token `start` on, if they hold all usable KV and the host has all of them; else none. The host
        has them in the usual case, after a wait."""
        assert self.host is not None
        size = self.kv.page_size
        keys = left.keys[start // size : self.kv.pages_for(min(left.tokens, most))]
        if left.tokens > most and self.kv.keeps_states:
            return []
        is_all = left.tokens >= most or left.tokens % size  # a page behind a partly filled one cannot be found
        return keys if is_all and not self.host.lacks(keys) else []

    def _page_ends(self, start: int, length: int, ends: Sequence[int]) -> list[int]:
        """The positions at which a page that starts at `start` may end, the furthest first."""
        full = start + self.kv.page_size
        return sorted({end for end in (full, *ends) if start < end <= min(full, length)}, reverse=True)

    def _has(self, key: Key) -> bool:
        """True if the page is on the host, or is on disk and can be brought through the host: its tenant may have pages
        there."""
        assert self.host is not None
        if key in self.host:
            return True
        source = self.disk.peek(key) if self.disk is not None else None
        return source is not None and self.host.may_have(self._tenant_on_disk(source))

    def _tenant_on_disk(self, slot: int) -> int:
        assert self.disk is not None
        return self.disk.tenants[slot]

    def load(self, session: str, tenant: int, found: Found, *, can_wait: bool = False) -> Transfer:
        """Gives the session pages for the found KV, and begins to fill them. It must hold pages for its first
        `found.start` tokens, and none of the found pages may be moving.

        Pages on disk come through the host. The transfer ends before the first page for which the host has no slot that
        is neither busy nor unready; with `can_wait`, an unready slot will do. Raises OutOfPages, and has then changed
        nothing.
        """
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
        self._age_last_pages_first(found.keys)  # so that none of them is evicted for the others, if another page can be
        for key in found.keys:
            slot = self.host.peek(key)
            if slot is not None:
                slots = [self.host.pin(slot)]
                self.moves.promote([key], slots, self.kv.extend(session, tenant, slots), transfer)
            elif self._can_fetch(key, can_wait=can_wait):
                pages = self.kv.extend(session, tenant, [0])  # the place of its slot is not known yet
                self.moves.fetch(key, pages, transfer, can_wait=can_wait)
            else:
                transfer.tokens = found.start + transfer.missing * size
                break
        self._age_last_pages_first(
            found.keys
        )  # this order counts until they are back and are spared, see `mark_returned`
        return transfer

    def mark_returned(self, keys: Sequence[Key]) -> None:
        """Notes that a session has these pages on the device: the host can spare its copies."""
        if self.host is not None:
            _spare(self.host, keys)

    def mark_unneeded(self, keys: Sequence[Key]) -> None:
        """Notes that no session needs these pages any more. Public pages are not spared."""
        for tier in self._tiers:
            _spare(tier, [key for key in keys if key not in self.kv.public])

    def _can_fetch(self, key: Key, *, can_wait: bool) -> bool:
        """True if the page is on disk and the host has a slot for it. False also if it was on the host only and was
        evicted meanwhile."""
        assert self.host is not None
        source = self.disk.peek(key) if self.disk is not None else None
        return source is not None and self.host.has_room(self._tenant_on_disk(source), can_wait=can_wait)

    def has_room_later(self, tenant: int) -> bool:
        """True if the host has a slot for a page of the tenant, even if it is not ready yet."""
        return self.host is not None and self.host.has_room(tenant, can_wait=True)

    # --- pages go to disk -------------------------------------------------------------------------------------------

    def write_out(self, session: str, keys: Sequence[Key]) -> Transfer:
        """Copies these pages of the session from the host to the disk, if the disk lacks them. The transfer has failed
        if the disk does not take all of them."""
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
        """If the host is nearly full, begins to copy up to `most` of its oldest pages to disk, because they will be
        evicted soon. Returns how many.

        A page is copied once while it is among the oldest. Otherwise a disk that is too small for them, or a tenant's
        limit there, would cause writes without end.
        """
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
        """True if a slot is being filled with one of these pages."""
        return any(key in tier and tier.peek(key) is None for tier in self._tiers for key in keys)

    def lacking_on_disk(self, keys: Sequence[Key]) -> int:
        """How many of these pages are on the host and not on disk."""
        assert self.host is not None and self.disk is not None
        return sum(self.host.peek(key) is not None and self.disk.peek(key) is None for key in keys)

    def forget_on_host(self, keys: Sequence[Key]) -> None:
        """Evicts from the host these pages, if they are on disk and are not being read."""
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
        """How many of these pages are on the host, and how many are only on disk."""
        elsewhere = keys if self.host is None else self.host.lacks(keys)
        nowhere = elsewhere if self.disk is None else self.disk.lacks(elsewhere)
        return len(keys) - len(elsewhere), len(elsewhere) - len(nowhere)

    def check_integrity(self) -> None:
        for tier in self._tiers:
            tier.check_integrity()
        self.moves.check_integrity()


def _spare(tier: Tier, keys: Sequence[Key]) -> None:
    """Marks pages as spare, the last of the session first: searches begin with the first pages, so these are worth
    most."""
    tier.spare([slot for key in reversed(keys) if (slot := tier.peek(key)) is not None])
