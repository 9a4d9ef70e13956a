"""The slots of one lower tier, host or disk: which page is in which slot, and which pages are evicted for others.

The KV in a page follows from its key (prefixes.py), so a tier is a cache: it may forget any page at any time, and the
tokens are then recomputed. The table outlives the process; the owner of the memory (the arena, or a mapped file) passes
it in. The bytes of slots are the caller's; this file only decides and records.

    table    ┌──────────┬──────────┬─ … ─┬────────────────┬─────────┐
             │ record 0 │ record 1 │     │ record slots-1 │ padding │  64 bytes each, up to a multiple of 4096
             └──────────┴──────────┴─ … ─┴────────────────┴─────────┘
    record   0       8     24         32        40      48         64
             ┌───────┬─────┬──────────┬─────────┬───────┬──────────┐
             │ state │ key │ checksum │ touched │ owner │  zeros   │     numbers are little-endian; zeros: a free slot
             └───────┴─────┴──────────┴─────────┴───────┴──────────┘

    free ──prepare──► filling ──complete──► complete ──prepare for another key──► filling
      ▲                  │                     │
      └─────abandon──────┴─────────────────────┘

The process may die between any two writes. So `state` is written first when a slot is given away, and last when it is
complete, after the caller has written the bytes: a complete record is always true. The next process takes filling slots
as free. After a loss of power, an old record may lie beside new bytes; the checksum detects that.

`touched` rises with every use. Complete slots are evicted in its order, and the next process continues it. `owner` is
the tenant plus one, or zero if the page is public. A tenant's slots are counted, and may be limited, together with
those in other models' tiers (tenancy.py). A slot that is not `ready` cannot be copied to yet, and is given only to
callers that can wait.

Spared pages are evicted before all others, in the order in which they were marked. These are pages that a session also
has on the device, so that the tiers together hold more than if each repeated the tier above it (Wong and Wilkes, "My
cache or yours? Making storage more exclusive", USENIX 2002). Pages of closed sessions are spared too. The table does
not record this, because the device's pages end with the process.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import chain, filterfalse, islice, pairwise

import numpy as np
import numpy.typing as npt

from djinnd.kvcache.neighbours import rising_with
from djinnd.kvcache.prefixes import KEY_BYTES, Key
from djinnd.kvcache.tenancy import ANYBODY, Tenancy
from djinnd.kvcache.tuning import MAX_SLOTS

FREE, FILLING, COMPLETE = 0, 1, 2
RECORD = np.dtype(
    {
        "names": ["state", "key", "checksum", "touched", "owner"],
        "formats": ["<u8", f"V{KEY_BYTES}", "<u8", "<u8", "<u8"],
        "offsets": [0, 8, 24, 32, 40],
        "itemsize": 64,
    }
)
HOST_PAGE = 4096  # bytes: alignment of tables and slots, for pinning and for direct I/O; enough for every disk in use

Table = bytearray | memoryview | npt.NDArray[np.uint8]


class Tier:
    """One tier of one model, used by one thread, which is that of all tiers of its tenancy. No call scans all slots,
    unless it says so. `evictions_for` and `oldest` skip pinned slots: as many as are being read."""

    @staticmethod
    def table_bytes(slots: int) -> int:
        """The table's size in bytes, a multiple of 4096."""
        return whole_pages(slots * RECORD.itemsize)

    def __init__(
        self,
        table: Table,
        slots: int,
        tenancy: Tenancy | None = None,
        page_bytes: int = 1,
        *,
        are_ready: bool = True,
    ) -> None:
        """`table`: `table_bytes(slots)` writable bytes, either zeros or the table of an earlier Tier with as many
        slots, whose complete slots are taken over. This Tier is the only writer while it lives.

        `tenancy`: limits of tenants, shared with the other tiers that have it; None: one of its own. `are_ready`: False
        if no slot is ready until `make_ready`.
        """
        assert 0 < slots <= MAX_SLOTS and page_bytes > 0, f"a tier of {slots:,} slots"
        self.capacity = slots
        self.page_bytes = page_bytes
        self.tenancy = Tenancy() if tenancy is None else tenancy
        records = np.frombuffer(table, RECORD, slots)
        self._state, self._key_of = records["state"], records["key"]
        self._checksum, self._touched, self._owner = records["checksum"], records["touched"], records["owner"]
        self._slot: dict[Key, int] = {}  # slots that are filling or complete
        self._order: OrderedDict[int, None] = OrderedDict()  # complete slots that are not spare, the oldest use first
        # complete slots that are spare, in the order in which they were spared
        self._spare: OrderedDict[int, None] = OrderedDict()
        self._tenant: dict[int, int] = {}  # tenant of every slot that is not free
        self._filling: set[int] = set()
        self._pins: dict[int, int] = {}
        self._not_ready = set() if are_ready else set(range(slots))
        free = self._adopt()
        self._free = free if are_ready else []  # the ready ones; others are in _free_later
        self._free_later = {} if are_ready else dict.fromkeys(free)
        self._clock = len(self._order) + 1
        _evict(self.tenancy.join(self))

    def _adopt(self) -> list[int]:
        """Takes over the complete slots of the table. If two slots have one key, which happens only after a loss of
        power, the one used last is kept. Returns the free slots; they are given away from the end."""
        complete = np.flatnonzero(self._state == COMPLETE)
        newest_first = complete[np.argsort(self._touched[complete], kind="stable")][::-1]
        for slot in newest_first.tolist():
            if self._slot.setdefault(self.key(slot), slot) == slot:
                self._order[slot] = None
                self._order.move_to_end(slot, last=False)
                self._tenant[slot] = int(self._owner[slot]) - 1
        lost = np.ones(self.capacity, bool)
        lost[list(self._order)] = False
        self._state[lost & (self._state != FREE)] = FREE  # free records are not written, so that they take no memory
        self._touched[list(self._order)] = np.arange(1, len(self._order) + 1)  # renumbered, whatever the numbers were
        free: list[int] = np.flatnonzero(lost)[::-1].tolist()
        return free

    @property
    def used(self) -> int:
        """How many slots are not free."""
        return self.capacity - len(self._free) - len(self._free_later)

    def make_ready(self, slots: Sequence[int]) -> None:
        """Notes that these slots can be copied to from now on."""
        for slot in reversed(slots):  # slots are given away from the end
            self._not_ready.discard(slot)
            if slot in self._free_later:
                del self._free_later[slot]
                self._free.append(slot)

    def __contains__(self, key: object) -> bool:
        """True if the page is here or being filled in; `find` returns only complete pages. This is not a use."""
        return key in self._slot

    def lacks(self, keys: Iterable[Key]) -> list[Key]:
        """The pages that are neither in the tier nor on their way into it."""
        return list(filterfalse(self._slot.__contains__, keys))

    def find(self, key: Key) -> int | None:
        """The slot that holds the complete page, or None. The page is now the most recently used one."""
        slot = self.peek(key)
        if slot is not None:
            self._touch(slot)
        return slot

    def peek(self, key: Key) -> int | None:
        """Like `find`, but this is not a use."""
        slot = self._slot.get(key)
        return None if slot in self._filling else slot

    def pin_all(self, keys: Sequence[Key]) -> list[int]:
        """Pins the slots of these pages, which must be complete, and returns the slots."""
        slots, pins = list(map(self._slot.__getitem__, keys)), self._pins
        assert self._filling.isdisjoint(slots), "a page that is being filled cannot be read"
        for slot in slots:
            pins[slot] = pins.get(slot, 0) + 1
        return slots

    def keys(self) -> set[Key]:
        """The keys of all complete pages. Costs O(slots)."""
        return set(map(self.key, self.complete_slots))

    @property
    def complete_slots(self) -> list[int]:
        """Complete slots in the order of eviction. Costs O(slots)."""
        return [*self._spare, *self._order]

    def _is_complete(self, slot: int) -> bool:
        return slot in self._order or slot in self._spare

    @property
    def tenants(self) -> Mapping[int, int]:
        """The tenant of every slot that is not free; `ANYBODY` if its page is public."""
        return self._tenant

    def close(self) -> None:
        """Stops counting its pages for their tenants. The table stays as it is, for the next Tier."""
        self.tenancy.leave(self)

    def prepare(self, key: Key, tenant: int = ANYBODY, *, can_wait: bool = False) -> int | None:
        """Returns a slot for a page that is not in the tier, to be filled and then completed or abandoned; None if
        there is none.

        If no slot is free, the first unpinned page in the order of eviction is evicted. If the tenant is at its limit,
        it is one of the tenant's own. `can_wait`: the slot need not be ready yet.
        """
        slots = self.prepare_all([(key, tenant)], [0], can_wait=can_wait)
        return slots[0] if slots else None

    def prepare_all(
        self, pages: Sequence[tuple[Key, int]], places: Sequence[int], *, can_wait: bool = False
    ) -> list[int]:
        """Like `prepare`, for several pages, each given as key and tenant. Returns slots for the first of them, as many
        as there are. The slots rise as `places`, the sources of the pages, do, so that adjacent pages are copied in one
        piece."""
        for key, _ in pages:
            assert key not in self._slot, "the page is in the tier or on its way there"
            assert len(key) == KEY_BYTES, f"a key of {len(key)} bytes"
        taken: list[int] = []
        for _, tenant in pages:
            slot = self._take(tenant, can_wait=can_wait)
            if slot is None:
                break
            taken.append(slot)
        slots = rising_with(places[: len(taken)], taken)
        for slot, (key, tenant) in zip(slots, pages, strict=False):
            self._key_of[slot] = key
            self._owner[slot] = tenant + 1
            self._slot[key] = slot
            self._filling.add(slot)
            self._tenant[slot] = tenant
        return slots

    def _take(self, tenant: int, *, can_wait: bool) -> int | None:
        """A slot without a page, after evicting one if necessary; None if there is none."""
        going = self.evictions_for(tenant, can_wait=can_wait)
        if going is None:
            return None
        _evict(going)
        slot = self._free.pop() if self._free else self._free_later.popitem()[0]
        self._state[slot] = FILLING
        self.tenancy.taken(tenant, self.page_bytes)
        return slot

    def evictions_for(self, tenant: int, count: int = 1, *, can_wait: bool = False) -> list[tuple[Tier, int]] | None:
        """The pages that have to be evicted before the tenant can have `count` slots more; None if it cannot."""
        going = self.tenancy.evictions_for(tenant, count * self.page_bytes)
        if going is None:
            return None
        own = {slot for tier, slot in going if tier is self}
        unready = set[int]() if can_wait else self._not_ready
        missing = count - len(self._free) - (len(self._free_later) if can_wait else 0) - len(own - unready)
        if missing > 0:
            others = filterfalse(own.__contains__, self._unpinned_in_order(unready))
            oldest = list(islice(others, missing))
            going = [*going, *((self, slot) for slot in oldest)]
            missing -= len(oldest)
        return going if missing <= 0 else None

    def has_room(self, tenant: int = ANYBODY, *, can_wait: bool = False) -> bool:
        """True if `prepare` would return a slot."""
        return self.evictions_for(tenant, can_wait=can_wait) is not None

    def may_have(self, tenant: int) -> bool:
        """True if the tenant's limit is at least one page."""
        return self.tenancy.may_have(tenant, self.page_bytes)

    def complete(self, slot: int, checksum: int) -> None:
        """Notes that the page's bytes are in the slot."""
        assert slot in self._filling, f"slot {slot} is not being filled"
        self._filling.remove(slot)
        self._checksum[slot] = checksum
        self._touch(slot)
        self._state[slot] = COMPLETE

    def abandon(self, slot: int) -> None:
        """Drops the page, because filling the slot has failed or its bytes are bad. It can no longer be found. The slot
        is free when it is no longer pinned."""
        is_complete = self._is_complete(slot)
        assert slot in self._filling or is_complete, f"slot {slot} holds no page"
        self._state[slot] = FREE
        del self._slot[self.key(slot)]
        self._filling.discard(slot)
        if is_complete:
            self._spare.pop(slot, None)
            self._order.pop(slot, None)
            self.tenancy.lost(self._tenant[slot], (self, slot))
        if slot not in self._pins:
            self._vacate(slot)

    def _vacate(self, slot: int) -> None:
        if slot in self._not_ready:
            self._free_later[slot] = None
        else:
            self._free.append(slot)
        self.tenancy.freed(self._tenant.pop(slot), self.page_bytes)

    def pin(self, slot: int) -> int:
        """Keeps the page, which is being read, from eviction until `unpin` has been called as often. Neither is a use.
        Returns the slot."""
        assert self._is_complete(slot), f"slot {slot} is not complete"
        self._pins[slot] = self._pins.get(slot, 0) + 1
        return slot

    def unpin(self, slot: int) -> None:
        assert slot in self._pins, f"slot {slot} is not pinned"
        self._pins[slot] -= 1
        if self._pins[slot] == 0:
            del self._pins[slot]
            if not self._is_complete(slot):
                self._vacate(slot)

    def is_pinned(self, slot: int) -> bool:
        return slot in self._pins

    def spare(self, slots: Iterable[int]) -> None:
        """Marks complete pages as spare: until it is used again, each is evicted before all pages that are not spare,
        and after those that were spared before."""
        for slot in slots:
            assert self._is_complete(slot), f"slot {slot} is not complete"
            if slot not in self._spare:
                del self._order[slot]
                self._spare[slot] = None
                self.tenancy.spared(self._tenant[slot], (self, slot))

    def is_spare(self, slot: int | None) -> bool:
        return slot in self._spare

    def checksum(self, slot: int) -> int:
        """The checksum of a complete slot."""
        assert self._is_complete(slot), f"slot {slot} is not complete"
        return int(self._checksum[slot])

    def key(self, slot: int) -> Key:
        """The key of a slot that is filling or complete."""
        return bytes(self._key_of[slot])

    def oldest(self, count: int) -> list[int]:
        """The first `count` complete and unpinned slots in the order of eviction."""
        return list(islice(self._unpinned_in_order(set()), count))

    def _unpinned_in_order(self, but: Collection[int]) -> Iterator[int]:
        """Complete slots in the order of eviction, without pinned ones and those in `but`."""
        unpinned = filterfalse(self._pins.__contains__, chain(self._spare, self._order))
        return filterfalse(but.__contains__, unpinned) if but else unpinned

    def _touch(self, slot: int) -> None:
        self._spare.pop(slot, None)
        self._order[slot] = None
        self._order.move_to_end(slot)
        self._touched[slot] = self._clock
        self._clock += 1
        self.tenancy.used(self._tenant[slot], (self, slot))

    def check_integrity(self) -> None:
        """Asserts that the table agrees with this object, and that every slot is in one state. Costs O(slots)."""
        states = np.zeros(self.capacity, np.uint64)
        states[list(self._filling)] = FILLING
        assert not self._spare.keys() & self._order.keys(), "a page is spare and is not"
        complete = set(self.complete_slots)
        states[list(complete)] = COMPLETE
        for slot in np.flatnonzero(states != self._state).tolist():
            raise AssertionError(f"slot {slot} is {states[slot]}, the table says {self._state[slot]}")
        held = self._filling | complete
        assert self._slot == {self.key(slot): slot for slot in held}, "keys and slots disagree"
        assert len(self._slot) == len(self._filling) + len(complete) == len(held), "a slot is filling and complete"
        dropped = self._pins.keys() - complete
        free = [*self._free, *self._free_later]
        assert len(set(free)) == len(free), "a slot is free twice"
        assert self._free_later.keys() == self._not_ready.intersection(free), (
            "free slots are listed as ready or unready wrongly"
        )
        assert sorted([*free, *held, *dropped]) == list(range(self.capacity)), "a slot is lost, or held and free"
        assert all(count > 0 for count in self._pins.values()), "a pinned slot has no pins"
        owners = {slot: int(self._owner[slot]) - 1 for slot in held}
        assert self._tenant.keys() == held | dropped, "slots with a tenant and slots that are not free differ"
        assert all(self._tenant[slot] == tenant for slot, tenant in owners.items()), "the table names another tenant"
        self.tenancy.check_integrity()
        touched = [*self._touched[list(self._order)].tolist(), self._clock]
        assert all(a < b for a, b in pairwise(touched)), "the table has another order of use"


def whole_pages(nbytes: int) -> int:
    """Rounds up to whole pages of the host."""
    return -(-nbytes // HOST_PAGE) * HOST_PAGE


def limit_tenant(tenancy: Tenancy, tenant: int, nbytes: int | None) -> None:
    """Sets the tenant's limit in bytes over all its tiers, None for no limit, and evicts the pages above it."""
    _evict(tenancy.limit(tenant, nbytes))


def _evict(pages: Iterable[tuple[Tier, int]]) -> None:
    for tier, slot in pages:
        tier.abandon(slot)
