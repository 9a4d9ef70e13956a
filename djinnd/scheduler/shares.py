"""Fair shares of device time: a virtual clock for each tenant of a class.

A tenant's clock runs by the device time that its rows took, divided by its weight; in its class, whose clock is behind
goes first. That is weighted fair queueing (Demers, Keshav and Shenker 1989) on what steps took, as VTC does it with
tokens (Sheng et al., Fairness in Serving Large Language Models, 2024). Who has nothing to run saves little up: where
the others' clocks stood before their last step, a tenant's is never further behind than LAG lets it.

Their last step does not count because the tenant may have been left out of it in its turn, and a step may take long.
LAG is of the one that is ahead: divided by the laggard's weight, it would be too short for who is to have ten times
as much, and has to wait for a step of the other.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection

from djinn_client.protocol import CLASSES, Class

LAG = 1.0  # seconds of device time, which one has had beyond its share before another forgets it


class Shares:
    """Of all models of a device."""

    def __init__(self) -> None:
        self._clocks: dict[Class, defaultdict[int, float]] = {klass: defaultdict(float) for klass in CLASSES}
        self._before: dict[Class, defaultdict[int, float]] = {klass: defaultdict(float) for klass in CLASSES}
        self._weights: dict[int, float] = {}
        self._unwaited: Counter[tuple[Class, int]] = Counter()  # tokens of steps that nobody has waited for

    def set_weight(self, tenant: int, weight: float) -> None:
        assert weight > 0
        self._weights[tenant] = weight

    def weight(self, tenant: int) -> float:
        return self._weights.get(tenant, 1.0)

    def clock(self, klass: Class, tenant: int) -> float:
        return self._clocks[klass][tenant]

    def charge(self, klass: Class, tenant: int, seconds: float) -> None:
        """For a step."""
        self._before[klass][tenant] = self._clocks[klass][tenant]
        self._clocks[klass][tenant] += seconds / self.weight(tenant)

    @property
    def owes(self) -> bool:
        """Steps have run whose time is not known yet."""
        return bool(self._unwaited)

    def defer(self, klass: Class, tenant: int, tokens: int) -> None:
        """Of such a step."""
        self._unwaited[klass, tenant] += tokens

    def settle(self, seconds: float) -> None:
        """All that was deferred, of whichever model, took so long: the device's queue is one."""
        a_token = seconds / self._unwaited.total()
        for (klass, tenant), tokens in self._unwaited.items():
            self.charge(klass, tenant, tokens * a_token)
        self._unwaited.clear()

    def catch_up(self, klass: Class, tenants: Collection[int]) -> None:
        """These have something to run, on whichever model: none is further behind another than it may save up."""
        if len(tenants) < 2:
            return
        clocks, before = self._clocks[klass], self._before[klass]
        least = max([before[tenant] - LAG / self.weight(tenant) for tenant in tenants])
        for tenant in tenants:
            clocks[tenant] = max(clocks[tenant], least)
