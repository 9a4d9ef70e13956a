"""A tier beside a dumb model, and processes that die: between two calls, and between two writes to the table."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from djinnd.kvcache.tier import Tier

KEYS = st.integers(0, 7).map(lambda n: n.to_bytes(16, "little"))


def watch(tier: Tier, written: Callable[[], None]) -> None:
    """Calls `written` after every single write to the tier's table."""

    class Column(np.ndarray[Any, Any]):
        def __setitem__(self, where: Any, value: Any) -> None:
            super().__setitem__(where, value)
            written()

    for column in ("_state", "_key_of", "_checksum", "_touched"):
        setattr(tier, column, getattr(tier, column).view(Column))


class TierMachine(RuleBasedStateMachine):
    @initialize(slots=st.integers(1, 6))
    def begin(self, slots: int) -> None:
        self.table = bytearray(Tier.table_bytes(slots))
        self.slots = slots
        self.filling: dict[int, bytes] = {}
        self.complete: list[tuple[int, bytes, int]] = []  # slot, key, checksum; least recently used first
        self.pins: Counter[int] = Counter()
        self.dropped: set[int] = set()  # found bad, and still pinned
        self.bytes_of: dict[int, tuple[bytes, int]] = {}  # what lies in a slot: of which page, with which checksum
        self.checksums = 0
        self.start()

    def start(self) -> None:
        self.tier = Tier(self.table, self.slots)
        watch(self.tier, self.if_it_died_now)

    def if_it_died_now(self) -> None:
        """Whoever comes next believes of no slot what is not in it."""
        after = Tier(self.table[:], self.slots)
        for slot in after.oldest(self.slots):
            assert self.bytes_of.get(slot) == (after.key(slot), after.checksum(slot)), f"slot {slot} holds another page"
        after.check_integrity()

    @property
    def free(self) -> set[int]:
        held = self.filling.keys() | {slot for slot, _, _ in self.complete} | self.dropped
        return set(range(self.slots)) - held

    @property
    def unpinned(self) -> list[int]:
        return [slot for slot, _, _ in self.complete if not self.pins[slot]]

    @rule(key=KEYS)
    def prepare(self, key: bytes) -> None:
        if key in self.tier:
            return
        slot = self.tier.prepare(key)
        if self.free:
            assert slot in self.free
        elif self.unpinned:
            assert slot == self.unpinned[0], "not the least recently used"
            self.complete = [entry for entry in self.complete if entry[0] != slot]
        else:
            assert slot is None
        if slot is not None:
            self.filling[slot] = key
            self.bytes_of.pop(slot, None)  # from now on its bytes change

    @precondition(lambda self: self.filling)
    @rule(data=st.data())
    def fill(self, data: st.DataObject) -> None:
        slot = data.draw(st.sampled_from(sorted(self.filling)))
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
        self.complete = [entry for entry in self.complete if entry[0] != slot]
        if self.pins[slot]:
            self.dropped.add(slot)

    @rule(key=KEYS)
    def find(self, key: bytes) -> None:
        found = [entry for entry in self.complete if entry[1] == key]
        assert self.tier.find(key) == (found[0][0] if found else None)
        self.complete = [entry for entry in self.complete if entry[1] != key] + found

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
        """The next process has what was complete, in the same order of use, and every other slot to give."""
        self.filling.clear()
        self.pins.clear()
        self.dropped.clear()
        self.table = self.table[:]  # who is dead writes no more
        self.start()

    @invariant()
    def agrees(self) -> None:
        self.tier.check_integrity()
        assert self.tier.capacity == self.slots
        assert self.tier.used == self.slots - len(self.free)
        assert self.tier.oldest(self.slots) == self.unpinned
        assert self.tier.oldest(1) == self.unpinned[:1]
        for slot, key, checksum in self.complete:
            assert key in self.tier and (self.tier.key(slot), self.tier.checksum(slot)) == (key, checksum)
        for slot, key in self.filling.items():
            assert key in self.tier and self.tier.key(slot) == key
        after = Tier(self.table[:], self.slots)
        assert after.oldest(self.slots) == [slot for slot, _, _ in self.complete]


TestTier = TierMachine.TestCase
TestTier.settings = settings(max_examples=100, stateful_step_count=40)
