"""Whose the pages in one kind of tier, host or disk, are: how much each tenant has there, how much it may have, and
which of its own pages make room for more of them.

    host tier of model a ──┐                     ┌ bytes     of all slots that it has, whatever their state
    host tier of model b ──┼── Tenancy ─ tenant ─┼ limit     in bytes; none by default
    host tier of model c ──┘                     └ order     of the complete ones: as they give way, see tier.py

It is one for all models, as a limit is; in bytes, because their pages differ in size. At its limit, a tenant has room
for what its own pages give up, in whichever model they are, and for nothing else: a limit never takes another tenant's
page. Where a limit becomes less than the tenant has, its oldest pages go at once, but for those that are being filled
or read: until they can go it has more than it may, and it gets no slot.

What is public is nobody's: no tenant's limit keeps it out. A tier that is closed counts no more, though its pages lie
where they did: those of a model that sleeps are counted again, and go where they are too many, when it wakes.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict
from itertools import chain
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from djinnd.kvcache.tier import Tier

ANYBODY = -1  # a tenant that all are

Place = tuple["Tier", int]  # and the slot


class Tenancy:
    """Used by the thread of its tiers, and told by them what becomes of their slots. All calls but `join`, `leave` and
    `limit` are O(1), but for pinned pages and those that make room."""

    def __init__(self) -> None:
        self._tiers: list[Tier] = []
        self._used: Counter[int] = Counter()  # bytes, by tenant
        self._limits: dict[int, int] = {}
        self._order: defaultdict[int, OrderedDict[Place, None]] = defaultdict(OrderedDict)  # oldest use first
        self._spare: defaultdict[int, OrderedDict[Place, None]] = defaultdict(OrderedDict)  # before them

    # --- what tenants have, and may have ----------------------------------------------------------------------------

    def used_by(self, tenant: int) -> int:
        """Bytes."""
        return self._used[tenant]

    def uses(self) -> Counter[int]:
        """Bytes of every tenant that has some; of what is public under ANYBODY."""
        return +self._used

    def limit_of(self, tenant: int) -> int | None:
        """Bytes; None: as much as there is."""
        return self._limits.get(tenant)

    def limit(self, tenant: int, nbytes: int | None) -> None:
        """From now on; None: as much as there is."""
        assert tenant != ANYBODY, "what is public is nobody's, and has no limit"
        if nbytes is None:
            self._limits.pop(tenant, None)
        else:
            self._limits[tenant] = nbytes
            self._shed(tenant)

    def may_have(self, tenant: int, nbytes: int) -> bool:
        """Whether its limit is such that it ever has room for so much."""
        return nbytes <= self._limits.get(tenant, nbytes)

    def making_room(self, tenant: int, nbytes: int) -> list[Place] | None:
        """Which of the tenant's pages would have to go for so much more; None: those that can are too few."""
        limit = self._limits.get(tenant)
        if limit is None or self._used[tenant] + nbytes <= limit:
            return []
        missing = self._used[tenant] + nbytes - limit
        going = self._first_to_go(tenant, missing)
        return going if sum(tier.page_bytes for tier, _ in going) >= missing else None

    def _shed(self, tenant: int) -> None:
        for tier, slot in self._first_to_go(tenant, self._used[tenant] - self._limits[tenant]):
            tier.abandon(slot)

    def _first_to_go(self, tenant: int, nbytes: int) -> list[Place]:
        """Of the tenant's pages that nobody has pinned those that can be spared, then the least recently used, of so
        many bytes together, or all."""
        going: list[Place] = []
        for tier, slot in chain(self._spare.get(tenant, ()), self._order.get(tenant, ())):
            if nbytes <= 0:
                break
            if not tier.is_pinned(slot):
                going.append((tier, slot))
                nbytes -= tier.page_bytes
        return going

    # --- what tiers say ---------------------------------------------------------------------------------------------

    def join(self, tier: Tier) -> None:
        """With what is in its table, which is older than all that is here."""
        self._tiers.append(tier)
        for slot in reversed(tier.complete_slots):
            tenant = tier.tenants[slot]
            self.taken(tenant, tier.page_bytes)
            self.used(tenant, (tier, slot))
            self._order[tenant].move_to_end((tier, slot), last=False)
        for tenant in self._limits:
            self._shed(tenant)

    def leave(self, tier: Tier) -> None:
        self._tiers.remove(tier)
        for slot, tenant in tier.tenants.items():
            self.lost(tenant, (tier, slot))
            self.freed(tenant, tier.page_bytes)

    def taken(self, tenant: int, nbytes: int) -> None:
        """A slot is the tenant's."""
        self._used[tenant] += nbytes

    def freed(self, tenant: int, nbytes: int) -> None:
        """And is not any more."""
        self._used[tenant] -= nbytes

    def used(self, tenant: int, place: Place) -> None:
        """The page is complete there; now the tenant's most recently used."""
        self._spare[tenant].pop(place, None)
        self._order[tenant][place] = None
        self._order[tenant].move_to_end(place)

    def spared(self, tenant: int, place: Place) -> None:
        """The page can be spared."""
        self._order[tenant].pop(place, None)
        self._spare[tenant][place] = None

    def lost(self, tenant: int, place: Place) -> None:
        """Nobody finds the page any more."""
        self._order[tenant].pop(place, None)
        self._spare[tenant].pop(place, None)

    def check_integrity(self) -> None:
        """Asserts that it has counted what its tiers hold. O(slots of all tiers)."""
        counted: Counter[int] = Counter()
        held: defaultdict[tuple[int, Tier], list[int]] = defaultdict(list)
        for tier in self._tiers:
            for tenant in tier.tenants.values():
                counted[tenant] += tier.page_bytes
            for slot in tier.complete_slots:
                held[tier.tenants[slot], tier].append(slot)
        assert min(self._used.values(), default=0) >= 0, f"a tenant has fewer than no bytes: {dict(self._used)}"
        assert self.uses() == counted, f"tenants have {dict(counted)} bytes, {dict(self.uses())} are counted"
        ordered: defaultdict[tuple[int, Tier], list[int]] = defaultdict(list)
        for tenant in self._order.keys() | self._spare.keys():
            for tier, slot in chain(self._spare.get(tenant, ()), self._order.get(tenant, ())):
                ordered[tenant, tier].append(slot)
        assert held == ordered, "tenants and tiers have another order of use"
