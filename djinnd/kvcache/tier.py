"""The slots of one lower tier, host or disk: which page is in which, and which of them gives way to another.

What a page holds follows from its key (prefixes.py), so a tier is a cache that may forget any page at any time: its
tokens are computed anew. What it has not forgotten outlives the process, in a table that whoever owns the memory (the
arena, a mapped file) hands over. The bytes of the slots are the caller's; all of this file is deciding and recording.

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

A process may die between any two writes. So the state is what is written first when a slot is given away, and last when
it is complete, by when the caller has put its bytes there: a complete record is true. Filling slots are free to the
next process. A slot that is not `ready`, as copies cannot go there yet, is given only to who can wait. `touched` rises
with every use; complete slots by it are the order in which they give way, which the next process goes on with. What can
be spared goes before them, the first that could be first: what a session uses on the device, so that tiers hold more
together than if all of one lay in the next, too (Wong and Wilkes, "My cache or yours? Making storage more exclusive",
USENIX 2002), and what a session that is closed has left. Of that the table says nothing, as the device's pages end with
the process. `owner` is the tenant and one, or zero where the page is public, and so nobody's: a tenant's slots are
counted, and may be limited, together with those in other models' tiers (tenancy.py). (A machine that loses power may
keep an old record beside new bytes: that is for the checksum.)
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import chain, filterfalse, islice, pairwise

import numpy as np
import numpy.typing as npt

from djinnd.kvcache.neighbours import rising_with
from djinnd.kvcache.prefixes import KEY_BYTES, Key
from djinnd.kvcache.tenancy import ANYBODY, Place, Tenancy

FREE, FILLING, COMPLETE = 0, 1, 2
RECORD = np.dtype(
    {
        "names": ["state", "key", "checksum", "touched", "owner"],
        "formats": ["<u8", f"V{KEY_BYTES}", "<u8", "<u8", "<u8"],
        "offsets": [0, 8, 24, 32, 40],
        "itemsize": 64,
    }
)
TABLE_ALIGNMENT = 4096
MAX_SLOTS = 1 << 19  # a table of 32 MiB

Table = bytearray | memoryview | npt.NDArray[np.uint8]


class Tier:
    """Of one model, in one thread, which is that of all tiers of its tenancy. No call looks through the slots, but for
    `making_room` and `oldest`, which pass over those that are pinned: as many as are being read."""

    @staticmethod
    def table_bytes(slots: int) -> int:
        """A multiple of 4096."""
        return -(-slots * RECORD.itemsize // TABLE_ALIGNMENT) * TABLE_ALIGNMENT

    def __init__(
        self,
        table: Table,
        slots: int,
        tenancy: Tenancy | None = None,
        page_bytes: int = 1,
        *,
        are_ready: bool = True,
    ) -> None:
        """`table`: `table_bytes(slots)` writable bytes, zeros or what an earlier Tier of as many slots has left. Its
        complete slots are had again. Nobody else writes there for as long as this Tier lives. `tenancy`: who may have
        how many bytes here, and in other tiers that have it too; None: one of its own. `are_ready`: the slots; else
        none is until `make_ready`."""
        assert 0 < slots <= MAX_SLOTS and page_bytes > 0, f"a tier of {slots:,} slots"
        self.capacity = slots
        self.page_bytes = page_bytes
        self.tenancy = Tenancy() if tenancy is None else tenancy
        records = np.frombuffer(table, RECORD, slots)
        self._state, self._key_of = records["state"], records["key"]
        self._checksum, self._touched, self._owner = records["checksum"], records["touched"], records["owner"]
        self._slot: dict[Key, int] = {}  # of what is filling or complete
        self._order: OrderedDict[int, None] = OrderedDict()  # the complete ones that cannot be spared, oldest use first
        self._spare: OrderedDict[int, None] = OrderedDict()  # the others, in the order in which they could be
        self._tenant: dict[int, int] = {}  # of all slots that are not free
        self._filling: set[int] = set()
        self._pins: dict[int, int] = {}
        self._unready = set() if are_ready else set(range(slots))
        free = self._adopt()
        self._free = free if are_ready else []  # of these, those that are ready, and those that are not
        self._free_later = {} if are_ready else dict.fromkeys(free)
        self._clock = len(self._order) + 1
        self.tenancy.join(self)

    def _adopt(self) -> list[int]:
        """Of two slots with one key, which only a loss of power leaves, the one used last is had. → the free slots, of
        which the last is given first"""
        complete = np.flatnonzero(self._state == COMPLETE)
        newest_first = complete[np.argsort(self._touched[complete], kind="stable")][::-1]
        for slot in newest_first.tolist():
            if self._slot.setdefault(self.key(slot), slot) == slot:
                self._order[slot] = None
                self._order.move_to_end(slot, last=False)
                self._tenant[slot] = int(self._owner[slot]) - 1
        lost = np.ones(self.capacity, bool)
        lost[list(self._order)] = False
        self._state[lost & (self._state != FREE)] = FREE  # others are not written, and take no memory
        self._touched[list(self._order)] = np.arange(1, len(self._order) + 1)  # whatever the numbers were
        free: list[int] = np.flatnonzero(lost)[::-1].tolist()
        return free

    @property
    def used(self) -> int:
        """Slots that are not free."""
        return self.capacity - len(self._free) - len(self._free_later)

    def make_ready(self, slots: Sequence[int]) -> None:
        """Copies can go there from now on."""
        for slot in reversed(slots):  # the last that is free is given first
            self._unready.discard(slot)
            if slot in self._free_later:
                del self._free_later[slot]
                self._free.append(slot)

    def __contains__(self, key: object) -> bool:
        """Whether the page is here or, as `find` does not tell, on its way here. It is not a use."""
        return key in self._slot

    def lacks(self, keys: Iterable[Key]) -> list[Key]:
        """Those of these pages that are not `in` the tier."""
        return list(filterfalse(self._slot.__contains__, keys))

    def find(self, key: Key) -> int | None:
        """The slot that holds the page, complete; now the most recently used."""
        slot = self.peek(key)
        if slot is not None:
            self._touch(slot)
        return slot

    def peek(self, key: Key) -> int | None:
        """As `find`, but it is not a use."""
        slot = self._slot.get(key)
        return None if slot in self._filling else slot

    def pin_all(self, keys: Sequence[Key]) -> list[int]:
        """As `pin`, of the slots of these pages, which are complete. → the slots"""
        slots, pins = list(map(self._slot.__getitem__, keys)), self._pins
        assert self._filling.isdisjoint(slots), "a page that is being filled is to be read"
        for slot in slots:
            pins[slot] = pins.get(slot, 0) + 1
        return slots

    def keys(self) -> set[Key]:
        """Of all pages that are complete. O(slots)."""
        return set(map(self.key, self.complete_slots))

    @property
    def complete_slots(self) -> list[int]:
        """In the order in which they give way. O(slots)."""
        return [*self._spare, *self._order]

    def _is_complete(self, slot: int) -> bool:
        return slot in self._order or slot in self._spare

    @property
    def tenants(self) -> Mapping[int, int]:
        """Of every slot that is not free; of a public page's ANYBODY."""
        return self._tenant

    def close(self) -> None:
        """What lies here counts for no tenant any more. The table stays as it is, for the next Tier."""
        self.tenancy.leave(self)

    def prepare(self, key: Key, tenant: int = ANYBODY, *, can_wait: bool = False) -> int | None:
        """A slot for a page of the tenant that is not here, to be filled and then completed or abandoned. Pages that
        nobody has pinned give way to it, the least recently used first: of the tenant's, if it has as much as it may;
        of all, if no slot is free. None if there is no such. `can_wait`: until the slot is ready."""
        slots = self.prepare_all([(key, tenant)], [0], can_wait=can_wait)
        return slots[0] if slots else None

    def prepare_all(
        self, pages: Sequence[tuple[Key, int]], places: Sequence[int], *, can_wait: bool = False
    ) -> list[int]:
        """As `prepare`, for the first of these pages, each a key and its tenant: as many as slots are to be had for.
        They rise as the `places` do that the pages come from, so that neighbours can travel together."""
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
        """A slot that is nobody's page yet."""
        going = self.making_room(tenant, can_wait=can_wait)
        if going is None:
            return None
        for tier, gone in going:
            tier.abandon(gone)
        slot = self._free.pop() if self._free else self._free_later.popitem()[0]
        self._state[slot] = FILLING
        self.tenancy.taken(tenant, self.page_bytes)
        return slot

    def making_room(self, tenant: int, count: int = 1, *, can_wait: bool = False) -> list[Place] | None:
        """The pages that give way when the tenant is given so many slots more; None: they are not to be had."""
        going = self.tenancy.making_room(tenant, count * self.page_bytes)
        if going is None:
            return None
        own = {slot for tier, slot in going if tier is self}
        unready = set[int]() if can_wait else self._unready
        missing = count - len(self._free) - (len(self._free_later) if can_wait else 0) - len(own - unready)
        if missing > 0:
            others = filterfalse(own.__contains__, self._first_to_go(unready))
            oldest = list(islice(others, missing))
            going = [*going, *((self, slot) for slot in oldest)]
            missing -= len(oldest)
        return going if missing <= 0 else None

    def has_room(self, tenant: int = ANYBODY, *, can_wait: bool = False) -> bool:
        """Whether `prepare` has a slot to give."""
        return self.making_room(tenant, can_wait=can_wait) is not None

    def may_have(self, tenant: int) -> bool:
        """Whether it ever may, by the tenant's limit."""
        return self.tenancy.may_have(tenant, self.page_bytes)

    def complete(self, slot: int, checksum: int) -> None:
        """The page's bytes are in the slot."""
        assert slot in self._filling, f"slot {slot} is not being filled"
        self._filling.remove(slot)
        self._checksum[slot] = checksum
        self._touch(slot)
        self._state[slot] = COMPLETE

    def abandon(self, slot: int) -> None:
        """The filling has failed, or the bytes were found bad: nobody finds the page any more. The slot is free, at
        once or when it is not pinned any more."""
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
        if slot in self._unready:
            self._free_later[slot] = None
        else:
            self._free.append(slot)
        self.tenancy.freed(self._tenant.pop(slot), self.page_bytes)

    def pin(self, slot: int) -> int:
        """The page is being read and does not give way, until as many `unpin`. Neither is a use. → the slot"""
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
        """The pages there, which are complete, can be spared: each gives way before all that cannot, until it is used
        again; those that could be before, first."""
        for slot in slots:
            assert self._is_complete(slot), f"slot {slot} is not complete"
            if slot not in self._spare:
                del self._order[slot]
                self._spare[slot] = None
                self.tenancy.spared(self._tenant[slot], (self, slot))

    def is_spare(self, slot: int | None) -> bool:
        return slot in self._spare

    def checksum(self, slot: int) -> int:
        """Of a complete slot."""
        assert self._is_complete(slot), f"slot {slot} is not complete"
        return int(self._checksum[slot])

    def key(self, slot: int) -> Key:
        """Of a slot that is filling or complete."""
        return bytes(self._key_of[slot])

    def oldest(self, count: int) -> list[int]:
        """At most `count` slots that are complete and not pinned: those that can be spared, then the least recently
        used ones."""
        return list(islice(self._first_to_go(set()), count))

    def _first_to_go(self, but: Collection[int]) -> Iterator[int]:
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
        """Asserts that the table says what this object does, and every slot is in one state. O(slots)."""
        states = np.zeros(self.capacity, np.uint64)
        states[list(self._filling)] = FILLING
        assert not self._spare.keys() & self._order.keys(), "a page can be spared and cannot"
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
        assert self._free_later.keys() == self._unready.intersection(free), "free slots that are ready and are not"
        assert sorted([*free, *held, *dropped]) == list(range(self.capacity)), "a slot is lost, or held and free"
        assert all(count > 0 for count in self._pins.values()), "a slot is pinned by nobody"
        owners = {slot: int(self._owner[slot]) - 1 for slot in held}
        assert self._tenant.keys() == held | dropped, "slots that are somebody's and slots that are not free differ"
        assert all(self._tenant[slot] == tenant for slot, tenant in owners.items()), "the table names another tenant"
        self.tenancy.check_integrity()
        touched = [*self._touched[list(self._order)].tolist(), self._clock]
        assert all(a < b for a, b in pairwise(touched)), "the table has another order of use"
