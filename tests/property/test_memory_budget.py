"""The budget beside a dictionary: it never gives more than it has, and a refusal changes nothing."""

from __future__ import annotations

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from djinn_client.errors import OutOfMemory
from djinnd.device.budget import MemoryBudget


class BudgetMachine(RuleBasedStateMachine):
    @initialize(total=st.integers(1, 1000))
    def begin(self, total: int) -> None:
        self.budget = MemoryBudget(total)
        self.held: dict[str, int] = {}
        self.count = 0

    @rule(nbytes=st.integers(0, 600))
    def reserve(self, nbytes: int) -> None:
        self.count += 1
        label = f"r{self.count}"
        free = self.budget.total - sum(self.held.values())
        if nbytes > free:
            with pytest.raises(OutOfMemory) as told:
                self.budget.reserve(label, nbytes)
            assert told.value.data == {"needed": nbytes, "free": free, "budget": self.budget.total}
        else:
            self.budget.reserve(label, nbytes)
            self.held[label] = nbytes

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        label = data.draw(st.sampled_from(sorted(self.held)))
        self.budget.release(label)
        del self.held[label]

    @invariant()
    def agrees(self) -> None:
        if hasattr(self, "budget"):
            self.budget.check_integrity()
            assert self.budget.used == sum(self.held.values()) <= self.budget.total
            assert self.budget.free == self.budget.total - self.budget.used


TestBudget = BudgetMachine.TestCase
