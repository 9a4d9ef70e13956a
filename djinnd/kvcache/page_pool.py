"""The device's KV pages of one model: reference counts and free list. The bytes belong to the device.

    page 0        scratch: rows that pad a graph's bucket read and write it; it is never given away
    page 1 …      free ──allocate──► held (references ≥ 1; share adds one) ──release of the last──► free

A free page keeps its bytes, so a session with the same prefix can share it again. Free pages with a known prefix are
given last, the one that was freed first before the others.

Tenants never read each other's KV. Each page remembers the tenant that held it last. If it is given to another tenant,
it is stale until `take_stale` has returned it to be zeroed. The device zeroes the whole pool when it is made. A page
whose overwriting was announced and did not happen may hold KV of any tenant. It is zeroed before the next step, or, if
its holder gives it back before that, when it is next given to a holder that does not overwrite it.

Free pages can be lent as scratch memory for what can be computed again. A lent page still counts as free. It is given
away when no other is left, and `reclaimed` rises, so that its borrower notices.

The pool also counts pages by tenant. A held page counts once, however many sessions hold it, until its copies have
ended. A public page counts for no tenant (`ANYBODY`), because the tenant that computed it may be gone.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Container, Iterable, Sequence
from itertools import islice

from djinnd.kvcache.tenancy import ANYBODY

SCRATCH = 0
# Values of `_last_tenant` that are no tenant: the page is still zero, or it may hold KV of any tenant.
_NO_TENANT, _ANY_TENANT = -2, -3


class OutOfPages(Exception):
    """Too few pages are free. This is no error: the caller evicts sessions or waits."""

    def __init__(self, needed: int, free: int) -> None:
        super().__init__(f"{needed:,} pages are needed, {free:,} are free")
        self.needed = needed
        self.free = free


class PagePool:
    """Allocates pages, counts references and tells which pages to zero."""

    def __init__(self, num_pages: int) -> None:
        """`num_pages` includes the scratch page."""
        assert num_pages >= 2, f"a pool of {num_pages} pages has none to give"
        self.capacity = num_pages - 1
        self._free = OrderedDict.fromkeys(range(1, num_pages))  # the first is given first
        self._references = [0] * num_pages
        self._last_tenant = [_NO_TENANT] * num_pages
        self._stale: set[int] = set()
        self._unfilled: set[int] = set()  # held pages that were to be overwritten and were not
        self._used_by = {ANYBODY: 0}  # held pages, by tenant
        self._lent: set[int] = set()  # free pages that are in use as scratch memory
        self.reclaimed = 0  # rises when lent pages are given away

    @property
    def free(self) -> int:
        return len(self._free)

    @property
    def used(self) -> int:
        return self.capacity - len(self._free)

    def used_by(self, tenant: int) -> int:
        """How many pages the tenant's sessions hold or are still being copied for them; each page counts once."""
        return self._used_by.get(tenant, 0)

    def uses(self) -> dict[int, int]:
        """Held pages of every tenant that holds some; public pages are under `ANYBODY`."""
        return {tenant: pages for tenant, pages in self._used_by.items() if pages}

    def tenant(self, page: int) -> int:
        """The tenant of a held page; `ANYBODY` if the page is public."""
        assert self._references[page] > 0, f"page {page} is free"
        return self._last_tenant[page]

    def references(self, page: int) -> int:
        return self._references[page]

    def allocate(self, count: int, tenant: int, *, overwritten: bool = False) -> list[int]:
        """`count` pages with one reference each, in rising order, because adjacent pages are copied in one piece.
        `overwritten`: the caller fills them whole at once, so they need not be zeroed. Raises OutOfPages, and has then
        changed nothing."""
        if count > len(self._free):
            raise OutOfPages(count, len(self._free))
        pages = sorted([self._free.popitem(last=False)[0] for _ in range(count)])
        if self._lent and not self._lent.isdisjoint(pages):
            self._lent.difference_update(pages)
            self.reclaimed += 1
        last_tenant, references, harmless = self._last_tenant, self._references, (_NO_TENANT, tenant)
        if overwritten:
            self._stale.difference_update(pages)
        else:
            self._stale.update([page for page in pages if last_tenant[page] not in harmless])
        for page in pages:  # hundreds, before a wake-up's first copy: no function call in here
            last_tenant[page] = tenant
            references[page] = 1
        self._used_by[tenant] = self.used_by(tenant) + count
        return pages

    def lend(self, count: int, tenant: int) -> list[int] | None:
        """Lends `count` free pages for scratch memory of the tenant. They are given away as if they had just become
        free. None if fewer are free and not lent."""
        if count > len(self._free) - len(self._lent):
            return None
        pages = list(islice((page for page in self._free if page not in self._lent), count))
        for page in pages:
            self._free.move_to_end(page)
            if self._last_tenant[page] not in (_NO_TENANT, tenant):
                self._stale.add(page)
            self._last_tenant[page] = tenant
        self._lent.update(pages)
        return pages

    def is_lent(self, pages: Iterable[int]) -> bool:
        """True if all these pages, which `lend` has returned, are still lent."""
        return self._lent.issuperset(pages)

    def give_back(self, pages: Sequence[int]) -> None:
        """Ends the loan of these pages, as far as it has not ended."""
        for page in self._lent.intersection(pages):
            self._free.move_to_end(page, last=False)
        self._lent.difference_update(pages)

    def mark_unfilled(self, page: int) -> None:
        """Notes that a held page was allocated with `overwritten`, and then was not overwritten whole."""
        self._unfilled.add(page)

    def share(self, pages: Sequence[int], tenant: int) -> None:
        """Adds a reference to each page. A page must belong to the tenant or be public. A free page is taken from the
        free list."""
        for page in pages:
            last_tenant, count = self._last_tenant[page], self._references[page]
            assert last_tenant in (tenant, ANYBODY), f"page {page} is not tenant {tenant}'s"
            if count == 0:
                del self._free[page]
                self._used_by[last_tenant] += 1
            self._references[page] = count + 1

    def make_public(self, page: int) -> None:
        """Lets all tenants share this held page for as long as it keeps its bytes."""
        self._used_by[self.tenant(page)] -= 1
        self._last_tenant[page] = ANYBODY
        self._used_by[ANYBODY] += 1

    def is_public(self, page: int) -> bool:
        return self._last_tenant[page] == ANYBODY

    def hold(self, pages: Sequence[int]) -> None:
        """Adds a reference to each of these held pages."""
        references = self._references
        for page in pages:
            assert references[page] > 0, f"page {page} is free"
            references[page] += 1

    def release(self, pages: Sequence[int], of_use: Container[int] = ()) -> None:
        """Takes a reference from each page; a page without references is free. Pages in `of_use` are given away last,
        the end of a prefix before its beginning."""
        for page in reversed(pages):
            count = self._references[page]
            assert count > 0, f"page {page} is released and is free"
            self._references[page] = count - 1
            if count == 1:
                self._free[page] = None
                self._used_by[self._last_tenant[page]] -= 1
                if page in self._unfilled:
                    self._unfilled.remove(page)
                    self._last_tenant[page] = _ANY_TENANT
                if page not in of_use:
                    self._free.move_to_end(page, last=False)

    def resize(self, num_pages: int) -> dict[int, int]:
        """Changes the number of pages. Returns the new number of each held page; the caller moves the bytes. Free pages
        count as new and zero. All held pages must fit."""
        assert self.used < num_pages, f"{self.used} pages are held, {num_pages - 1} would be left"
        held = [page for page, count in enumerate(self._references) if count]
        places = {page: page for page in held if page < num_pages}
        vacant = (page for page in range(1, num_pages) if page not in places)
        places |= {page: next(vacant) for page in held if page >= num_pages}
        references, last_tenant = self._references, self._last_tenant
        self.capacity = num_pages - 1
        self._references = [0] * num_pages
        self._last_tenant = [_NO_TENANT] * num_pages
        for old, new in places.items():
            self._references[new], self._last_tenant[new] = references[old], last_tenant[old]
        self._stale = {places[page] for page in self._stale if page in places}
        self._unfilled = {places[page] for page in self._unfilled}
        taken = set(places.values())
        self._free = OrderedDict.fromkeys(page for page in range(1, num_pages) if page not in taken)
        if self._lent:
            self._lent.clear()
            self.reclaimed += 1
        return places

    def take_stale(self) -> list[int]:
        """The pages to zero, in rising order. The caller zeroes them before the next step uses the pool. None of them
        holds bytes of its present holder yet."""
        stale = sorted(self._stale | self._unfilled)
        self._stale.clear()
        self._unfilled.clear()
        return stale

    def check_integrity(self) -> None:
        """Asserts that every page but the scratch page is either free, once, or held. Costs O(pages)."""
        free = self._free.keys()
        assert SCRATCH not in free and self._references[SCRATCH] == 0, "the scratch page was given away"
        for page in range(1, self.capacity + 1):
            count = self._references[page]
            assert count >= 0, f"page {page} has {count} references"
            assert (count == 0) == (page in free), f"page {page} has {count} references, free: {page in free}"
        held = sum(1 for count in self._references if count)
        assert held == self.used, f"{held} pages are held, the pool counts {self.used}"
        used = Counter(tenant for tenant, count in zip(self._last_tenant, self._references, strict=True) if count)
        assert self.uses() == used, f"tenants use {dict(used)} pages, the pool counts {dict(self.uses())}"
        assert self._lent <= free, "a lent page is not free"
        assert all(SCRATCH < page <= self.capacity for page in self._stale), "a stale page is not one of this pool"
        assert all(self._references[page] for page in self._unfilled), "a free page is marked as not overwritten"
