"""Engines that died over models that users have brought, counted for each user.

A user may bring the same harmful model under ever new names: each name is set aside after two deaths, and the next one
kills the next engines. So deaths are counted for the user, too. A user with too many of them loads no more models of
its own for a while; configured models stay open to it. Times come from the caller.
"""

from __future__ import annotations

from djinn_client.errors import QuotaExceeded
from djinnd.config import Limits


class UserDeaths:
    """`limits` may be replaced. Of each user the latest deaths are kept, and no more than decide."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self._deaths: dict[int, list[float]] = {}

    def count(self, user: int, at: float) -> None:
        """An engine died, and a model or a request of this user alone is blamed."""
        recent = [death for death in self._deaths.get(user, ()) if at - death <= self.limits.engine_deaths_window]
        self._deaths[user] = [*recent, at][-self.limits.engine_deaths_per_user :]

    def refused_s(self, user: int, at: float) -> float:
        """Seconds until models that this user has brought are loaded again; 0: they are loaded."""
        deaths = self._deaths.get(user, [])
        if len(deaths) < self.limits.engine_deaths_per_user:
            return 0.0
        return max(0.0, deaths[-1] + self.limits.engine_deaths_window - at)

    def expect_load(self, user: int, at: float) -> None:
        """Raises QuotaExceeded while models that this user has brought are not loaded."""
        left = self.refused_s(user, at)
        if not left:
            return
        deaths, limit = len(self._deaths[user]), self.limits.engine_deaths_per_user
        raise QuotaExceeded(
            f"{deaths} engines have died over models that the user who brought this one has brought, and "
            f"limits.engine_deaths_per_user is {limit}: such models are loaded again in {left:.0f} s; configured "
            "models are served as before",
            quota="engine_deaths_per_user",
            rule="",
            limit=limit,
            used=deaths,
            retry_s=round(left, 3),
        )
