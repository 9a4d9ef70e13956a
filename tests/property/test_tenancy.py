"""Tiers of several models under a limit for each tenant, beside a plain list: which page is evicted, and from which
tier."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from itertools import count

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from djinnd.kvcache.tenancy import ANYBODY, Tenancy
from djinnd.kvcache.tier import Tier, limit_tenant

TENANTS = st.sampled_from([ANYBODY, 0, 1])
SIZES = (3, 5, 5)  # bytes of a page, by model
MODELS = st.integers(0, len(SIZES) - 1)


@dataclass(eq=False)
class Held:
    model: int
    slot: int
    tenant: int
    complete: bool = False
    pins: int = 0

    @property
    def nbytes(self) -> int:
        return SIZES[self.model]

    @property
    def can_go(self) -> bool:
        return self.complete and not self.pins


class TenancyMachine(RuleBasedStateMachine):
    @initialize(slots=st.tuples(*[st.integers(1, 6)] * len(SIZES)))
    def begin(self, slots: tuple[int, ...]) -> None:
        self.slots = slots
        self.tables = [bytearray(Tier.table_bytes(count)) for count in slots]
        self.tenancy = Tenancy()
        self.tiers: dict[int, Tier] = {}  # by model
        self.asleep: dict[int, list[Held]] = {}
        self.held: list[Held] = []  # complete pages in the order of their last use
        self.limits: dict[int, int] = {}
        self.most: dict[int, int] = {}  # the most bytes that a limited tenant may have from now on
        self.keys = count(1)
        for model in range(len(SIZES)):
            self.open(model)

    def open(self, model: int) -> None:
        self.tiers[model] = Tier(self.tables[model], self.slots[model], self.tenancy, SIZES[model])

    def used_by(self, tenant: int) -> int:
        return sum(held.nbytes for held in self.held if held.tenant == tenant)

    def first_to_go(self, tenant: int, nbytes: int) -> list[Held]:
        going: list[Held] = []
        for held in self.held:
            if held.tenant == tenant and held.can_go and sum(other.nbytes for other in going) < nbytes:
                going.append(held)
        return going

    @rule(pages=st.lists(st.tuples(MODELS, TENANTS), min_size=1, max_size=8), fills=st.booleans())
    def prepare(self, pages: list[tuple[int, int]], fills: bool) -> None:
        for model, tenant in pages:
            if model in self.tiers:
                self.prepare_one(model, tenant, fills)

    def prepare_one(self, model: int, tenant: int, fills: bool) -> None:
        tier, here = self.tiers[model], [held for held in self.held if held.model == model]
        over = self.used_by(tenant) + SIZES[model] - self.limits.get(tenant, 1 << 30)
        going = self.first_to_go(tenant, over)
        expected = sum(held.nbytes for held in going) >= over
        if expected and len(here) == self.slots[model] and not any(held.model == model for held in going):
            oldest = [held for held in here if held.can_go][:1]
            expected = bool(oldest)
            going += oldest
        assert tier.has_room(tenant) == expected
        slot = tier.prepare(next(self.keys).to_bytes(16, "little"), tenant)
        assert (slot is not None) == expected
        if slot is not None:
            self.held = [held for held in self.held if held not in going]
            self.held.append(Held(model, slot, tenant, complete=fills))
            if fills:
                tier.complete(slot, 1)

    @precondition(lambda self: self.held)
    @rule(data=st.data(), pinned=st.booleans())
    def go_on(self, data: st.DataObject, pinned: bool) -> None:
        """A filling page becomes complete; a complete one is read, possibly for long."""
        held = data.draw(st.sampled_from(self.held))
        tier = self.tiers[held.model]
        if not held.complete:
            tier.complete(held.slot, 1)
            held.complete = True
        assert tier.find(tier.key(held.slot)) == held.slot
        self.held.remove(held)
        self.held.append(held)
        if pinned:
            tier.pin(held.slot)
            held.pins += 1

    @precondition(lambda self: any(held.pins for held in self.held))
    @rule(data=st.data())
    def unpin(self, data: st.DataObject) -> None:
        held = data.draw(st.sampled_from([held for held in self.held if held.pins]))
        self.tiers[held.model].unpin(held.slot)
        held.pins -= 1

    @precondition(lambda self: any(not held.complete for held in self.held))
    @rule(data=st.data())
    def abandon(self, data: st.DataObject) -> None:
        held = data.draw(st.sampled_from([held for held in self.held if not held.complete]))
        self.tiers[held.model].abandon(held.slot)
        self.held.remove(held)

    @rule(tenant=st.integers(0, 1), nbytes=st.none() | st.integers(0, 24))
    def limit(self, tenant: int, nbytes: int | None) -> None:
        limit_tenant(self.tenancy, tenant, nbytes)
        self.limits.pop(tenant, None)
        if nbytes is not None:
            self.limits[tenant] = nbytes
            self.shed(tenant)
            self.most[tenant] = max(nbytes, self.used_by(tenant))

    def shed(self, tenant: int) -> None:
        going = self.first_to_go(tenant, self.used_by(tenant) - self.limits[tenant])
        self.held = [held for held in self.held if held not in going]

    @rule(model=MODELS)
    def sleep_or_wake(self, model: int) -> None:
        """A sleeping model's pages stay in place and count for no tenant. When it wakes, they are older than all
        others."""
        if model in self.asleep:
            self.open(model)
            self.held = self.asleep.pop(model) + self.held
            for tenant in self.limits:
                self.shed(tenant)
            return
        tier, here = self.tiers.pop(model), [held for held in self.held if held.model == model]
        for held in here:  # no page is filling or pinned
            for _ in range(held.pins):
                tier.unpin(held.slot)
            if not held.complete:
                tier.abandon(held.slot)
            held.pins = 0
        tier.close()
        self.asleep[model] = [held for held in here if held.complete]
        self.held = [held for held in self.held if held.model != model]

    @invariant()
    def agrees(self) -> None:
        for model, tier in self.tiers.items():
            tier.check_integrity()
            here = [held for held in self.held if held.model == model]
            assert tier.tenants == {held.slot: held.tenant for held in here}
            assert tier.complete_slots == [held.slot for held in here if held.complete]
        used = Counter[int]()
        for held in self.held:
            used[held.tenant] += held.nbytes
        assert self.tenancy.uses() == used
        for tenant, limit in self.limits.items():
            self.most[tenant] = max(limit, min(self.most[tenant], used[tenant]))
            assert self.tenancy.used_by(tenant) == used[tenant] <= self.most[tenant], "a tenant has more than it may"


class TestTenancy(TenancyMachine.TestCase):
    settings = settings(max_examples=40, stateful_step_count=40)


@pytest.mark.long
class TestTenancyAtLength(TenancyMachine.TestCase):
    settings = settings(max_examples=100, stateful_step_count=40)
