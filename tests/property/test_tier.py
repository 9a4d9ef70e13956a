"""A tier beside a simple model, and processes that die: between two calls, and between two writes to the table."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from djinnd.kvcache.tenancy import ANYBODY, Tenancy
from djinnd.kvcache.tier import Tier, limit_tenant

KEYS = st.integers(0, 11).map(lambda n: n.to_bytes(16, "little"))


def tenant_of(key: bytes) -> int:
    """The tenant of a page. One page of three is public, and the others belong to two tenants."""
    return key[0] % 3 + ANYBODY


def watch(tier: Tier, written: Callable[[], None]) -> None:
    """Calls `written` after every single write to the tier's table."""

    class Column(np.ndarray[Any, Any]):
        def __setitem__(self, where: Any, value: Any) -> None:
            super().__setitem__(where, value)
            written()

    for column in ("_state", "_key_of", "_checksum", "_touched", "_owner"):
        setattr(tier, column, getattr(tier, column).view(Column))


class TierMachine(RuleBasedStateMachine):
    @initialize(slots=st.integers(1, 6), are_ready=st.booleans())
    def begin(self, slots: int, are_ready: bool) -> None:
        self.table = bytearray(Tier.table_bytes(slots))
        self.slots = slots
        self.are_ready = are_ready  # whether all slots are ready from the process's beginning
        self.filling: dict[int, bytes] = {}
        self.complete: list[tuple[int, bytes, int]] = []  # slot, key, checksum; least recently used first
        self.spared: list[int] = []  # slots that are evicted before the others, the first spared very first
        self.pins: Counter[int] = Counter()
        self.dropped: set[int] = set()  # slots found bad and still pinned
        self.bytes_of: dict[int, tuple[bytes, int]] = {}  # for each slot, the page and the checksum of the bytes in it
        self.checksums = 0
        self.tenant: dict[int, int] = {}  # tenant of the slots that are not free
        self.limits: dict[int, int] = {}
        self.most: dict[int, int] = {}  # the most slots that a limited tenant may have from now on
        self.start()

    def start(self) -> None:
        tenancy = Tenancy()
        for tenant, slots in self.limits.items():
            limit_tenant(tenancy, tenant, slots)
        self.tier = Tier(self.table, self.slots, tenancy, are_ready=self.are_ready)
        self.unready = set[int]() if self.are_ready else set(range(self.slots))
        watch(self.tier, self.if_it_died_now)

    def if_it_died_now(self) -> None:
        """The next process takes for complete only slots that are."""
        after = Tier(self.table[:], self.slots)
        for slot in after.oldest(self.slots):
            assert self.bytes_of.get(slot) == (after.key(slot), after.checksum(slot)), f"slot {slot} holds another page"
            assert after.tenants[slot] == tenant_of(after.key(slot)), f"slot {slot} is another tenant's"
        after.check_integrity()

    @property
    def free(self) -> set[int]:
        held = self.filling.keys() | {slot for slot, _, _ in self.complete} | self.dropped
        return set(range(self.slots)) - held

    @property
    def unpinned(self) -> list[int]:
        used = [slot for slot, _, _ in self.complete if slot not in self.spared]
        return [slot for slot in self.spared + used if not self.pins[slot]]

    def used_by(self, tenant: int) -> int:
        held = [*self.filling, *(slot for slot, _, _ in self.complete), *self.dropped]
        return sum(self.tenant[slot] == tenant for slot in held)

    def unpinned_of(self, tenant: int) -> list[int]:
        return [slot for slot in self.unpinned if self.tenant[slot] == tenant]

    def give_way(self, slots: list[int]) -> None:
        self.complete = [entry for entry in self.complete if entry[0] not in slots]
        self.spared = [slot for slot in self.spared if slot not in slots]

    def going(self, tenant: int, count: int = 1, *, can_wait: bool = False) -> list[int] | None:
        """The slots that are evicted to give the tenant so many."""
        over = self.used_by(tenant) + count - self.limits.get(tenant, self.used_by(tenant) + count)
        own = self.unpinned_of(tenant)[: max(over, 0)]
        fit = set(range(self.slots)) if can_wait else set(range(self.slots)) - self.unready
        missing = max(count - len(fit & (self.free | set(own))), 0)
        others = [slot for slot in self.unpinned if slot in fit and slot not in own][:missing]
        return own + others if len(own) >= over and len(others) == missing else None

    def going_one_after_another(self, tenant: int, count: int) -> list[int] | None:
        """The same if every slot is ready, computed one by one."""
        free, used, left = len(self.free), self.used_by(tenant), self.unpinned
        gone: list[int] = []
        for _ in range(count):
            over = used + 1 - self.limits.get(tenant, used + 1)
            own = [slot for slot in left if self.tenant[slot] == tenant]
            needed = over if over > 0 else int(not free)
            step = (own if over > 0 else left)[:needed]
            if len(step) < needed:
                return None
            gone += step
            left = [slot for slot in left if slot not in step]
            free += len(step) - 1
            used += 1 - len(set(step) & set(own))
        return gone

    @rule(key=KEYS, can_wait=st.booleans())
    def prepare(self, key: bytes, can_wait: bool = False) -> None:
        if key in self.tier:
            return
        tenant, free = tenant_of(key), self.free
        going = self.going(tenant, can_wait=can_wait)
        assert self.tier.has_room(tenant) == (self.going(tenant) is not None)
        slot = self.tier.prepare(key, tenant, can_wait=can_wait)
        assert (slot is None) == (going is None)
        if slot is not None and going is not None:
            given = free | set(going)
            assert slot in given, "nobody has given it up"
            assert slot not in self.unready or (can_wait and given <= self.unready), "one that is ready is given first"
            self.give_way(going)
            self.filling[slot] = key
            self.tenant[slot] = tenant
            self.bytes_of.pop(slot, None)  # its bytes change from now on

    @rule(keys=st.lists(KEYS, unique=True, max_size=6), places=st.permutations(range(6)), can_wait=st.booleans())
    def prepare_all(self, keys: list[bytes], places: list[int], can_wait: bool) -> None:
        """Gives the same slots as one call after another, but assigned to pages in another order."""
        pages = [(key, tenant_of(key)) for key in keys if key not in self.tier]
        places = places[: len(pages)]
        slots = self.tier.prepare_all(pages, places, can_wait=can_wait)
        left = set(slots)
        assert len(left) == len(slots)
        for key, tenant in pages:
            free, going = self.free, self.going(tenant, can_wait=can_wait)
            assert (going is None) == (not left)
            if going is None:
                break
            slot = min(left & (free | set(going)), key=lambda slot: slot in self.unready)
            left.remove(slot)
            self.give_way(going)
            self.filling[slot], self.tenant[slot] = key, tenant
            self.bytes_of.pop(slot, None)
        assert not left
        for slot, (key, tenant) in zip(slots, pages, strict=False):
            self.filling[slot], self.tenant[slot] = key, tenant
        rising = [slot for _, slot in sorted(zip(places, slots, strict=False))]
        assert rising == sorted(rising)

    @precondition(lambda self: self.unready)
    @rule(data=st.data())
    def make_ready(self, data: st.DataObject) -> None:
        first = data.draw(st.sampled_from(sorted(self.unready)))
        slots = range(first, min(first + 2, self.slots))
        self.tier.make_ready(slots)
        self.unready.difference_update(slots)

    @rule(tenant=st.integers(0, 1), slots=st.none() | st.integers(0, 4))
    def limit(self, tenant: int, slots: int | None) -> None:
        limit_tenant(self.tier.tenancy, tenant, slots)
        self.limits.pop(tenant, None)
        self.most.pop(tenant, None)
        if slots is not None:
            self.limits[tenant] = slots
            self.give_way(self.unpinned_of(tenant)[: max(self.used_by(tenant) - slots, 0)])
            self.most[tenant] = max(slots, self.used_by(tenant))

    @precondition(lambda self: self.filling)
    @rule(data=st.data())
    def fill(self, data: st.DataObject) -> None:
        self.filled(data.draw(st.sampled_from(sorted(self.filling))))

    @rule(keys=st.sets(KEYS, min_size=2, max_size=6))
    def bring(self, keys: set[bytes]) -> None:
        for key in sorted(keys):
            self.prepare(key)
        for slot in sorted(self.filling):
            self.filled(slot)

    def filled(self, slot: int) -> None:
        self.checksums += 1
        entry = (slot, self.filling.pop(slot), 2**64 - self.checksums)
        self.bytes_of[slot] = entry[1:]
        self.tier.complete(slot, entry[2])
        self.complete.append(entry)

    @precondition(lambda self: self.filling or self.complete)
    @rule(data=st.data())
    def abandon(self, data: st.DataObject) -> None:
        slot = data.draw(st.sampled_from(sorted([*self.filling, *(slot for slot, _, _ in self.complete)])))
        self.tier.abandon(slot)
        self.filling.pop(slot, None)
        self.give_way([slot])
        if self.pins[slot]:
            self.dropped.add(slot)

    @rule(key=KEYS)
    def find(self, key: bytes) -> None:
        found = [entry for entry in self.complete if entry[1] == key]
        assert self.tier.find(key) == (found[0][0] if found else None)
        self.complete = [entry for entry in self.complete if entry[1] != key] + found
        self.spared = [slot for slot in self.spared if (slot, key) not in [entry[:2] for entry in found]]

    @precondition(lambda self: self.complete)
    @rule(data=st.data())
    def spare(self, data: st.DataObject) -> None:
        slot = data.draw(st.sampled_from(sorted(slot for slot, _, _ in self.complete)))
        self.tier.spare([slot])
        if slot not in self.spared:
            self.spared.append(slot)

    @precondition(lambda self: self.complete)
    @rule(data=st.data())
    def pin(self, data: st.DataObject) -> None:
        slot = data.draw(st.sampled_from(sorted(slot for slot, _, _ in self.complete)))
        self.tier.pin(slot)
        self.pins[slot] += 1

    @precondition(lambda self: +self.pins)
    @rule(data=st.data())
    def unpin(self, data: st.DataObject) -> None:
        slot = data.draw(st.sampled_from(sorted(+self.pins)))
        self.tier.unpin(slot)
        self.pins[slot] -= 1
        if not self.pins[slot]:
            self.dropped.discard(slot)

    @rule()
    def die(self) -> None:
        """The next process has the complete pages in the same order of use, and can give every other slot. Its device
        is empty, so it spares nothing."""
        self.filling.clear()
        self.spared.clear()
        self.pins.clear()
        self.dropped.clear()
        self.table = self.table[:]  # the dead process writes no more
        for tenant, slots in self.limits.items():
            self.give_way(self.unpinned_of(tenant)[: max(self.used_by(tenant) - slots, 0)])
        self.start()

    @invariant()
    def agrees(self) -> None:
        self.tier.check_integrity()
        assert self.tier.capacity == self.slots
        assert self.tier.used == self.slots - len(self.free)
        assert self.tier.oldest(self.slots) == self.unpinned
        assert self.tier.oldest(1) == self.unpinned[:1]
        assert [slot for slot in range(self.slots) if self.tier.is_spare(slot)] == sorted(self.spared)
        for slot, key, checksum in self.complete:
            assert key in self.tier and (self.tier.key(slot), self.tier.checksum(slot)) == (key, checksum)
        for slot, key in self.filling.items():
            assert key in self.tier and self.tier.key(slot) == key
        for tenant, limit in self.limits.items():
            self.most[tenant] = max(limit, min(self.most[tenant], self.used_by(tenant)))
            assert self.used_by(tenant) <= self.most[tenant], "a tenant has more than it may"
        assert all(self.tier.tenancy.used_by(tenant) == self.used_by(tenant) for tenant in (ANYBODY, 0, 1))
        after = Tier(self.table[:], self.slots)
        assert after.oldest(self.slots) == [slot for slot, _, _ in self.complete]

    @invariant()
    def room_is_made_for_as_many_as_there_are(self) -> None:
        for tenant in (ANYBODY, 0, 1):
            for count in range(1, self.slots + 2):
                for can_wait in (False, True):
                    going = self.going(tenant, count, can_wait=can_wait)
                    found = self.tier.evictions_for(tenant, count, can_wait=can_wait)
                    assert (found is None) == (going is None)
                    if found is not None and going is not None:
                        assert sorted(slot for _, slot in found) == sorted(going)
                        assert all(tier is self.tier for tier, _ in found)

    @precondition(lambda self: not self.unready)
    @invariant()
    def room_for_many_is_made_as_for_one_after_another(self) -> None:
        for tenant in (ANYBODY, 0, 1):
            for count in range(1, self.slots + 2):
                going, found = self.going_one_after_another(tenant, count), self.tier.evictions_for(tenant, count)
                assert (found is None) == (going is None)
                if found is not None and going is not None:
                    assert sorted(slot for _, slot in found) == sorted(going)


class TestTier(TierMachine.TestCase):
    settings = settings(max_examples=20, stateful_step_count=40)


@pytest.mark.long
class TestTierAtLength(TierMachine.TestCase):
    settings = settings(max_examples=100, stateful_step_count=40)
