"""Counts and limits the bytes of each tenant in one kind of tier, host or disk, over all models.

    host tier of model a ──┐                     ┌ bytes     of all its slots, whatever their state
    host tier of model b ──┼── Tenancy ─ tenant ─┼ limit     in bytes; none by default
    host tier of model c ──┘                     └ order     in which its complete slots are evicted, see tier.py

Counts are in bytes because models' pages differ in size. A tenant at its limit gets room only from its own pages, of
any model: a limit never evicts another tenant's page. If a limit becomes lower than the tenant's bytes, its oldest
pages are evicted at once, except pages that are being filled or read. Until these can go, the tenant is above its limit
and gets no slot.

Public pages belong to no tenant and count against no limit. The pages of a closed tier do not count, although they
still exist. When the model of a sleeping tier wakes, they count again, and are evicted if they are too many.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict
from itertools import chain
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # it imports this module
    from djinnd.kvcache.tier import Tier

ANYBODY = -1  # the tenant of public pages


class Tenancy:
    """Belongs to the thread of its tiers, which report every change of their slots and evict the pages that it names.
    All calls but `join`, `leave` and `limit` cost O(1), plus the pinned pages that they skip and the pages that they
    name."""

    def __init__(self) -> None:
        self._tiers: list[Tier] = []
        self._used: Counter[int] = Counter()  # bytes, by tenant
        self._limits: dict[int, int] = {}
        # by tenant: tier and slot of its pages, the oldest use first; spare pages are evicted before all others
        self._order: defaultdict[int, OrderedDict[tuple[Tier, int], None]] = defaultdict(OrderedDict)
        self._spare: defaultdict[int, OrderedDict[tuple[Tier, int], None]] = defaultdict(OrderedDict)

    # --- uses and limits of tenants -----------------------------------------------------------------------------------

    def used_by(self, tenant: int) -> int:
        """Bytes of the tenant."""
        return self._used[tenant]

    def uses(self) -> Counter[int]:
        """Bytes of every tenant that has some; public pages are under `ANYBODY`."""
        return +self._used

    def limit_of(self, tenant: int) -> int | None:
        """The tenant's limit in bytes; None: no limit."""
        return self._limits.get(tenant)

    def limit(self, tenant: int, nbytes: int | None) -> list[tuple[Tier, int]]:
        """Sets the tenant's limit in bytes; None: no limit. Returns the pages above it, which must be evicted at once:
        see `limit_tenant` in tier.py."""
        assert tenant != ANYBODY, "public pages belong to no tenant and have no limit"
        if nbytes is None:
            self._limits.pop(tenant, None)
            return []
        self._limits[tenant] = nbytes
        return self._above_limit(tenant)

    def may_have(self, tenant: int, nbytes: int) -> bool:
        """True if the tenant's limit is at least `nbytes`."""
        return nbytes <= self._limits.get(tenant, nbytes)

    def evictions_for(self, tenant: int, nbytes: int) -> list[tuple[Tier, int]] | None:
        """The tenant's pages that have to be evicted for `nbytes` more; None if too few can be."""
        limit = self._limits.get(tenant)
        if limit is None or self._used[tenant] + nbytes <= limit:
            return []
        missing = self._used[tenant] + nbytes - limit
        going = self._first_to_evict(tenant, missing)
        return going if sum(tier.page_bytes for tier, _ in going) >= missing else None

    def _above_limit(self, tenant: int) -> list[tuple[Tier, int]]:
        return self._first_to_evict(tenant, self._used[tenant] - self._limits[tenant])

    def _first_to_evict(self, tenant: int, nbytes: int) -> list[tuple[Tier, int]]:
        """The tenant's unpinned pages in the order of eviction, until they are `nbytes` together, or all of them."""
        going: list[tuple[Tier, int]] = []
        for tier, slot in chain(self._spare.get(tenant, ()), self._order.get(tenant, ())):
            if nbytes <= 0:
                break
            if not tier.is_pinned(slot):
                going.append((tier, slot))
                nbytes -= tier.page_bytes
        return going

    # --- changes that tiers report ------------------------------------------------------------------------------------

    def join(self, tier: Tier) -> list[tuple[Tier, int]]:
        """Adds a tier. The pages in its table count as used before all others. Returns the pages above a tenant's
        limit, which must be evicted at once."""
        self._tiers.append(tier)
        for slot in reversed(tier.complete_slots):
            tenant = tier.tenants[slot]
            self.taken(tenant, tier.page_bytes)
            self.used(tenant, (tier, slot))
            self._order[tenant].move_to_end((tier, slot), last=False)
        return [place for tenant in self._limits for place in self._above_limit(tenant)]

    def leave(self, tier: Tier) -> None:
        self._tiers.remove(tier)
        for slot, tenant in tier.tenants.items():
            self.lost(tenant, (tier, slot))
            self.freed(tenant, tier.page_bytes)

    def taken(self, tenant: int, nbytes: int) -> None:
        """A slot is given to the tenant."""
        self._used[tenant] += nbytes

    def freed(self, tenant: int, nbytes: int) -> None:
        """A slot of the tenant is free again."""
        self._used[tenant] -= nbytes

    def used(self, tenant: int, place: tuple[Tier, int]) -> None:
        """The page there is complete, and now the tenant's most recently used one."""
        self._spare[tenant].pop(place, None)
        self._order[tenant][place] = None
        self._order[tenant].move_to_end(place)

    def spared(self, tenant: int, place: tuple[Tier, int]) -> None:
        """The page there can be spared."""
        self._order[tenant].pop(place, None)
        self._spare[tenant][place] = None

    def lost(self, tenant: int, place: tuple[Tier, int]) -> None:
        """The page there cannot be found any more."""
        self._order[tenant].pop(place, None)
        self._spare[tenant].pop(place, None)

    def check_integrity(self) -> None:
        """Asserts that the counts agree with the tiers. Costs O(slots of all tiers)."""
        counted: Counter[int] = Counter()
        held: defaultdict[tuple[int, Tier], list[int]] = defaultdict(list)
        for tier in self._tiers:
            for tenant in tier.tenants.values():
                counted[tenant] += tier.page_bytes
            for slot in tier.complete_slots:
                held[tier.tenants[slot], tier].append(slot)
        assert min(self._used.values(), default=0) >= 0, f"a tenant has a negative number of bytes: {dict(self._used)}"
        assert self.uses() == counted, f"tenants have {dict(counted)} bytes, {dict(self.uses())} are counted"
        ordered: defaultdict[tuple[int, Tier], list[int]] = defaultdict(list)
        for tenant in self._order.keys() | self._spare.keys():
            for tier, slot in chain(self._spare.get(tenant, ()), self._order.get(tenant, ())):
                ordered[tenant, tier].append(slot)
        assert held == ordered, "tenants and tiers have another order of use"
