"""Fair shares of device time: a virtual clock for each tenant and class.

A tenant's clock advances by the device time of its rows, divided by its weight. Within a class, the tenant whose clock
is furthest behind is served first. This is weighted fair queueing (Demers, Keshav and Shenker 1989) on measured step
times, as VTC does it with tokens (Sheng et al., Fairness in Serving Large Language Models, 2024).

A tenant without work saves up little time: when it returns, its clock is at most a lag behind. The comparison takes the
other tenants' clocks before their last step, because the tenant may have been left out of that step in its turn, and a
step may take long. The lag is divided by the weight of the tenant that is ahead. Divided by the laggard's weight, it
would be too short for a tenant with ten times the weight that has to wait for a step of the other.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection

from djinn_client.protocol import CLASSES, Class
from djinnd.scheduler.tuning import FAIRNESS


class Shares:
    """The clocks of all tenants, over all models of a device."""

    def __init__(self) -> None:
        self._clocks: dict[Class, defaultdict[int, float]] = {priority: defaultdict(float) for priority in CLASSES}
        self._before: dict[Class, defaultdict[int, float]] = {priority: defaultdict(float) for priority in CLASSES}
        self._weights: dict[int, float] = {}
        self._unwaited: Counter[tuple[Class, int]] = Counter()  # tokens of steps whose time was not measured

    def set_weight(self, tenant: int, weight: float) -> None:
        assert weight > 0
        self._weights[tenant] = weight

    def weight(self, tenant: int) -> float:
        return self._weights.get(tenant, 1.0)

    def clock(self, priority: Class, tenant: int) -> float:
        return self._clocks[priority][tenant]

    def charge(self, priority: Class, tenant: int, seconds: float) -> None:
        """Charges the tenant for a step."""
        self._before[priority][tenant] = self._clocks[priority][tenant]
        self._clocks[priority][tenant] += seconds / self.weight(tenant)

    @property
    def owes(self) -> bool:
        """True if steps have run whose time was not measured."""
        return bool(self._unwaited)

    def defer(self, priority: Class, tenant: int, tokens: int) -> None:
        """Notes tokens of a step whose time was not measured."""
        self._unwaited[priority, tenant] += tokens

    def settle(self, seconds: float) -> None:
        """Divides `seconds` among all deferred tokens, of all models, because the device runs one step at a time."""
        a_token = seconds / self._unwaited.total()
        for (priority, tenant), tokens in self._unwaited.items():
            self.charge(priority, tenant, tokens * a_token)
        self._unwaited.clear()

    def catch_up(self, priority: Class, tenants: Collection[int]) -> None:
        """Moves the clocks of these tenants forward if they are further behind than the lag allows. All of the tenants
        have work, on some model."""
        if len(tenants) < 2:
            return
        clocks, before = self._clocks[priority], self._before[priority]
        least = max([before[tenant] - FAIRNESS.lag_s / self.weight(tenant) for tenant in tenants])
        for tenant in tenants:
            clocks[tenant] = max(clocks[tenant], least)
