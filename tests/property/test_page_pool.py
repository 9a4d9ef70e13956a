"""The page pool beside a simple model: the holders of each page, and the tenant of the bytes in it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from djinnd.kvcache.page_pool import SCRATCH, OutOfPages, PagePool
from djinnd.kvcache.tenancy import ANYBODY

TENANTS = st.integers(0, 2)


class PagePoolMachine(RuleBasedStateMachine):
    @initialize(num_pages=st.integers(2, 10))
    def begin(self, num_pages: int) -> None:
        self.pool = PagePool(num_pages)
        self.capacity = num_pages - 1
        self.references: Counter[int] = Counter()
        self.tenant: dict[int, int] = {}  # the tenant that held the page last
        self.bytes_of: dict[int, int] = {}  # the tenant that last wrote the page on the device; absent: zeros
        self.filled: set[int] = set()  # pages whose bytes are of use to that tenant

    @rule(count=st.integers(0, 6), tenant=TENANTS, overwritten=st.booleans())
    def allocate(self, count: int, tenant: int, overwritten: bool) -> None:
        free = self.capacity - len(self.references)
        if count > free:
            with pytest.raises(OutOfPages) as caught:
                self.pool.allocate(count, tenant)
            assert (caught.value.needed, caught.value.free) == (count, free)
            return
        pages = self.pool.allocate(count, tenant, overwritten=overwritten)
        assert len(set(pages)) == len(pages) == count
        assert not self.references.keys() & set(pages) and SCRATCH not in pages
        self.references.update(pages)
        self.tenant.update(dict.fromkeys(pages, tenant))
        self.filled.difference_update(pages)
        if overwritten:
            self.fill(pages)

    @rule(count=st.integers(1, 3), tenant=TENANTS, are_given_back=st.booleans())
    def fill_in_vain(self, count: int, tenant: int, are_given_back: bool) -> None:
        """The copy that was to overwrite the pages fails."""
        if count > self.capacity - len(self.references):
            return
        pages = self.pool.allocate(count, tenant, overwritten=True)
        self.references.update(pages)
        self.tenant.update(dict.fromkeys(pages, tenant))
        self.filled.difference_update(pages)
        for page in pages:
            self.pool.mark_unfilled(page)
        if are_given_back:
            self.pool.release(pages)
            self.references.subtract(pages)
            self.references = +self.references

    def fill(self, pages: Iterable[int]) -> None:
        self.bytes_of.update((page, self.tenant[page]) for page in pages)
        self.filled.update(pages)

    def zero_stale(self) -> None:
        for page in self.pool.take_stale():
            assert page not in self.filled, f"what page {page} holds would be lost"
            self.bytes_of.pop(page, None)

    @precondition(lambda self: self.references or self.filled)
    @rule(data=st.data(), tenant=TENANTS)
    def share(self, data: st.DataObject, tenant: int) -> None:
        """Shares held pages, and free pages that still have their tenant's bytes."""
        known = sorted(self.references.keys() | self.filled)
        own = [page for page in known if self.tenant[page] in (tenant, ANYBODY)]
        if own:
            pages = data.draw(st.lists(st.sampled_from(own), max_size=4))
            self.pool.share(pages, tenant)
            self.references.update(pages)

    @precondition(lambda self: self.references.keys() & self.filled)
    @rule(data=st.data())
    def make_public(self, data: st.DataObject) -> None:
        page = data.draw(st.sampled_from(sorted(self.references.keys() & self.filled)))
        self.pool.make_public(page)
        self.tenant[page] = self.bytes_of[page] = ANYBODY

    @precondition(lambda self: self.references)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        holds = sorted(self.references.elements())
        pages = [holds[i] for i in data.draw(st.sets(st.integers(0, len(holds) - 1), max_size=6))]
        self.pool.release(pages, of_use=self.filled)
        self.references = +(self.references - Counter(pages))

    @rule(data=st.data())
    def step(self, data: st.DataObject) -> None:
        """Zeroes stale pages. Then no page holds bytes of another tenant, and each may be written."""
        self.zero_stale()
        for page in self.references:
            assert self.bytes_of.get(page, self.tenant[page]) == self.tenant[page], f"page {page} leaks"
        if self.references:
            self.fill(data.draw(st.sets(st.sampled_from(sorted(self.references)))))

    @rule(num_pages=st.integers(2, 12))
    def resize(self, num_pages: int) -> None:
        """The bytes of held pages go with them; all other pages of the new pool are zeros."""
        if len(self.references) >= num_pages:
            with pytest.raises(AssertionError, match="pages are held"):
                self.pool.resize(num_pages)
            return
        places = self.pool.resize(num_pages)
        assert places.keys() == self.references.keys()
        assert len(set(places.values())) == len(places) and all(SCRATCH < page < num_pages for page in places.values())
        assert all(new == old for old, new in places.items() if old < num_pages), "a page moves that could stay"
        self.capacity = num_pages - 1
        self.references = Counter({places[page]: count for page, count in self.references.items()})
        self.tenant = {places[page]: self.tenant[page] for page in places}
        self.bytes_of = {places[page]: self.bytes_of[page] for page in places if page in self.bytes_of}
        self.filled = {places[page] for page in self.filled if page in places}

    @rule()
    def stale_pages_are_told_once(self) -> None:
        self.zero_stale()
        assert self.pool.take_stale() == []

    @invariant()
    def agrees(self) -> None:
        self.pool.check_integrity()
        assert self.pool.used == len(self.references)
        assert self.pool.free == self.capacity - len(self.references)
        for page in range(self.capacity + 1):
            assert self.pool.references(page) == self.references[page]
        used = Counter(self.tenant[page] for page in self.references)
        assert self.pool.uses() == used
        assert all(self.pool.used_by(tenant) == used[tenant] for tenant in (ANYBODY, 0, 1, 2))


TestPagePool = PagePoolMachine.TestCase
TestPagePool.settings = settings(max_examples=100, stateful_step_count=40)
