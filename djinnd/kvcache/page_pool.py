"""The pages of one model's KV pool: who holds which. Counts references; the bytes are the device's.

    page 0        scratch: rows that pad a graph's bucket read and write it; nobody is given it
    page 1 …      free ──allocate──► held (references ≥ 1; share adds one) ──release of the last──► free

A free page keeps its bytes, so whoever knows what they are may share it again. Pages that are of use so are given last,
and of those the one that was freed first.

A page remembers the tenant that held it last. Given to another one, it is stale until `take_stale` has handed it out to
be zeroed, so a tenant can never read what another one left. The device zeroes the whole pool when it is made. One that
was to be overwritten, and was not, holds whatever somebody left there: it is zeroed, too, unless its holder gives it
back before the next step, as most do: then it is, when it is given to whoever does not overwrite it either.

It also counts: a page that is held is used by that tenant, once, however many of its sessions hold it, and until it has
been copied where it is to go. A public page is used by nobody (ANYBODY): who has computed it may have gone long ago.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Container, Sequence

from djinnd.kvcache.tenancy import ANYBODY

SCRATCH = 0
_NOBODY, _SOMEBODY = -2, -3  # tenants that nobody is: of pages that no tenant has had, and that any may have


class OutOfPages(Exception):
    """Not an error of any caller: whoever asked decides whose pages make room, or waits."""

    def __init__(self, needed: int, free: int) -> None:
        super().__init__(f"{needed:,} pages are needed, {free:,} are free")
        self.needed = needed
        self.free = free


class PagePool:
    def __init__(self, num_pages: int) -> None:
        """`num_pages` includes the scratch page."""
        assert num_pages >= 2, f"a pool of {num_pages} pages has none to give"
        self.capacity = num_pages - 1
        self._free = OrderedDict.fromkeys(range(1, num_pages))  # the first is given first
        self._references = [0] * num_pages
        self._last_tenant = [_NOBODY] * num_pages
        self._stale: set[int] = set()
        self._unfilled: set[int] = set()  # of those that are held
        self._used_by = {ANYBODY: 0}  # held pages, by tenant

    @property
    def free(self) -> int:
        return len(self._free)

    @property
    def used(self) -> int:
        return self.capacity - len(self._free)

    def used_by(self, tenant: int) -> int:
        """Pages that the tenant's sessions hold, or that are still being copied for them; each once."""
        return self._used_by.get(tenant, 0)

    def uses(self) -> dict[int, int]:
        """The same of every tenant that holds some; of public pages under ANYBODY."""
        return {tenant: pages for tenant, pages in self._used_by.items() if pages}

    def tenant(self, page: int) -> int:
        """Of a page that is held; ANYBODY's are public ones."""
        assert self._references[page] > 0, f"page {page} is held by nobody"
        return self._last_tenant[page]

    def references(self, page: int) -> int:
        return self._references[page]

    def allocate(self, count: int, tenant: int, *, overwritten: bool = False) -> list[int]:
        """`count` pages with one reference each, in rising order, as neighbours travel together. `overwritten`: the
        caller fills them whole at once, so that nothing of before is left to zero. Raises OutOfPages, and then has
        changed nothing."""
        if count > len(self._free):
            raise OutOfPages(count, len(self._free))
        pages = sorted([self._free.popitem(last=False)[0] for _ in range(count)])
        last_tenant, references, harmless = self._last_tenant, self._references, (_NOBODY, tenant)
        if overwritten:
            self._stale.difference_update(pages)
        else:
            self._stale.update([page for page in pages if last_tenant[page] not in harmless])
        for page in pages:  # hundreds, before a wake-up's first copy: no call in here
            last_tenant[page] = tenant
            references[page] = 1
        self._used_by[tenant] = self.used_by(tenant) + count
        return pages

    def unfilled(self, page: int) -> None:
        """One of those given to be `overwritten`, which is held, is not."""
        self._unfilled.add(page)

    def share(self, pages: Sequence[int], tenant: int) -> None:
        """Adds a reference to each, which must be the tenant's or, if free, have been; it is not free any more."""
        for page in pages:
            last_tenant, count = self._last_tenant[page], self._references[page]
            assert last_tenant in (tenant, ANYBODY), f"page {page} is not tenant {tenant}'s"
            if count == 0:
                del self._free[page]
                self._used_by[last_tenant] += 1
            self._references[page] = count + 1

    def make_public(self, page: int) -> None:
        """What the page, which somebody holds, holds may be shared by all tenants, for as long as it holds that."""
        self._used_by[self.tenant(page)] -= 1
        self._last_tenant[page] = ANYBODY
        self._used_by[ANYBODY] += 1

    def is_public(self, page: int) -> bool:
        return self._last_tenant[page] == ANYBODY

    def hold(self, pages: Sequence[int]) -> None:
        """Adds a reference to each, which somebody holds."""
        references = self._references
        for page in pages:
            assert references[page] > 0, f"page {page} is held by nobody"
            references[page] += 1

    def release(self, pages: Sequence[int], of_use: Container[int] = ()) -> None:
        """Takes a reference from each; a page without any is free. Those `of_use` are given last, the end of a prefix
        before its beginning."""
        for page in reversed(pages):
            count = self._references[page]
            assert count > 0, f"page {page} is released but nobody holds it"
            self._references[page] = count - 1
            if count == 1:
                self._free[page] = None
                self._used_by[self._last_tenant[page]] -= 1
                if page in self._unfilled:
                    self._unfilled.remove(page)
                    self._last_tenant[page] = _SOMEBODY
                if page not in of_use:
                    self._free.move_to_end(page, last=False)

    def resize(self, num_pages: int) -> dict[int, int]:
        """Another pool with the same holders: where each held page is there, of all that are held. The pages that
        nobody holds are new ones, which no tenant has ever had. At least as many as are held must fit."""
        assert self.used < num_pages, f"{self.used} pages are held, {num_pages - 1} would be left"
        held = [page for page, count in enumerate(self._references) if count]
        places = {page: page for page in held if page < num_pages}
        vacant = (page for page in range(1, num_pages) if page not in places)
        places |= {page: next(vacant) for page in held if page >= num_pages}
        references, last_tenant = self._references, self._last_tenant
        self.capacity = num_pages - 1
        self._references = [0] * num_pages
        self._last_tenant = [_NOBODY] * num_pages
        for old, new in places.items():
            self._references[new], self._last_tenant[new] = references[old], last_tenant[old]
        self._stale = {places[page] for page in self._stale if page in places}
        self._unfilled = {places[page] for page in self._unfilled}
        taken = set(places.values())
        self._free = OrderedDict.fromkeys(page for page in range(1, num_pages) if page not in taken)
        return places

    def take_stale(self) -> list[int]:
        """The pages to zero on the device, in rising order, each told once: the caller zeroes them before the next
        step touches the pool. None of them holds anything of its present holder yet."""
        stale = sorted(self._stale | self._unfilled)
        self._stale.clear()
        self._unfilled.clear()
        return stale

    def check_integrity(self) -> None:
        """Asserts that every page but the scratch page is either free, once, or held. O(pages)."""
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
        assert all(SCRATCH < page <= self.capacity for page in self._stale), "a stale page is not one of this pool"
        assert all(self._references[page] for page in self._unfilled), "a page that is not held is to be zeroed"
